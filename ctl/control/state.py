"""The state of a training: what a checkpoint holds, and how a restore puts it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.base import durable
from ctl.checkpoint import bundle
from ctl.checkpoint.manager import CheckpointManager, Saved
from ctl.control import jit
from ctl.data.dataset import Dataset
from ctl.distributed import replicas, workers
from ctl.errors import CheckpointError
from ctl.phases.sparse_rows import Table
from ctl.schedule.patience import with_memory
from ctl.step import TrainStep

_EVALUATED = ("model", "step", "ema", "counters")  # what an evaluation reads, of all models
_TRAINED = "trained"  # which variables train, if not all do: see `Loop.train_only`
_COMPILED = "compiled"  # present if XLA compiles the step: see `ctl.control.jit`
_ROWS = "rows"  # embedding tables as they are, and what they have missed: `ctl.phases.deferred`


class TrainState:
    """The variables of a training on ``dataset`` by group, which a checkpoint holds: those of
    `TrainStep.state`, and the memories of ``eval_actions``, see `ctl.schedule.patience`."""

    def __init__(self, step: TrainStep, dataset: Dataset, eval_actions: Sequence[Any]):
        self._step, self._dataset, self._eval_actions = step, dataset, eval_actions

    def variables(self) -> dict[str, list[tf.Variable]]:
        """Returns the current variables, by group. Per-replica values are as of `collect`."""
        step = self._step
        state = _with_whole_tables(step)
        if memories := [owner.memory for owner in with_memory(self._eval_actions)]:
            state["memory"] = memories
        if not all(step.trainable_mask):
            state[_TRAINED] = [_setting(step.trainable_mask)]
        if step.jit_compile:
            state[_COMPILED] = [_setting([True])]
        return state

    def collect(self) -> None:
        """Brings up to date what is saved: variables that differ between replicas, and averages of
        weights that were loaded. All workers must call it."""
        step = self._step
        step.per_replica_variables.collect(step.strategy)
        step.tables.gather(keep=workers.is_chief(step.strategy))
        step.updater.renew_copies()

    def restore(
        self, checkpoints: CheckpointManager, changed: bool = True
    ) -> tuple[Saved | None, dict[str, float]]:
        """Restores the last checkpoint, the Python values that were ``changed`` before it, and the
        first run's decision about XLA (`jit.keep`).

        Returns the checkpoint, or None; and the results of its evaluation, or an empty dict. A
        checkpoint is written before its evaluation, so actions with a memory get these results now.

        Raises:
            CheckpointError: see `CheckpointManager.restore`.
        """
        step, state = self._step, self.variables()
        # A checkpoint of another phase or setting has none of these.
        for settings in (_TRAINED, _COMPILED, _ROWS):
            state.pop(settings, None)
        saved = checkpoints.restore(state)
        if not saved:
            return None, {}
        step.trainable_mask = (True,) * len(step.trainable_variables)
        if _TRAINED in saved.variables:
            [values] = _read(saved, _TRAINED, [_setting(step.trainable_mask)])
            step.trainable_mask = tuple(bool(value) for value in values)
        self._restore_rows(saved)
        jit.keep(step, self._dataset, _COMPILED in saved.variables)
        replicas.offset_dropout_seeds(step.strategy, step.tracked.layer)
        step.per_replica_variables.spread(step.strategy)
        step.trace_guards.rates.clear()
        if changed and saved.changed is not None:
            step.trace_guards.restore(step, saved.changed, saved.step)
        results = {name: saved.metrics[name] for name in saved.evaluated}
        for owner in with_memory(self._eval_actions) if results else []:
            owner.evaluated(saved.step, results)
        return saved, results

    def _restore_rows(self, saved: Saved) -> None:
        step = self._step
        rows = _rows_of(step)
        step.tables.restored()
        if _ROWS not in saved.variables:  # of a training with dense gradients
            for deferred in step.tables.deferred:
                deferred.reset()
            return
        ours = [[*variable.shape] for variable in rows]
        if ours != [spec["shape"] for spec in saved.variables[_ROWS]]:
            raise CheckpointError(
                f"{saved.path} has embedding tables that were trained by rows: resume it with the "
                "same model, optimizer and sparse_rows=on (--sparse_rows=on)"
            )
        for variable, value in zip(rows, _read(saved, _ROWS, rows), strict=True):
            variable.assign(value)
        for deferred in step.tables.deferred:
            deferred.check_restored()

    def read_best(self, checkpoints: CheckpointManager) -> Saved | None:
        """Gives the model, its averages, the layers of the step and the step count the values of
        the best checkpoint, and returns it; None if there is none. Raises `CheckpointError` as
        `CheckpointManager.read` does."""
        for table in self._step.tables:
            table.bring_up_to_date()  # the slots, of which the best checkpoint's are not read
        state = _with_whole_tables(self._step)
        evaluated = {g: state[g] for g in state if g.partition("_")[0] in _EVALUATED}
        return checkpoints.read(evaluated, "best")


def _read(saved: Saved, group: str, variables: list[Any]) -> list[tf.Tensor]:
    """Reads a group of a checkpoint that was restored. Raises `CheckpointError`."""
    try:
        return bundle.read(saved.prefix, {group: variables})[group]
    except durable.Damaged as damage:
        raise CheckpointError(
            f"{saved.path} is damaged: {damage}; restore it from a backup or choose another "
            "--model_dir"
        ) from damage


def _with_whole_tables(step: TrainStep) -> dict[str, list[Any]]:
    """The state of ``step``. All rows of tables are there and up to date, for whoever reads them;
    another group has the tables as they are, from which a resume goes on."""
    state: dict[str, list[Any]] = step.state()
    whole = {id(t.variable.value): t.whole or _Whole(t) for t in step.tables if t.is_special}
    rows, stands_for = _rows_of(step), {**step.tables.parts, **whole}
    for group in state:
        state[group] = [stands_for.get(id(variable), variable) for variable in state[group]]
    if rows:
        state[_ROWS] = rows
    return state


def _rows_of(step: TrainStep) -> list[Any]:
    deferred, parts = step.tables.deferred, step.tables.parts
    variables = [v for one in deferred for v in (one.table.value, *one.variables)]
    return [parts.get(id(variable), variable) for variable in variables]


class _Whole:
    """Stands for a table in a state, with all its rows up to date."""

    def __init__(self, table: Table):
        self._table, variable = table, table.variable.value
        self.name, self.dtype, self.shape = variable.name, variable.dtype, variable.shape

    def value(self) -> tf.Tensor:
        return self._table.value()

    def numpy(self) -> np.ndarray:
        return self.value().numpy()

    def assign(self, value: tf.Tensor) -> None:
        self._table.variable.value.assign(value)


class Value(NamedTuple):
    """Stands for a variable in a state. In the strategy's scope, making a variable waits for all
    workers, but only the chief saves."""

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    tensor: tf.Tensor

    def value(self) -> tf.Tensor:
        return self.tensor

    def numpy(self) -> np.ndarray:
        return self.tensor.numpy()

    @classmethod
    def of(cls, variable: Any, tensor: tf.Tensor) -> Value:
        """Stands for ``variable`` when it had the value ``tensor``."""
        return cls(variable.name, tensor.dtype, tensor.shape, tensor)


def _setting(values: Sequence[bool]) -> Value:
    tensor = tf.constant([int(one) for one in values], tf.int32)
    return Value("Variable", tensor.dtype, tensor.shape, tensor)
