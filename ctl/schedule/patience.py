"""How long a metric has not improved: the memory of early stopping and of a plateau schedule."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.base.actions import STOP
from ctl.base.best import mode_of
from ctl.base.foreign_names import refuses_foreign
from ctl.distributed import workers
from ctl.errors import UsageError


class _Memory(NamedTuple):
    """What a checkpoint holds of a `Patience`."""

    known: float = 0.0  # 1 if there is a best value
    best: float = 0.0
    waited: float = 0.0  # evaluations since then
    pause: float = 0.0  # evaluations left that do not count
    ended: float = 0.0  # how often the patience has ended
    step: float = -1.0  # of the last evaluation


class Patience:
    """Counts the evaluations in which a metric has not improved.

    All workers have the same results, so they decide alike.

    Args:
        metric: its name in the results of an evaluation.
        patience: number of evaluations in a row without an improvement that end the patience.
        mode: "min" or "max", the best value; by default what the name says, such as "min" for
            ``loss`` and ``mae``, "max" for ``accuracy`` and ``auc``.
        min_delta: an improvement must be larger than this.
        cooldown: evaluations that do not count after the patience has ended.

    Raises:
        UsageError: an argument is out of range, or ``mode`` is missing and the name does not say
            it.
    """

    @refuses_foreign
    def __init__(
        self,
        metric: str,
        patience: int,
        mode: str | None = None,
        min_delta: float = 0.0,
        cooldown: int = 0,
    ):
        if patience < 1 or cooldown < 0 or not 0 <= min_delta < math.inf:
            raise UsageError(
                "patience must be at least 1, cooldown and min_delta at least 0, not "
                f"{patience}, {cooldown} and {min_delta}"
            )
        self.metric = metric
        self.patience = patience
        self.mode = mode_of(metric, mode)
        self.min_delta = min_delta
        self.cooldown = cooldown

    @functools.cached_property
    def memory(self) -> tf.Variable:
        """float64 [6], see `_Memory`. A loop makes that of its schedule in the strategy's scope."""
        once = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.init_scope(), workers.watching_variables(tf.distribute.get_strategy()):
            return tf.Variable(_Memory(), dtype=tf.float64, trainable=False, aggregation=once)

    @property
    def ended(self) -> tf.Tensor:
        """How often the patience has ended, a float64 scalar."""
        return self.memory[_Memory._fields.index("ended")]

    def evaluated(self, step: int, results: Mapping[str, float]) -> bool:
        """Counts an evaluation, and returns whether it ends the patience. Another evaluation of the
        same step does not count.

        Raises:
            UsageError: ``results`` have no such metric.
        """
        if self.metric not in results:
            raise UsageError(
                f"the evaluation has no {self.metric!r} to watch; it has {', '.join(results)}"
            )
        memory, value = _Memory(*self.memory.numpy().tolist()), results[self.metric]
        if step == memory.step:
            return False
        gain = memory.best - value if self.mode == "min" else value - memory.best
        pause = max(0.0, memory.pause - 1)
        waited = memory.waited + 1 if not pause else 0.0
        memory = memory._replace(step=float(step), pause=pause, waited=waited)
        if math.isfinite(value) and (not memory.known or gain > self.min_delta):
            memory = memory._replace(known=1.0, best=value, waited=0.0)
        ends = memory.waited >= self.patience
        if ends:
            memory = memory._replace(ended=memory.ended + 1, waited=0.0, pause=float(self.cooldown))
        self.memory.assign(memory)
        return ends


class EarlyStopping(Patience):
    """An evaluation action that ends the training when a metric has not improved for a while.

    ``ctl.Loop(..., eval_actions=[ctl.EarlyStopping("loss", patience=3)])``. Its memory is in the
    checkpoints, so a resumed run ends at the same step. Arguments as for `Patience`.
    """

    def __call__(self, step: int, results: Mapping[str, float]) -> object:
        """Returns `STOP` if this evaluation ends the patience."""
        return STOP if self.evaluated(step, results) else None


def remembered(schedule: Any) -> list[Any]:
    """The evaluation action of ``schedule``, if it depends on evaluations."""
    return [schedule.evaluated] if hasattr(schedule, "evaluated") else []


def check_watched(actions: Iterable[Any], evaluator: Any, best_metric: str | None = None) -> None:
    """Raises `UsageError` if one of ``actions`` watches a metric that no evaluation will have, or
    if ``best_metric``, by which checkpoints are kept, is none. All workers must call it."""
    for owner in with_memory(actions):
        watcher, metric = type(owner).__name__, getattr(owner, "metric", None)
        if evaluator is None:
            raise UsageError(
                f"{watcher} depends on evaluations: give Loop(evaluator=...), and call "
                "train_and_evaluate or evaluate"
            )
        if metric is not None:
            evaluator.check_result(f"metric of {watcher}", metric)
    if best_metric is not None and hasattr(evaluator, "check_result"):
        evaluator.check_result("best_metric", best_metric)


def usual_best(evaluator: Any) -> str:
    """The metric of the best checkpoint, if none is given: accuracy, if ``evaluator`` has it."""
    with contextlib.suppress(UsageError, AttributeError):
        evaluator.check_result("best_metric", "accuracy")
        return "accuracy"
    return "loss"


def forget(actions: Iterable[Any]) -> None:
    """Lets those of ``actions`` that an earlier training has left with a memory begin anew."""
    for action in actions:
        owner = getattr(action, "__self__", action)
        patience = getattr(owner, "_patience", owner)  # of a schedule
        if isinstance(patience, Patience) and "memory" in vars(patience):
            patience.memory.assign(_Memory())


def with_memory(actions: Iterable[Any]) -> list[Any]:
    """Those of ``actions`` that are, or are methods of, what remembers evaluations."""
    owners = [getattr(action, "__self__", action) for action in actions]
    return [owner for owner in owners if isinstance(getattr(owner, "memory", None), tf.Variable)]
