"""The evaluation step, and what the training step shares with it: model, loss, metrics."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.autograph import AutographMethods
from ctl.base.models import Models, as_model
from ctl.base.names import WEIGHTINGS, check_name
from ctl.distributed import local_batch, replicas
from ctl.distributed.replica_variables import ReplicaVariables
from ctl.distributed.watch import watchdog
from ctl.errors import UsageError
from ctl.phases import labels, losses, options, sample_weights
from ctl.phases.checks import (
    check_kind,
    check_loss_and_metrics,
    check_probabilities,
    check_results,
    naming_keys,
    refuses_summaries,
    replaces_loss,
    warn_of_compiled,
)
from ctl.phases.labels import check_ends
from ctl.phases.logged import TAKEN, Logged, Rows
from ctl.phases.metrics import (
    as_taken,
    from_names,
    make_variables,
    makes_variables_late,
    update_metric,
)
from ctl.phases.tracked_state import TrackedState
from ctl.phases.uninitialized import values_of
from ctl.reduce import gather_context


def scale_images(features: Any, inputs: Sequence[keras.KerasTensor] = ()) -> Any:
    """Scales uint8 tensors to float32 in [0, 1]; returns other tensors unchanged. So it does with
    tokens: those of an input in ``inputs`` of the model that takes integers.

    Batches stay uint8 until this point, so that a quarter of the bytes moves to the device.
    """
    tensors = tf.nest.flatten(features)
    if isinstance(features, dict) and features.keys() == {one.name for one in inputs}:
        inputs = sorted(inputs, key=lambda one: one.name)  # as `tf.nest` has them
    takes_integers = [tf.as_dtype(one.dtype).is_integer for one in inputs]
    if len(takes_integers) != len(tensors):
        takes_integers = [False] * len(tensors)
    scaled = [
        tf.cast(t, tf.float32) * (1.0 / 255.0) if t.dtype == tf.uint8 and not integers else t
        for t, integers in zip(tensors, takes_integers, strict=True)
    ]
    return tf.nest.pack_sequence_as(features, scaled)


def _warn_of_pairs(step: BaseStep, each: Any, batch: Any, outputs: Any) -> None:
    """Warns once of a `loss` of the user's own that `losses.broadcasts`, which may be meant."""
    if not step.overrides("loss") or step.broadcasts or not local_batch.has_parts(batch):
        return
    if losses.broadcasts(each, batch[1], outputs):
        step.broadcasts = True
        logging.warning(
            "%s.loss() combines [n] with [n, 1] to [n, n], so each example meets all others: if "
            "that is not meant, give labels and outputs one rank, such as labels[:, None]",
            type(step).__name__,
        )


def _specs_of(inputs: Any) -> Any:
    """`tf.TensorSpec` of ``inputs`` for any number of examples; None unless all are [n, ...]."""
    if not all(isinstance(t, tf.Tensor) and t.shape.rank for t in tf.nest.flatten(inputs)):
        return None
    return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), inputs)


