"""The state of a training: what a checkpoint holds, and how a restore puts it back."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import durable
from ctl.base.interactive import another_directory
from ctl.checkpoint import bundle
from ctl.checkpoint.manager import CheckpointManager, Saved
from ctl.control import jit
from ctl.data.dataset import Dataset
from ctl.distributed import replicas, workers
from ctl.errors import CheckpointError
from ctl.phases.optimizers import slots_of
from ctl.phases.shards import Split
from ctl.phases.sparse_rows import Table, tables_of
from ctl.schedule.patience import forget, with_memory
from ctl.step import TrainStep

_EVALUATED = ("model", "step", "ema", "counters")  # what an evaluation reads, of all models
_TRAINED = "trained"  # which variables train, if not all do: see `Loop.train_only`
_COMPILED = "compiled"  # present if XLA compiles the step: see `ctl.control.jit`
_NONE: Mapping[int, Any] = types.MappingProxyType({})
_ROWS = "rows"  # embedding tables as they are, and what they have missed: `ctl.phases.deferred`


# Elements of a variable that is looked at for changes. A read of a table that is trained by rows
# copies it; who sets weights sets small ones, too.
_COMPARED = 1 << 24


class TrainState:
    """The variables of a training on ``dataset`` by group, which a checkpoint holds: those of
    `TrainStep.state`, and the memories of ``eval_actions``, see `ctl.schedule.patience`."""

    def __init__(self, step: TrainStep, dataset: Dataset, eval_actions: Sequence[Any]):
        self._step, self._dataset, self._eval_actions = step, dataset, eval_actions
        forget(eval_actions)

    def variables(self, stand_ins: Mapping[int, Any] = _NONE) -> dict[str, list[Any]]:
        """Returns the current variables, by group. Per-replica values are as of `collect`.
        ``stand_ins`` stand for some of them, by their ids."""
        step = self._step
        state = _with_whole_tables(step, stand_ins)
        if memories := [owner.memory for owner in with_memory(self._eval_actions)]:
            state["memory"] = memories
        if not all(step.trainable_mask):
            state[_TRAINED] = [_setting(step.trainable_mask)]
        if step.jit_compile:
            state[_COMPILED] = [_setting([True])]
        return state

    def now(self) -> Callable[[], bool]:
        """Returns a function that says whether the step is still as it is now: its variables, but
        for large ones and values that differ between replicas, which of them train, and its Python
        values."""
        state = {
            key: [v for v in group if v.shape.num_elements() <= _COMPARED]
            for key, group in bundle.unwrap(self._step.state()).items()
        }
        before, settings = bundle.snapshot(state), self._settings()

        def is_still() -> bool:
            return self._settings() == settings and bundle.same(before, bundle.snapshot(state))

        return is_still

    def _settings(self) -> Any:
        return self._step.trainable_mask, self._step.trace_guards.changed(self._step)

    def collect(self) -> None:
        """Brings up to date what is saved: variables that differ between replicas, and averages of
        weights that were loaded. All workers must call it."""
        step = self._step
        step.per_replica_variables.collect(step.strategy)
        step.tables.gather(keep=workers.is_chief(step.strategy))
        step.updater.renew_copies()

    def restore(
        self, checkpoints: CheckpointManager, changed: bool = True, grow: bool = False
    ) -> tuple[Saved | None, dict[str, float]]:
        """Restores the last checkpoint, on several workers that of the chief: all must call it.
        Also the Python values that were ``changed`` before it, and the first run's decision about
        XLA (`jit.keep`). With ``grow``, embedding tables may have more rows than it.

        Returns the checkpoint, or None; and the results of its evaluation, or an empty dict. A
        checkpoint is written before its evaluation, so actions with a memory get these results now.

        Raises:
            CheckpointError: see `CheckpointManager.restore`.
        """
        step, growing = self._step, _growing(self._step) if grow else {}
        state = self.variables(growing)
        # A checkpoint of another phase or setting has none of these.
        for settings in (_TRAINED, _COMPILED, _ROWS):
            state.pop(settings, None)
        rates = step.updater.held_rates(scheduled=False)
        saved = checkpoints.restore(state)
        # The chief may have waited for a process that still saved; other workers may have restored
        # the checkpoint before that one.
        own = saved.step if saved else -1
        if (wanted := workers.step_of_chief(step.strategy, own)) not in (own, -1):
            try:
                saved = checkpoints.restore(state, wanted)
            except CheckpointError as error:  # `agree` will say which steps they have
                logging.warning("cannot restore step %d, as the chief did: %s", wanted, error)
        if not saved:
            return None, {}
        for name, rate in step.updater.held_rates(scheduled=False).items():
            if rate != rates[name]:
                logging.warning(
                    "%s.learning_rate goes on at %g, as in the checkpoint of step %d, and not at "
                    "%g: to use that, set it after restore()",
                    *(name, rate, saved.step, rates[name]),
                )
        step.trainable_mask = (True,) * len(step.trainable_variables)
        if _TRAINED in saved.variables:
            [values] = _read(saved, _TRAINED, [_setting(step.trainable_mask)])
            step.trainable_mask = tuple(bool(value) for value in values)
        self._restore_rows(saved, growing)
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

    def _restore_rows(self, saved: Saved, growing: Mapping[int, Any]) -> None:
        step = self._step
        rows = _rows_of(step, growing)
        step.tables.restored()
        if _ROWS not in saved.variables:  # of a training with dense gradients
            for deferred in step.tables.deferred:
                deferred.reset()
            return
        theirs = [tf.TensorShape(spec["shape"]) for spec in saved.variables[_ROWS]]
        if len(rows) != len(theirs) or not all(
            variable.shape.is_compatible_with(shape)
            for variable, shape in zip(rows, theirs, strict=True)
        ):
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
            f"{saved.path} is damaged: {damage}; restore it from a backup or choose "
            f"{another_directory()}"
        ) from damage


def _with_whole_tables(
    step: TrainStep, stand_ins: Mapping[int, Any] = _NONE
) -> dict[str, list[Any]]:
    """The state of ``step``. All rows of tables are there and up to date, for whoever reads them;
    another group has the tables as they are, from which a resume goes on."""
    state: dict[str, list[Any]] = step.state()
    whole = {id(t.variable.value): t.whole or _Whole(t) for t in step.tables if t.is_special}
    rows, stands_for = _rows_of(step, stand_ins), {**step.tables.parts, **whole, **stand_ins}
    for group in state:
        state[group] = [stands_for.get(id(variable), variable) for variable in state[group]]
    if rows:
        state[_ROWS] = rows
    return state


def _rows_of(step: TrainStep, stand_ins: Mapping[int, Any] = _NONE) -> list[Any]:
    stands_for = {**step.tables.parts, **stand_ins}
    variables = [v for one in step.tables.deferred for v in (one.table.value, *one.variables)]
    return [stands_for.get(id(variable), variable) for variable in variables]


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


class _Growing:
    """Stands for a variable of an embedding table that may have more rows than a checkpoint.

    Args:
        variable: [n, ...], or what stands for it.
        more: value of the rows that the checkpoint has not; by default, they keep theirs.
    """

    def __init__(self, variable: Any, more: tf.Variable | None = None):
        self._variable, self._more = variable, more
        self.name, self.dtype = variable.name, variable.dtype
        self.shape = tf.TensorShape([None, *variable.shape[1:]])

    def value(self) -> tf.Tensor:
        return self._variable.value()

    def assign(self, rows: tf.Tensor) -> None:
        count, here = self._variable.shape[0], rows.shape[0]
        if here > count:
            raise CheckpointError(
                f"{self.name} has {here} rows in the checkpoint, and {count} in the model: a table "
                "may grow, not shrink"
            )
        if here < count:
            logging.info("%s: %d rows of the checkpoint, and %d new", self.name, here, count - here)
        if here == count:
            self._variable.assign(rows)
        elif isinstance(self._variable, Split):
            self._variable.assign_first(rows, self._more)
        else:
            more = self._variable.value()[here:]
            more = more if self._more is None else tf.zeros_like(more) + self._more
            self._variable.assign(tf.concat([rows, more], 0))


def _growing(step: TrainStep) -> dict[int, _Growing]:
    """What stands for the variables of embedding tables if a checkpoint may have fewer rows, by
    their ids."""
    updater, parts, stand_ins = step.updater, step.tables.parts, {}
    average_of = dict(zip(map(id, updater.averaged_variables), updater.ema, strict=True))
    for table, _ in tables_of(step):
        variables = [table.value, *slots_of(updater.group_of(table).optimizer, table)]
        for variable in (*variables, average_of.get(id(table), table.value)):
            if variable.shape[:1] == table.value.shape[:1]:
                stand_ins[id(variable)] = _Growing(parts.get(id(variable), variable))
    for deferred in step.tables.deferred:  # new rows have missed nothing
        last = deferred.last
        stand_ins[id(last)] = _Growing(parts.get(id(last), last), deferred.updates)
    return stand_ins


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
