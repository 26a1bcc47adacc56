"""Each replica trains its own weights, and every few steps all take the mean of their weights.

Stich 2019 (arXiv:1805.09767), algorithm 1. With ``--local_steps=1`` and SGD, and without
``--clip_norm``, it equals synchronous training. The slots of an optimizer stay with each replica,
and a replica that has fewer examples than others takes a smaller step. The default is a mean every
8 steps::

    python -m ctl.train --model_dir=/tmp/local --step=ctl.recipes.local_sgd:LocalSGD \\
        --local_steps=8 --replicas=2 --train_steps=1600 --evaluate_every=160

Between two means no gradients and no weights cross replicas, only what ctl sums beside gradients:
whether they are finite, statistics of BatchNorm, and the number of examples if it varies. Weights
that are evaluated or exported then are not averaged, and a warning says so: make
``--evaluate_every`` and ``--train_steps`` multiples of ``--local_steps``.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import logging

import ctl
from ctl import UsageError, replicas

MEAN = tf.distribute.ReduceOp.MEAN


class LocalSGD(ctl.TrainStep):
    """Trains weights of each replica, and takes their mean every ``local_steps`` steps.

    Raises:
        UsageError: there are parameter groups or an ``ema_decay``.
    """

    local_steps: int = ctl.option(None, "Steps between averages.", type=int, lower_bound=1)
    default_steps = 8

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if not isinstance(self.optimizer, keras.Optimizer) or self.ema_decay is not None:
            raise UsageError(f"{type(self).__name__} supports one optimizer only, and no ema_decay")
        self.local_steps = self.local_steps or self.default_steps
        self.outer: list[list[tf.Variable]] = []  # for `join`, one of each list for each weight

    def attach(self, loop: ctl.Loop) -> None:
        """See `ctl.TrainStep.attach`; warns of evaluations between two means."""
        super().attach(loop)

        def warn(step: int, results: Any) -> None:
            if step % self.local_steps and loop.strategy.num_replicas_in_sync > 1:
                logging.warning(
                    "step %d is not a multiple of --local_steps=%d, so the weights that are "
                    "evaluated here, or exported at the end, are not averaged",
                    *(step, self.local_steps),
                )

        loop.eval_actions.append(warn)

    def unsynchronized_variables(self) -> list[tf.Variable]:
        """The weights and their slots."""
        optimizer: Any = self.optimizer
        equal = {id(optimizer.iterations), id(optimizer.learning_rate)}
        slots = [v for v in optimizer.variables if id(v) not in equal]
        return [v.value for v in (*self.model.trainable_variables, *slots)]

    def __call__(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        outcome = super().__call__(batch)
        weights = [replicas.own_copy(v).read_value() for v in self.trainable_variables]
        tf.distribute.get_replica_context().merge_call(self.meet, args=(weights,))
        return outcome

    @tf.autograph.experimental.do_not_convert
    def sum_gradients(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients of this replica, as if all had the same."""
        return [g * tf.cast(self.strategy.num_replicas_in_sync, g.dtype) for g in gradients]

    @tf.autograph.experimental.do_not_convert
    def meet(self, strategy: tf.distribute.Strategy, weights: list[tf.Tensor]) -> None:
        """Joins the ``weights`` of all replicas, if this step is the last of a round."""

        def joined() -> None:
            pairs = list(zip(weights, self.trainable_variables, strict=True))
            means = strategy.extended.batch_reduce_to(MEAN, pairs, self.options)
            for variable, *args in zip(self.trainable_variables, means, *self.outer, strict=True):
                strategy.extended.update(variable, self.join, args=tuple(args), group=False)

        ends = tf.equal(self.global_step % self.local_steps, 0)
        tf.cond(ends, joined, lambda: None)

    def join(self, variable: tf.Variable, mean: tf.Tensor, *outer: tf.Variable) -> None:
        """Begins the next round of one weight with the mean of all replicas."""
        variable.assign(mean)
