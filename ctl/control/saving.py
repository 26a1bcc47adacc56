"""Saves and restores the state of a loop: that of its step, and what evaluations have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from ctl import replicas, workers
from ctl.checkpoint import bundle
from ctl.checkpoint.manager import CheckpointManager, Saved
from ctl.control.agreement import check_state
from ctl.control.patience import with_memory
from ctl.errors import UsageError
from ctl.tuning import jit
from ctl.watch import watchdog

if TYPE_CHECKING:
    from ctl.loop import Loop

_TRAINED = "trained"  # which variables train, if not all do: see `Loop.train_only`
_COMPILED = "compiled"  # there if XLA compiles the step: see `ctl.tuning.jit`


def state_of(loop: Loop) -> dict[str, list[tf.Variable]]:
    """Variables that a checkpoint must hold, by group."""
    state, trains = loop.step.state(), loop.step.trains
    if memories := [owner.memory for owner in with_memory(loop.eval_actions)]:
        state["memory"] = memories
    if not all(trains):
        state[_TRAINED] = [_setting(trains)]
    if loop.step.jit_compile:
        state[_COMPILED] = [_setting([True])]
    return state


def save(loop: Loop, metrics: dict[str, float] | None, wait: bool) -> None:
    """See `Loop.save`."""
    checkpoints = _checkpoints(loop)
    loop.step.of_replicas.collect(loop.strategy)
    if not workers.is_chief(loop.strategy):
        return
    with watchdog.host("saving", loop.global_step):
        check_state(loop.step, this_worker=True)
        checkpoints.save(loop.global_step, state_of(loop), metrics, wait=wait)


def annotate(loop: Loop, step: int, results: dict[str, float], wait: bool) -> None:
    """Adds the ``results`` of an evaluation to the checkpoint of ``step``, if there are any."""
    if loop.checkpoints and workers.is_chief(loop.strategy):
        loop.checkpoints.annotate(step, results, stopped=loop.stopped)
        if wait:
            loop.checkpoints.wait()


def restore(loop: Loop) -> tuple[Saved | None, dict[str, float]]:
    """Returns the checkpoint that was restored, and the results of its evaluation if it had one.

    A checkpoint is written before its evaluation, so this evaluation is remembered now.
    """
    state = state_of(loop)
    for settings in (_TRAINED, _COMPILED):  # a checkpoint of another phase or setting has none
        state.pop(settings, None)
    saved = _checkpoints(loop).restore(state)
    if not saved:
        return None, {}
    loop.train_only(None)
    if _TRAINED in saved.variables:
        [values] = bundle.read(saved.prefix, {_TRAINED: [_setting(loop.step.trains)]})[_TRAINED]
        loop.step.trains = tuple(bool(value) for value in values)
    jit.keep(loop, _COMPILED in saved.variables)
    replicas.offset_dropout_seeds(loop.strategy, loop.step.parts.layer)
    loop.step.of_replicas.spread(loop.strategy)
    loop.step.settings.rates.clear()
    results = {name: saved.metrics[name] for name in saved.evaluated}
    for owner in with_memory(loop.eval_actions) if results else []:
        owner.evaluated(saved.step, results)
    return saved, results


class _Setting(NamedTuple):
    """Stands for a variable in a state. To make one waits for all workers in the scope of their
    strategy, and only the chief saves."""

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    tensor: tf.Tensor

    def value(self) -> tf.Tensor:
        return self.tensor

    def numpy(self) -> np.ndarray:
        return self.tensor.numpy()


def _setting(values: Sequence[bool]) -> _Setting:
    tensor = tf.constant([int(one) for one in values], tf.int32)
    return _Setting("Variable", tensor.dtype, tensor.shape, tensor)


def _checkpoints(loop: Loop) -> CheckpointManager:
    if loop.checkpoints is None:
        raise UsageError("this loop has no checkpoints: give Loop(checkpoints=...)")
    return loop.checkpoints
