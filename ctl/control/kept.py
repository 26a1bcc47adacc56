"""The state that a worker saves when it has lost another: that of the last finished call.

A call that breaks off leaves a state that is half of a step: Dropout has drawn, BatchNorm has seen
the batch, and some variables may have their update while others wait for their all-reduce. So the
state is kept between two calls, when nothing runs. That takes no copy: it is a reference to the
buffer of each variable (`ctl.checkpoint.bundle.snapshot`). The first update of the next call then
writes to new buffers, so the state occupies memory twice. Only elastic jobs keep it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from ctl.checkpoint import bundle
from ctl.checkpoint.manager import CheckpointManager
from ctl.control.state import TrainState, Value
from ctl.distributed import replicas, workers
from ctl.distributed.cluster import elastic
from ctl.step import TrainStep


class Kept:
    """The ``state`` of ``step`` after the last finished call, for ``checkpoints``.

    Args:
        step, state: of the loop.
        checkpoints: of the loop; with None, or in a job that is not elastic, nothing is kept.
    """

    def __init__(self, step: TrainStep, state: TrainState, checkpoints: CheckpointManager | None):
        self._step, self._state, self._checkpoints = step, state, checkpoints
        self._at = -1  # the global step
        self._values: dict[str, list[tuple[Any, tf.Tensor]]] = {}  # by group; with the variable
        self._keeps = elastic.is_elastic() and workers.number_of(step.strategy) > 1
        if self._keeps and (reason := self._why_not()):
            logging.warning(
                "a lost worker will cost the steps since the last checkpoint, because %s", reason
            )

    def _why_not(self) -> str:
        if self._checkpoints is None:
            return "the loop has no checkpoints"
        if self._step.per_replica_variables.saved:
            return "the step has per-replica variables, of which the worker has a part"
        if [*self._step.tables]:
            return "a copy of its embedding tables in each call would take longer than the rows"
        return ""

    def keep(self, step: int) -> None:
        """Keeps the state, which is that of the global ``step``. Call it between two calls."""
        if not self._keeps:
            return
        if self._at < 0:
            elastic.tell(elastic.TRAINED)
        self._at = step
        if self._why_not():
            return
        self.forget()  # frees the buffers
        variables = bundle.unwrap(self._state.variables())
        for group, tensors in bundle.snapshot(variables).items():
            self._values[group] = list(zip(variables[group], tensors, strict=True))

    def forget(self) -> None:
        """Keeps nothing until the next call has ended, as after a restore."""
        self._values = {}

    def save(self) -> None:
        """Saves what is kept, unless a checkpoint has this step already. For a worker that has lost
        another, and ends after that. Logs an error if it cannot be saved."""
        if not self._values or not self._checkpoints:
            return
        values = self._values
        self.forget()
        seeds = {id(v) for v in replicas.dropout_seeds(self._step.tracked.layer)}
        state = {
            group: [
                Value.of(variable, self._of_first(tensor) if id(variable) in seeds else tensor)
                for variable, tensor in pairs
            ]
            for group, pairs in values.items()
        }
        try:
            self._checkpoints.succeed()
            latest = self._checkpoints.latest()
            if latest and latest.step >= self._at:
                logging.info("step %d is saved already, for the workers that remain", latest.step)
                return
            changed = self._step.trace_guards.changed(self._step)
            self._checkpoints.save(self._at, state, changed=changed, wait=True)
            logging.info("saved step %d, for the workers that remain", self._at)
        except Exception as error:  # which must not replace that of the lost worker
            logging.error("step %d is not saved: %s", self._at, error)

    def _of_first(self, seed: tf.Tensor) -> tf.Tensor:
        """The seed of replica 0, which a checkpoint holds, from that of this worker."""
        strategy = self._step.strategy
        cluster = workers.cluster_of(strategy)
        mine = strategy.num_replicas_in_sync // len(cluster.workers)
        return seed - replicas.seed_offset(cluster.index * mine, seed.dtype)
