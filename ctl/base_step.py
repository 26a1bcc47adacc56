"""What training and evaluation steps share: the model, the loss of a batch, the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl import replicas, share
from ctl.errors import UsageError


@tf.autograph.experimental.do_not_convert
def cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Softmax cross-entropy of each example, float32 [n].

    Args:
        labels: classes, integers [n].
        logits: float [n, classes].
        smoothing: mixes the one-hot target with the uniform distribution over the classes (Szegedy
            et al. 2016, arXiv:1512.00567, section 7).
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
    if smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses


@tf.autograph.experimental.do_not_convert
def scale_images(features: Any) -> Any:
    """uint8 images to float32 in [0, 1]; anything else as it is. Batches stay uint8 up to here: a
    quarter of the bytes to move to the device."""
    return tf.nest.map_structure(
        lambda t: tf.cast(t, tf.float32) * (1.0 / 255.0) if t.dtype == tf.uint8 else t, features
    )


class BaseStep:
    """The model, the loss of a batch and the metrics.

    Arguments as in `ctl.TrainStep`.
    """

    training: bool

    def __init__(
        self,
        model: keras.Model,
        loss_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] = cross_entropy,
        metrics: Sequence[keras.metrics.Metric] = (),
    ):
        self.model = model
        self.loss_fn = loss_fn
        self.metrics = list(metrics)

    def preprocess(self, features: Any) -> Any:
        """Features as they come to what the model takes; here `scale_images`."""
        return scale_images(features)

    def loss(self, batch: Any) -> tf.Tensor | tuple[tf.Tensor, Any]:
        """The loss of each example, float [n]; optionally with the outputs that metrics are made
        of.

        Args:
            batch: this replica's part of the global batch, ``(features, labels)`` or ``(features,
                labels, sample_weights)``, n examples. Override for any other form.

        Returns:
            Losses [n], each times its weight, or ``(losses, outputs)``.
        """
        features, labels, weights = share.unpack(batch)
        outputs = self.model(self.preprocess(features), training=self.training)
        losses = self.loss_fn(labels, outputs)
        losses = share.one_for_each_example(losses, source="loss_fn")
        if weights is None:
            return losses, outputs
        if not weights.shape.is_compatible_with(losses.shape):
            raise UsageError(
                f"the weights of a batch have shape {weights.shape}, its losses {losses.shape}: "
                "give one weight for each example, [n] or [n, 1]"
            )
        if weights.shape.rank is None:
            weights = tf.reshape(weights, tf.shape(losses))
        return losses * tf.cast(weights, losses.dtype), outputs

    @tf.autograph.experimental.do_not_convert
    def sum_of(self, losses: Any, batch: Any) -> tuple[tf.Tensor, Any]:
        """The sum of what `loss` returned for ``batch``, a float32 scalar, and the outputs for
        metrics or None.

        Raises:
            UsageError: that was anything but one loss for each example.
        """
        losses, outputs = losses if isinstance(losses, tuple) else (losses, None)
        # A step with a count of its own may have another number of losses, for instance one for
        # each view of an example.
        count = share.rows(batch) if type(self).count is BaseStep.count else None
        losses = share.one_for_each_example(losses, count)
        return tf.reduce_sum(tf.cast(losses, tf.float32)), outputs

    @tf.autograph.experimental.do_not_convert
    def count(self, batch: Any) -> int | tf.Tensor:
        """How many examples are valid in this replica's batch: the sum of their weights, where it
        has weights. A Python integer promises that *every* batch on every replica has this many."""
        features, _, weights = share.unpack(batch)
        if weights is not None:
            return tf.reduce_sum(tf.cast(weights, tf.float32))
        examples = share.rows(features)
        return examples if isinstance(examples, int) else tf.cast(examples, tf.float32)

    def update_metrics(self, batch: Any, outputs: Any) -> None:
        """Updates ``self.metrics``: no collective, replicas are combined when a result is read."""
        _, labels, weights = share.unpack(batch)
        replica = tf.distribute.get_replica_context()
        if replica and replicas.shares_variables(replica.strategy):
            # All replicas have one copy of a metric: what each assigned to it would be summed, with
            # the total so far in every one of them.
            replica.merge_call(self._update_shared_metrics, args=((labels, outputs, weights),))
            return
        if replica and isinstance(replica.strategy, tf.distribute.ParameterServerStrategy):
            self._add_to_metrics(labels, outputs, weights)
            return
        for metric in self.metrics:
            metric.update_state(labels, outputs, sample_weight=weights)

    def _update_shared_metrics(self, strategy: tf.distribute.Strategy, parts: Any) -> None:
        for replica in range(strategy.num_replicas_in_sync):
            labels, outputs, weights = tf.nest.map_structure(
                lambda t, i=replica: (
                    None if t is None else strategy.experimental_local_results(t)[i]
                ),
                parts,
            )
            for metric in self.metrics:
                metric.update_state(labels, outputs, sample_weight=weights)

    def _add_to_metrics(self, labels: Any, outputs: Any, weights: Any) -> None:
        """Adds what this batch alone would make of the metrics: other workers do the same at the
        same time, and where Keras reads and then assigns, theirs would be lost."""
        for metric in self.metrics:
            variables = metric.variables
            none = [tf.zeros(v.shape, v.dtype) for v in variables]
            mine = metric.stateless_update_state(none, labels, outputs, sample_weight=weights)
            for variable, more in zip(variables, mine, strict=True):
                variable.value.assign_add(tf.cast(more, variable.dtype))

    def check_scope(self, strategy: tf.distribute.Strategy) -> None:
        """Raises `UsageError` when a variable was not made in the scope of ``strategy``."""
        variables = [*self.model.variables, *(v for m in self.metrics for v in m.variables)]
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise UsageError(
                    f"variable {variable.path} was not created in the strategy's scope: build the "
                    "model, the optimizer and the metrics inside `with strategy.scope():`"
                )

    def results(self) -> dict[str, float]:
        """Metrics by name, over all replicas, since the last `reset_metrics`."""
        values = {}
        for metric in self.metrics:
            result = metric.result()
            values |= result if isinstance(result, dict) else {metric.name: result}
        return {name: float(value) for name, value in values.items()}

    def reset_metrics(self) -> None:
        for metric in self.metrics:
            metric.reset_state()
