"""Losses of the steps of one call: added up on each replica, then combined over replicas."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ctl.distributed import local_batch


class LossAccumulator(NamedTuple):
    """Sums over the steps of one call, on one replica. Batches may differ in size."""

    total: tf.Tensor  # float32 scalar: sum of the replica's losses of all examples
    examples: tf.Tensor  # float32 scalar: number of valid examples of all replicas
    finite: tf.Tensor  # int32 scalar: number of steps before the first non-finite loss

    def add(self, loss: tf.Tensor, count: tf.Tensor) -> LossAccumulator:
        """Adds a step. Arguments as returned by `ctl.TrainStep.__call__`."""
        # NaN and Inf stay in the sum, so `finite` counts the steps before the first of them.
        total = self.total + loss * count
        finite = self.finite + tf.cast(tf.math.is_finite(total), tf.int32)
        return LossAccumulator(total, self.examples + count, finite)

    def totals(self, report: tf.Tensor, replicas: int, logged: tf.Tensor) -> tf.Tensor:
        """Returns a float32 [5 + k] tensor whose sum over ``replicas`` gives `CallTotals`. For
        ``report``, see `ctl.control.pace.Pace.worker_report`; for ``logged`` [k], see
        `ctl.phases.logged.Logged.terms`."""
        loss = self.total / local_batch.or_one(self.examples)
        return tf.concat([[loss, self.examples / replicas], report, logged], axis=0)


class CallTotals(NamedTuple):
    """Sums over all replicas after a call of the loop: losses and the reports of the workers."""

    loss: float  # mean over the valid examples of all steps whose update was not skipped
    examples: float  # sum of what `TrainStep.count` counts of them
    stop: float  # above 0 if a signal has asked a worker to stop
    end: float  # above 0 if an action of a worker has asked to end the training
    pace: float  # sum of the seconds per step that workers measured, see `Pace.worker_report`
    logged: list[float]  # see `ctl.phases.logged.Logged.collect`


class CallResult(NamedTuple):
    """Result of one call of `ctl.loop.Steps.run`."""

    sums: tf.Tensor  # float32 [5 + k], see `LossAccumulator.totals`
    finite: tf.Tensor  # `LossAccumulator.finite` of each replica
    position: Any  # position in the feed after the steps, see `ctl.data.feed`
    step: tf.Tensor  # the global step after the steps, int64 scalar
    rates: Any = ()  # learning rates of the groups in the last step, float32 scalars

    def totals(self) -> CallTotals:
        """Waits for the sums, and returns them by name."""
        loss, examples, stop, end, pace, *logged = self.sums.numpy().tolist()
        return CallTotals(loss, examples, stop, end, pace, logged)


def no_losses() -> LossAccumulator:
    """Returns the accumulator before the first step."""
    return LossAccumulator(tf.zeros([]), tf.zeros([]), tf.zeros([], tf.int32))