class BaseStep(AutographMethods):
    """The model, the loss of a batch and the metrics. Arguments as in `ctl.TrainStep`."""

    training: bool
    class_weight: Mapping[int, float] | None = None  # of a training
    counts = "examples"  # what `count` counts; other than examples, records have its rate, too

    def __init_subclass__(cls) -> None:
        options.declare(cls)

    def __init__(
        self,
        model: keras.Model | Mapping[str, keras.Model],
        loss_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | str = losses.cross_entropy,
        metrics: Sequence[keras.metrics.Metric | str] | None = (),
        *,
        weighted_metrics: Sequence[keras.metrics.Metric | str] | None = (),
        weighting: str = "examples",
        **own: Any,
    ):
        options.take(self, own)
        model = as_model(model)
        check_kind(model)
        self.loss_fn: Callable[..., Any] = losses.per_example(loss_fn, model)
        logits = losses.takes_logits(self.loss_fn) and losses.gives_logits(model) is not False
        metrics = from_names(metrics, logits, self.loss_fn)
        weighted_metrics = from_names(weighted_metrics, logits, self.loss_fn, others=metrics)
        check_loss_and_metrics(
            losses.cross_entropy if self.overrides("loss") else self.loss_fn,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
        )
        check_name("weighting", weighting, WEIGHTINGS)
        if isinstance(model, Models) and not replaces_loss(self):
            raise UsageError(
                f"{type(self).__name__} has the models {', '.join(model)}, and no loss() that says "
                "which to call: override loss() in a subclass of ctl.TrainStep, and for an "
                "evaluation in one of ctl.EvalStep (its eval_step)"
            )
        self.model = model
        warn_of_compiled(self)
        self.metrics = list(metrics)
        self.weighted_metrics = list(weighted_metrics)
        self.weighting = weighting
        self.logged = Logged()
        self.per_replica_variables = ReplicaVariables()
        self.input_specs: Any = None  # specs of the model's inputs, once traced
        self.returns_outputs = True  # of `loss`, in the last trace
        self.has_weights = False  # of batches, in the last trace
        self.broadcasts = False  # its loss_fn has [n, n], in the last trace
        self._window: tuple[Sequence[tf.Tensor], Rows] | None = None  # see `window`

    def preprocess(self, features: Any) -> Any:
        """Turns the features of a batch into the input of the model; by default `scale_images`."""
        return scale_images(features, getattr(self.model, "inputs", None) or ())

    def loss(self, batch: Any) -> tf.Tensor | tuple[tf.Tensor, Any]:
        """Computes the loss of each example; may also return the outputs for the metrics.

        Args:
            batch: n examples, this replica's part of the global batch: ``(features, labels)`` or
                ``(features, labels, sample_weights)``. Override for any other form: one tensor, a
                dictionary, or a nest of them.

        Returns:
            ``losses`` or ``(losses, outputs)``. ``losses`` is float [n], each times the weight of
            its example; a list of such tensors, one per parameter group; or, if the optimizer is a
            dict, a dict with one per model that trains.

        Raises:
            UsageError: ``loss_fn`` does not return [n], or there is not one weight per example.
        """
        check_loss_and_metrics(self.loss_fn)  # an override that calls this one needs it, too
        features, labels, weights = local_batch.unpack(batch)
        inputs = self.preprocess(features)
        self.input_specs = _specs_of(inputs)
        outputs = self.model(inputs, training=self.training)
        if self.training:
            check_ends(self.loss_fn, self.model, outputs)
        if isinstance(self.loss_fn, keras.losses.Loss):
            each = losses.of_each(self.loss_fn, labels, outputs)
        else:
            with naming_keys((), labels=labels, outputs=outputs):
                each = losses.of_function(self.loss_fn, labels, outputs)
        if losses.broadcasts(each, labels, outputs) and not self.broadcasts:
            if each.shape.rank != 1:
                raise UsageError(losses.BROADCASTS)
            self.broadcasts = True
            logging.warning("%s", losses.BROADCASTS)
        each = local_batch.one_for_each_example(each, source="loss_fn")
        if weights is None:
            return each, outputs
        if not weights.shape.is_compatible_with(each.shape):
            raise UsageError(
                f"the weights of a batch have shape {weights.shape}, its losses {each.shape}: "
                "give one weight for each example, [n] or [n, 1]"
            )
        if weights.shape.rank is None:
            weights = tf.reshape(weights, tf.shape(each))
        return each * tf.cast(weights, each.dtype), outputs

    def sum_of(self, losses: Any, batch: Any) -> tuple[tf.Tensor | list[tf.Tensor], Any]:
        """Returns the sum of ``losses``, a float32 scalar, and the outputs for metrics or None. A
        list of losses gives a list of sums, and so does a dict: in the order of the names.

        Args:
            losses: as returned by `loss`.
            batch: the batch that `loss` was given.

        Raises:
            UsageError: there is not one loss for each example, or for each model of a dict.
        """
        losses, outputs = losses if isinstance(losses, tuple) else (losses, None)
        if losses is None:
            raise UsageError(f"{type(self).__name__}.loss() returned None: return the losses, [n]")
        if isinstance(losses, list | Mapping):
            losses = self._in_order(losses)
        # A step that overrides `count` may have another number of losses, for instance one per view
        # of an example.
        count = None if self.overrides("count") else local_batch.rows(batch)

        def total(one: Any) -> tf.Tensor:
            _warn_of_pairs(self, one, batch, outputs)
            one = local_batch.one_for_each_example(one, count)
            if count is not None and self.overrides("loss"):
                local_batch.check_weights_used(one, batch, type(self).__name__)
            return tf.reduce_sum(tf.cast(one, tf.float32))

        return [total(o) for o in losses] if isinstance(losses, list) else total(losses), outputs

    def _in_order(self, losses: Any) -> list[tf.Tensor]:
        """Returns several losses as a list. Those of a dict are named as the optimizers are; in an
        evaluation, as the models."""
        names = list(self.model) if isinstance(self.model, Models) else []
        if self.training:
            optimizer = vars(self)["optimizer"]
            names = list(optimizer) if isinstance(optimizer, Mapping) else []
        if isinstance(losses, list):
            if not (self.training and names):
                return losses
            wrong = "a list of losses, and the optimizer is a dict"
        elif (
            losses
            and losses.keys() <= {*names}
            and (len(losses) == len(names) or not self.training)
        ):
            return [losses[name] for name in names if name in losses]
        else:
            wrong = f"losses of {', '.join(map(str, losses)) or 'nothing'}"
        wanted = f"a dict with one for each of {', '.join(names)}"
        if not names:
            wanted = (
                "one loss, or give TrainStep(model=, optimizer=) dicts with these names, by flags "
                "in its __init__ as ctl.recipes.gan does"
            )
        raise UsageError(f"{type(self).__name__}.loss() returned {wrong}: return {wanted}")

    def count(self, batch: Any) -> int | tf.Tensor:
        """Number of valid examples in this replica's batch: its rows; with weights, what
        ``weighting`` says, see `ctl.phases.sample_weights.number`.

        Returns:
            A Python integer if *every* batch on every replica has this many; else a float32 scalar.
        """
        weights = local_batch.weights_of(batch)
        if weights is not None:
            if not self.has_weights:
                name = type(self).__name__
                logging.info("%s: %s", name, sample_weights.describe(self.weighting))
                self.has_weights = True
            return sample_weights.number(weights, self.weighting)
        examples = local_batch.rows(batch)
        return examples if isinstance(examples, int) else tf.cast(examples, tf.float32)

    def overrides(self, method: str, base: type[BaseStep] | None = None) -> bool:
        """Whether a subclass of ``base`` (by default `BaseStep`) or this object replaces
        ``method``."""
        original = getattr(base or BaseStep, method)
        return method in vars(self) or getattr(type(self), method) is not original

    def update_metrics_of(self, batch: Any, outputs: Any) -> None:
        """Calls `update_metrics` if `loss` has returned outputs. Otherwise `results` leaves out
        metrics that nothing has updated."""
        self.returns_outputs = outputs is not None
        if self.returns_outputs:
            with naming_keys(batch, outputs=outputs):
                self.update_metrics(batch, outputs)
        elif given := self.given_metrics:
            logging.warning(
                "%s.loss() returns no outputs, so %s is logged only if loss() updates it: return "
                "(losses, outputs)",
                *(type(self).__name__, ", ".join(metric.name for metric in given)),
            )

    def update_metrics(self, batch: Any, outputs: Any) -> None:
        """Updates the metrics without a collective. Reading a result combines the replicas.

        ``self.metrics`` count each example of a weight that is not 0 once,
        ``self.weighted_metrics`` by its weight. If `cross_entropy` takes probabilities, as with
        mixup, metrics get the most likely class.
        """
        if not self.given_metrics:
            return
        _, labels, weights = local_batch.unpack(batch)
        if self.is_cross_entropy and losses.are_probabilities(labels, outputs):
            labels = tf.argmax(labels, axis=-1)
        # The 0 or 1 of each weight, and the weight itself.
        pair = (None, None) if weights is None else (sample_weights.present(weights), weights)
        replica = tf.distribute.get_replica_context()
        if replica and replicas.shares_variables(replica.strategy):
            # All replicas share one copy of a metric. TensorFlow would sum the values that the
            # replicas assign, and each of these values includes the total so far.
            replica.merge_call(self._update_shared_metrics, args=((labels, outputs, pair),))
            return
        if replica and replicas.is_asynchronous(replica.strategy):
            self._add_to_metrics(labels, outputs, pair)
            return
        for metric, weights in self._with_weights(pair):
            update_metric(metric, labels, outputs, weights)
        check_results(self.given_metrics)

    @property
    def given_metrics(self) -> list[keras.metrics.Metric]:
        """``self.metrics`` and ``self.weighted_metrics``."""
        return [*self.metrics, *self.weighted_metrics]

    def _with_weights(self, pair: Any) -> Iterator[tuple[keras.metrics.Metric, Any]]:
        """Yields each metric with its weights. ``pair``: those of `metrics`, and of the others."""
        for metrics, weights in zip((self.metrics, self.weighted_metrics), pair, strict=True):
            yield from ((metric, weights) for metric in metrics)

    def _update_shared_metrics(self, strategy: tf.distribute.Strategy, parts: Any) -> None:
        for replica in range(strategy.num_replicas_in_sync):
            labels, outputs, pair = tf.nest.map_structure(
                lambda t, i=replica: (
                    None if t is None else strategy.experimental_local_results(t)[i]
                ),
                parts,
            )
            for metric, weights in self._with_weights(pair):
                update_metric(metric, labels, outputs, weights)

    def _add_to_metrics(self, labels: Any, outputs: Any, pair: Any) -> None:
        """Adds the values of this batch to the variables. Keras reads and then assigns, which loses
        concurrent updates of other workers."""
        for metric, weights in self._with_weights(pair):
            variables = metric.variables
            none = [tf.zeros(v.shape, v.dtype) for v in variables]
            taken = as_taken(metric, labels, outputs)
            values = metric.stateless_update_state(none, *taken, sample_weight=weights)
            for variable, value in zip(variables, values, strict=True):
                variable.value.assign_add(tf.cast(value, variable.dtype))

    def variable(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        per_replica: bool = False,
        on_resize: str = "refuse",
    ) -> tf.Variable:
        """Makes a variable of zeros that belongs to the step; phases may assign to it. Call it in
        ``__init__``, in the strategy's scope. Keep the variable in an attribute, so that it is
        saved.

        Args:
            name: name of the variable.
            shape: shape of the value on one replica.
            dtype: type of the value.
            per_replica: whether each replica has its own value. Otherwise, all replicas must assign
                the same value.
            on_resize: what a restore on another number of replicas does with per-replica values:
                ``"refuse"`` raises `CheckpointError`, ``"sum"`` gives replica 0 their sum and other
                replicas zeros, ``"zero"`` gives all replicas zeros.

        Raises:
            UsageError: ``on_resize`` has another value, or replicas share one copy of every
                variable.
        """
        if per_replica:
            return self.per_replica_variables.make(name, shape, dtype, on_resize)
        return tf.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name=name,
        )

    def unsynchronized_variables(self) -> Sequence[tf.Variable]:
        """Variables of the model and its optimizers that this step lets differ between replicas, as
        in local SGD; by default none. For a Keras variable, return its ``value``.

        A checkpoint holds the values of all replicas, and is restored only on the same number of
        replicas. Each worker keeps all values in host memory."""
        return ()

    @functools.cached_property
    def tracked(self) -> TrackedState:
        """The model and the objects in attributes, see `ctl.phases.tracked_state`. The loop or the
        evaluator reads it first, when the step is complete."""
        return TrackedState(self)

    def check_scope(self, strategy: tf.distribute.Strategy) -> None:
        """Raises `UsageError` if a variable was not created in the scope of ``strategy``, if only
        all workers together could read it, or if a metric is an attribute of the step while
        replicas share one copy of every variable."""
        if self.tracked.metrics and replicas.has_one_copy(strategy):
            raise UsageError(
                f"metric {self.tracked.metrics[0].name} is an attribute of the step, whose updates "
                "by several replicas would be lost with this strategy: give it as one of metrics"
            )
        if "loss" in [metric.name for metric in self.all_metrics()]:
            logging.warning(
                "%s has a metric called loss, which records have in place of the loss of the "
                "training: give it another name, or leave it out",
                type(self).__name__,
            )
        metrics = [v.value for m in self.all_metrics() for v in m.variables]
        extra = [*self.tracked.extra_variables, *self.per_replica_variables.variables]
        made = values_of(self.model.variables, strategy)
        for variable in [*made, *extra, *metrics]:
            if not strategy.extended.variable_created_in_scope(variable):
                other = getattr(variable, "_distribute_strategy", None)
                if other and replicas.is_default(strategy):
                    raise UsageError(
                        f"variable {variable.name} was created in the scope of a "
                        f"{type(other).__name__}: give strategy= to ctl.Loop and ctl.Evaluator, too"
                    )
                raise UsageError(
                    f"variable {variable.name} was not created in the strategy's scope: build the "
                    "model, the optimizer, the metrics and what the step has of its own inside "
                    "`with strategy.scope():`"
                )
        replicas.check_reads(strategy, [*made, *self.tracked.extra_variables])

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is `cross_entropy`, with or without smoothing."""
        return getattr(self.loss_fn, "func", self.loss_fn) is losses.cross_entropy

    def check_labels(self, dataset: Any, step: int | None = None) -> None:
        """Raises `UsageError` if the model or the labels do not fit the loss, or ids their
        Embedding. Checks the cross entropies of ctl, and ``from_logits`` of those of Keras: with
        another loss, labels may mean anything.

        Args:
            dataset: see `ctl.phases.labels.check_labels`.
            step: the step of a batch, which is read again if that takes little time.
        """
        if step is None:
            labels.warn_of_not_finite(dataset)
            check_probabilities(self)
        if self.class_weight:
            labels.check_weighted_classes(dataset, step)
        if replaces_loss(self):
            return
        loss_fn: Any = getattr(self.loss_fn, "func", self.loss_fn)  # of a `functools.partial`
        if not self.overrides("update_metrics"):
            labels.check_one_output(loss_fn, self.given_metrics, self.model)
        if loss_fn not in labels.CHECKED:
            labels.check_from_logits(self.loss_fn, self.model)
        of_numbers = losses.takes_logits(loss_fn) is None
        if of_numbers and losses.is_of_library(loss_fn):
            labels.check_no_text(dataset)
        if self.training:
            labels.check_softmax(self.model)
        if not self.overrides("preprocess"):
            labels.check_features(self.model, dataset)
            if step is None:
                labels.check_scaled(self.model, dataset, warns=self.training)
            labels.check_ids(self.model, dataset, step)
        if self.training and losses.takes_logits(loss_fn) is not None:
            labels.check_several_classes(dataset)
            labels.check_weights_of(self.class_weight or (), self.model)
        if labels.takes_classes(loss_fn):
            labels.check_has_classes(self.model)
            labels.check_labels(labels.CROSS_ENTROPY, self.model, dataset, step)
        if labels.takes_binary(loss_fn):
            labels.check_labels(labels.BINARY, self.model, dataset, step)
        if loss_fn not in labels.CHECKED:
            return
        if step is None and self.training:
            labels.check_outputs(loss_fn.__name__, self.model)
        try:
            if self.is_cross_entropy:
                labels.check_has_classes(self.model)
            labels.check_labels(
                loss_fn.__name__, self.model, dataset, step, probabilities=self.is_cross_entropy
            )
        except UsageError as error:
            if self.training or not self.is_cross_entropy:
                raise
            raise UsageError(
                f"{error}; if the training has another loss than cross_entropy, give it to the "
                "EvalStep, too"
            ) from error

    def log(self, name: str, value: tf.Tensor | float, reduce: str = "mean") -> None:
        """Adds a scalar to the log records, from any phase. It adds no collective.

        Args:
            name: name in the record. No metric or other scalar may have it.
            value: float of any shape. A replica without examples logs nothing.
            reduce: ``"mean"``, ``"sum"`` or ``"max"`` of all elements that all replicas have logged
                since the last record, or in the epoch; or ``"last"``, the mean over the elements of
                the last value on replica 0.

        Raises:
            UsageError: see `ctl.phases.logged.Logged.add`.
        """
        taken = [*TAKEN, *(metric.name for metric in self.all_metrics())]
        self.logged.add(name, value, reduce, taken)

    def results(self) -> dict[str, float]:
        """Returns values by name, over all replicas, since `reset_metrics`, or of `window`: of
        ``given_metrics``, of metrics that are attributes of the step, and of logged scalars.

        With several workers, all must call it at the same steps.
        """
        totals, rows = self._window or (self.metric_totals(), self.logged.rows)
        left = iter(totals)
        values: dict[str, Any] = {}
        # A worker that hangs in a user's `result` must not seem to wait for other workers.
        with watchdog.host("the results of the metrics"):
            for metric in self.all_metrics():
                variables = [next(left) for _ in metric.variables]
                unknown = not self.returns_outputs and any(metric is m for m in self.given_metrics)
                if unknown and not any(np.any(total) for total in variables):
                    continue
                result = metric.stateless_result(variables)
                result = result if isinstance(result, dict) else {metric.name: result}
                # A result may be a variable itself, which holds the value of one replica.
                totals_of = dict(zip(map(id, metric.variables), variables, strict=True))
                values |= {name: totals_of.get(id(r), r) for name, r in result.items()}
            values |= self.logged.values(rows)
            # One number may have any rank: NumPy makes a float of rank 0 alone.
            return {name: float(np.asarray(value).item()) for name, value in values.items()}

    def metric_totals(self) -> list[tf.Tensor]:
        """The value of each variable of `all_metrics`, over all replicas: TensorFlow combines them,
        by sums as a rule, where it is read. With several workers, all must call it at the same
        steps."""
        with watchdog.collective("reading the metrics"):
            return [tf.identity(v.value) for m in self.all_metrics() for v in m.variables]

    @contextlib.contextmanager
    def window(self, totals: Sequence[tf.Tensor], rows: Rows) -> Iterator[None]:
        """Inside, `results` are those of ``totals``, as of `metric_totals`, and of the ``rows`` of
        `ctl.phases.logged.Logged`."""
        self._window = totals, rows
        try:
            yield
        finally:
            self._window = None

    def reset_metrics(self) -> None:
        """Resets what `results` returns."""
        self.logged.reset()
        # A user's `reset_state` may read a variable, which waits for the other workers.
        with watchdog.collective("resetting the metrics"):
            for metric in self.all_metrics():
                with _Assigned() as assigned:
                    metric.reset_state()
                for variable, value in assigned.values:
                    replicas.assign_alike(variable.value, value)

    def all_metrics(self) -> list[keras.metrics.Metric]:
        """``given_metrics``, and metrics that are attributes of the step."""
        return [*self.given_metrics, *self.tracked.metrics]


def build_model(step: BaseStep, strategy: tf.distribute.Strategy, dataset: Any) -> None:
    """Builds the model of ``step`` as its first call on features of ``dataset`` would, and metrics
    that make variables in their first update, such as F1Score; runs nothing. Does nothing to what
    is built, or if batches are not ``(features, labels)``, with or without weights.

    Raises:
        UsageError: a metric takes other shapes.
    """
    usual = not (replaces_loss(step) or step.overrides("update_metrics"))
    metrics = [one for one in step.given_metrics if usual and makes_variables_late(one)]
    spec: Any = None if step.model.built and not metrics else labels.batch_spec(dataset)
    if not local_batch.has_parts(spec):
        return
    inputs = tf.function(step.preprocess).get_concrete_function(spec[0]).structured_outputs
    symbols = tf.nest.map_structure(
        lambda tensor: keras.KerasTensor(tensor.shape, tensor.dtype.name), inputs
    )
    with strategy.scope():
        outputs = step.model(symbols)
        for metric in metrics:
            make_variables(metric, _zeros(spec[1]), _zeros(outputs))


def _zeros(spec: Any) -> tf.Tensor:
    """One example."""
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)


class _Assigned(keras.StatelessScope):
    """Inside, collects assignments to Keras variables in ``values``; variables do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[keras.Variable, tf.Tensor]] = []

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        self.values.append(update)
        super().add_update(update)


class EvalStep(BaseStep):
    """One evaluation step on one replica. Arguments as in `TrainStep`."""

    training = False

    def __call__(self, batch: Any) -> tf.Tensor:
        """Updates the metrics. Returns float32 [2]: sum of the losses, number of valid examples."""
        computed, empty = local_batch.pad_empty(batch)
        counted = self.tracked.counted_unless(empty, *self.logged.variables)
        with counted, gather_context(1, empty), refuses_summaries(self), naming_keys(computed):
            losses = self.loss(computed)
        loss, outputs = self.sum_of(losses, computed)
        loss, outputs = local_batch.mask_empty(empty, tf.reduce_sum(loss), outputs)
        self.update_metrics_of(batch, outputs)
        return tf.stack([loss, tf.cast(self.count(batch), tf.float32)])
