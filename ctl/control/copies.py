"""Compares the replicas' copies of the weights, and names a device that computes wrongly.

Replicas start with equal bits and apply equal updates, so their copies differ only if memory or a
processor fails, or if something assigned to one copy. From then on, they diverge silently.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.actions import Status
from ctl.base.differences import names_of
from ctl.distributed import replicas, workers
from ctl.distributed.watch import watchdog
from ctl.errors import DivergedError, UsageError
from ctl.step import TrainStep

_ELEMENTS_AT_A_TIME = 1 << 22


class CompareReplicas:
    """Action that compares a checksum of the state over all replicas of all workers::

        ctl.Loop(..., actions=[ctl.Every(ctl.CompareReplicas(step), steps=100)])

    It compares the variables of a checkpoint (`TrainStep.state`), except those that may differ:
    seeds of Dropout, per-replica variables of the step, `BaseStep.unsynchronized_variables`, and
    tables that are split. A checksum is the sum of the bits of a variable, read as integers. It is
    exact in any order, and one flipped bit changes it. Actions run in their order: put this one
    before actions that save.
    Every worker needs it, at the same steps.

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
        return _equal_variables(self.step)

    def _gathered(self) -> tf.Tensor:
        """int64 [replicas, variables]: the checksums, on each replica."""

        def on_replica() -> tf.Tensor:
            checksums = [checksum(replicas.own_copy(variable)) for variable in self._variables]
            context = tf.distribute.get_replica_context()
            return context.all_gather(tf.stack([checksums]), axis=0, options=self.step.options)

        return self.step.strategy.run(on_replica)

    def _judge(self, sums: np.ndarray, step: int) -> None:
        if said := _difference(self.step.strategy, self._variables, sums):
            error = DivergedError(f"{said} at step {step}, {self._before()}")
            workers.raise_together(self.step.strategy, error)

    def _before(self) -> str:
        if self._equal_at is None:
            return "the first that was compared: check the device, and resume from a checkpoint"
        return (
            f"and did not at step {self._equal_at}: check the device, and resume from a checkpoint "
            "up to that step"
        )


def check_copies(step: TrainStep, *, this_worker: bool = False) -> None:
    """Refuses copies of the state that differ between replicas. A checkpoint has one value of each
    variable, and an evaluation uses one.

    It compares what `CompareReplicas` compares. Between workers, a difference is an error in state
    of a user's layers and step, and a warning elsewhere: other processors may round differently.

    Args:
        step: a built step.
        this_worker: compares the replicas of this worker only. Otherwise all workers must call it.

    Raises:
        UsageError: the forward pass has given a variable different values on the replicas.
        DivergedError: other variables differ between the replicas of a worker.
    """
    strategy = step.strategy
    if strategy.num_replicas_in_sync == 1 or replicas.has_one_copy(strategy):
        return
    variables, number = _equal_variables(step), int(step.global_step.numpy())
    local = [_checksums(strategy, variable) for variable in variables]
    texts = [json.dumps(local).encode()]
    if not this_worker:
        texts = workers.all_gather(strategy, texts[0], "comparing the replicas", number)
    # int64 [workers, variables, replicas of a worker]
    sums = np.array([json.loads(text) for text in texts])
    apart = (sums != sums[:, :, :1]).any(axis=(0, 2))
    unequal = (sums != sums[:1, :, :1]).any(axis=(0, 2))
    of_users = {id(v.value): v.path for v in replicas.other_state(step.tracked.layer)}
    of_users |= {id(v): v.name for v in step.tracked.raw_variables}
    for variable in step.statistics.combined:
        of_users.pop(id(variable), None)
    found = [of_users.get(id(variables[i])) for i in np.flatnonzero(unequal).tolist()]
    if names := ", ".join(filter(None, found)):
        raise UsageError(
            f"variable {names} differs between replicas: the forward pass updates it with the "
            "replica's part of the batch, and a checkpoint holds one value. For the mean over "
            "replicas, return it (of a Keras variable, its .value) from "
            "TrainStep.replica_statistics(); for the value of replica 0, make it with "
            "aggregation='only_first_replica'"
        )
    if apart.any():
        flat = sums.transpose(0, 2, 1).reshape(-1, len(variables))
        raise DivergedError(
            f"{_difference(strategy, variables, flat)} at step {number}: is their gradient not "
            f"reduced? If they may differ, return them from {type(step).__name__}."
            "unsynchronized_variables(); else check the device, and resume from a checkpoint"
        )
    if unequal.any():
        logging.log_first_n(
            logging.WARNING,
            "%s differ between workers at step %d: if they may differ, return them from "
            "%s.unsynchronized_variables(); workers on other kinds of processors may round "
            "differently",
            *(1, _shown([variables[i] for i in np.flatnonzero(unequal).tolist()]), number),
            type(step).__name__,
        )


