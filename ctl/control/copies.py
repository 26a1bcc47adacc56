"""Compares the replicas' copies of the weights, and names a device that computes wrongly.

Replicas start with equal bits and apply equal updates, so their copies differ only if memory or a
processor fails, or if something assigned to one copy. From then on, they diverge silently.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.actions import Status
from ctl.distributed import replicas, workers
from ctl.distributed.watch import watchdog
from ctl.errors import DivergedError
from ctl.step import TrainStep

_SHOWN = 3  # variables in a message


class CompareReplicas:
    """Action that compares a checksum of the state over all replicas of all workers::

        ctl.Loop(..., actions=[ctl.Every(ctl.CompareReplicas(step), steps=100)])

    It compares the variables of a checkpoint (`TrainStep.state`), except those that may differ:
    seeds of Dropout, per-replica variables of the step, and `unsynchronized_variables`. A checksum
    is the sum of the bits of a variable, read as integers. It is exact in any order, and one
    flipped bit changes it. Actions run in their order: put this one before actions that save. Every
    worker needs it, at the same steps.

    Args:
        step: the step of the loop.

    Raises:
        DivergedError: when called, if copies differ. It names the replicas that differ from most
            others, or all if there is no majority.
    """

    def __init__(self, step: TrainStep):
        self.step = step
        self._equal_at: int | None = None  # the last step at which all copies were equal
        self._traced = tf.function(self._gathered, autograph=False)

    def __call__(self, status: Status) -> None:
        strategy, first = self.step.strategy, self._equal_at is None
        if strategy.num_replicas_in_sync > 1 and not replicas.has_one_copy(strategy):
            doing = "comparing the replicas"
            with (
                workers.naming_lost_peers(strategy, doing),
                watchdog.collective(doing, first=first),
            ):
                sums = strategy.experimental_local_results(self._traced())[0].numpy()
            self._judge(sums, status.step)
        elif first:
            logging.warning("replicas are not compared: there is one copy of the weights")
        self._equal_at = status.step

    @functools.cached_property
    def _variables(self) -> list[tf.Variable]:
        """All variables whose copies must be equal."""
        differ = {id(v) for v in replicas.dropout_seeds(self.step.tracked.layer)}
        differ |= {
            id(v)
            for v in (*self.step.per_replica_variables.saved, *self.step.unsynchronized_variables())
        }
        return [v for group in self.step.state().values() for v in group if id(v) not in differ]

    def _gathered(self) -> tf.Tensor:
        """int64 [replicas, variables]: the checksums, on each replica."""

        def on_replica() -> tf.Tensor:
            checksums = [checksum(replicas.own_copy(variable)) for variable in self._variables]
            context = tf.distribute.get_replica_context()
            return context.all_gather(tf.stack([checksums]), axis=0, options=self.step.options)

        return self.step.strategy.run(on_replica)

    def _judge(self, sums: np.ndarray, step: int) -> None:
        kinds, kind_of, counts = np.unique(sums, axis=0, return_inverse=True, return_counts=True)
        if len(kinds) == 1:
            return
        kind_of = kind_of.ravel()
        alone = kind_of != counts.argmax() if counts.max() > len(sums) / 2 else kind_of >= 0
        variables = np.flatnonzero((sums != sums[0]).any(axis=0))
        names = [self._variables[i].name.removesuffix(":0") for i in variables]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        who = " and ".join(self._described(int(i), len(sums)) for i in np.flatnonzero(alone))
        error = DivergedError(
            f"{who} differ{'s from the others' if alone.sum() == 1 else ''} in "
            f"{', '.join(names[:_SHOWN])}{more} at step {step}, {self._before()}"
        )
        workers.raise_together(self.step.strategy, error)

    def _before(self) -> str:
        if self._equal_at is None:
            return "the first that was compared: check the device, and resume from a checkpoint"
        return (
            f"and did not at step {self._equal_at}: check the device, and resume from a checkpoint "
            "up to that step"
        )

    def _described(self, replica: int, count: int) -> str:
        strategy = self.step.strategy
        devices = strategy.extended.worker_devices  # of this worker; the others have as many
        device = devices[replica % len(devices)].rpartition("/device:")[2]
        worker = f"worker {replica // len(devices)}, " if count > len(devices) else ""
        return f"replica {replica} ({worker}{device})"


def checksum(value: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns the sum of the bits of ``value``, of any numeric type, as integers; int64 scalar.

    It temporarily needs eight bytes per element, or per four bytes of a larger element.
    """
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.int8)
    bits = {1: tf.int8, 2: tf.int16}.get(value.dtype.size, tf.int32)
    return tf.reduce_sum(tf.cast(tf.bitcast(value, bits), tf.int64))
