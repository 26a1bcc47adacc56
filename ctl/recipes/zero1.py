"""Each replica keeps the slots of the optimizer for its part of the weights only.

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1: stage 1 of ZeRO. Each of N replicas updates
1/N of the numbers of each weight, and gathers those of the others. The gradients are summed and
clipped as always, so N replicas equal one. A line of the log says how much memory the slots take::

    python -m ctl.train --model_dir=/tmp/zero --step=ctl.recipes.zero1:ZeRO1 --optimizer=adamw \\
        --replicas=2

For w bytes of weights, a replica keeps 3w / N for Adam in place of 2w: a copy of its part, and two
slots of that. In a ring, it sends 2w (N - 1) / N bytes for the all-reduce and w (N - 1) / N for the
gather. The paper sends 2w (N - 1) / N in all, with a reduce-scatter, for which TensorFlow has no
kernel on CPUs. A checkpoint has the slots of all replicas, and is restored on as many. Each worker
has room for all of them in host memory, so on CPUs this saves no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

import ctl
from ctl import UsageError, optimizers, replicas

# These need whole variables, a product that is taken once a step, or slots that begin as weights.
_REFUSED = "Lamb", "Adafactor", "Muon", "Nadam", "ScheduleFreeAdamW"


class ZeRO1(ctl.TrainStep):
    """Trains with slots of 1/N of the weights on each of N replicas.

    Args:
        args, options: see `ctl.TrainStep`.

    Raises:
        UsageError: there are parameter groups, the optimizer is built already or is Lamb,
            Adafactor, Muon, Nadam or ScheduleFreeAdamW, the weights have several dtypes, or all
            replicas share one copy of them.
    """

    optimizer: keras.Optimizer

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        weights, kinds = self.model.trainable_variables, type(self.optimizer).__mro__
        one = isinstance(self.optimizer, keras.Optimizer) and not self.optimizer.built
        if not one or any(kind.__name__ in _REFUSED for kind in kinds):
            raise UsageError(f"ZeRO1 needs one new optimizer, not one of {', '.join(_REFUSED)}")
        if len({v.dtype for v in weights}) != 1:
            raise UsageError("ZeRO1 needs weights of one dtype")
        if replicas.has_one_copy(tf.distribute.get_strategy()):
            raise UsageError("ZeRO1 needs a copy of the weights on each replica: use mirrored")
        parts = tf.distribute.get_strategy().num_replicas_in_sync
        self.sizes = [-(-v.shape.num_elements() // parts) for v in weights]
        part = keras.Variable("zeros", [sum(self.sizes)], weights[0].dtype, False, name="part")
        self.optimizer.build([part])
        # A function, so that the variable is not saved: a step assigns to it before it reads it.
        self.part = lambda: part.value
        copies = 1 + len(self.unsynchronized_variables())
        kept = copies * part.value.dtype.size * sum(self.sizes) / 1024
        logging.info("ZeRO-1: %.1f KiB on each replica, 1/%d of slots and weights", kept, parts)

    def unsynchronized_variables(self) -> list[tf.Variable]:
        """The slots; other variables of an optimizer are scalars."""
        return [v.value for v in self.optimizer.variables if v.ndim]

    @tf.autograph.experimental.do_not_convert
    def apply(self, gradients: list[tf.Tensor | None], finite: tf.Tensor | None = None) -> None:
        """Updates the part of this replica, and gathers those of the others."""
        if any(g is None for g in gradients):
            raise UsageError("ZeRO1 needs a gradient of each variable of the model")
        context, part = tf.distribute.get_replica_context(), replicas.own_copy(self.part())
        weights = [v.read_value() for v in self.trainable_variables]
        rate = self.updater.learning_rates()[0]
        decay = tf.cast(rate * (self.optimizer.weight_decay or 0.0), part.dtype)
        used = [optimizers.is_decayed(self.optimizer, v) for v in self.updater.trainable_variables]
        decayed = [w - decay * w if use else w for w, use in zip(weights, used, strict=True)]
        context.merge_call(self.update, (self.cut(decayed), self.cut(gradients), rate, finite))
        rows = context.all_gather(part.read_value()[tf.newaxis], axis=0, options=self.options)
        columns = tf.split(rows, self.sizes, axis=1)
        for variable, old, numbers in zip(
            self.updater.trainable_variables, weights, columns, strict=True
        ):
            new = tf.reshape(tf.reshape(numbers, [-1])[: tf.size(old)], old.shape)
            new = new if variable.constraint is None else variable.constraint(new)
            new = new if finite is None else tf.where(finite, new, old)
            replicas.own_copy(variable.value).assign(new)
        super().apply([None] * len(gradients), finite)

    def update(
        self,
        strategy: tf.distribute.Strategy,
        weights: tf.Tensor,
        gradients: tf.Tensor,
        rate: tf.Tensor,
        finite: tf.Tensor | None,
    ) -> None:
        """Updates the part of each replica, from its ``weights``, unless a gradient is not finite.
        All but ``strategy`` have another value on each replica."""

        def one(part: tf.Variable, *args: tf.Tensor) -> None:
            part.assign(args[0])
            self.optimizer.update_step(args[1], part, args[2])

        def each() -> None:
            strategy.extended.update(self.part(), one, (weights, gradients, rate), group=False)

        if finite is None:
            each()
        else:
            tf.cond(strategy.experimental_local_results(finite)[0], each, lambda: None)

    def cut(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """This replica's part of ``tensors``, which have the shapes of the weights: 1/N of the
        numbers of each, filled up with zeros. [numbers]."""
        context = tf.distribute.get_replica_context()
        parts, me = context.num_replicas_in_sync, context.replica_id_in_sync_group
        mine = []
        for tensor, size in zip(tensors, self.sizes, strict=True):
            flat = tf.reshape(tensor, [-1])
            filled = tf.pad(flat, [[0, parts * size - flat.shape[0]]])
            mine.append(filled[me * size : (me + 1) * size])
        return tf.concat(mine, axis=0)