def _equal_variables(step: TrainStep) -> list[Any]:
    """All variables whose copies must be equal."""
    differ = {id(v) for v in replicas.dropout_seeds(step.tracked.layer)}
    differ |= {id(v) for v in step.per_replica_variables.saved}
    differ |= {id(v) for v in step.unsynchronized_variables()}
    differ |= step.tables.parts.keys()
    return [v for group in step.state().values() for v in group if id(v) not in differ]


def _checksums(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[int]:
    """A checksum of the copy of each replica of this worker."""
    sums = []
    for copy in strategy.experimental_local_results(variable):
        if "CPU" in copy.device.upper():
            sums.append(int(np.sum([_sum_of_bits(part) for part in _parts(copy)])))
        else:
            sums.append(int(checksum(copy)))
    return sums if len(sums) > 1 else sums * len(strategy.extended.worker_devices)


def _parts(variable: tf.Variable) -> Iterator[tf.Tensor]:
    """The value of ``variable``; if it is large, some rows at a time, because to read a table that
    is trained by rows copies what is read."""
    elements = variable.shape.num_elements()
    if not variable.shape.rank or not elements or elements <= _ELEMENTS_AT_A_TIME:
        yield variable.read_value()
        return
    rows = variable.shape[0]
    step = max(1, _ELEMENTS_AT_A_TIME * rows // elements)
    for start in range(0, rows, step):
        yield variable.sparse_read(tf.range(start, min(start + step, rows)))


def _sum_of_bits(value: tf.Tensor) -> np.int64:
    # NumPy reads an array where it is; .numpy() copies it. A bfloat16 scalar is no array.
    array = np.asarray(value if value.shape.rank else value.numpy()).reshape(-1)
    size = next(n for n in (8, 4, 2, 1) if array.nbytes % n == 0)
    return array.view(f"int{8 * size}").sum(dtype=np.int64)


def _difference(
    strategy: tf.distribute.Strategy, variables: Sequence[Any], sums: np.ndarray
) -> str:
    """Which replicas differ in what; "" if all are equal. ``sums``: int64 [replicas, variables]."""
    kinds, kind_of, counts = np.unique(sums, axis=0, return_inverse=True, return_counts=True)
    if len(kinds) == 1:
        return ""
    kind_of = kind_of.ravel()
    alone = kind_of != counts.argmax() if counts.max() > len(sums) / 2 else kind_of >= 0
    devices = strategy.extended.worker_devices  # of this worker; the others have as many
    who: list[str] = []
    for replica in np.flatnonzero(alone).tolist():
        device = devices[replica % len(devices)].rpartition("/device:")[2]
        worker = f"worker {replica // len(devices)}, " if len(sums) > len(devices) else ""
        who.append(f"replica {replica} ({worker}{device})")
    different = [variables[i] for i in np.flatnonzero((sums != sums[0]).any(axis=0)).tolist()]
    verb = "differs from the others in" if len(who) == 1 else "differ in"
    return f"{' and '.join(who)} {verb} {_shown(different)}"


def _shown(variables: Sequence[Any]) -> str:
    return names_of([variable.name.removesuffix(":0") for variable in variables])


def checksum(value: tf.Variable | tf.Tensor) -> tf.Tensor:
    """Returns the sum of the bits of ``value``, of any numeric type, as integers; int64 scalar.

    It temporarily needs eight bytes per element, or per four bytes of a larger element.
    """
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.int8)
    bits = {1: tf.int8, 2: tf.int16}.get(value.dtype.size, tf.int32)
    return tf.reduce_sum(tf.cast(tf.bitcast(value, bits), tf.int64))
