"""What the reduction costs, by taking it out of the step.

The step with and without its all-reduce, in interleaved blocks, on the state as it is; which is put
back afterwards, on every replica. What is left out is the collective and nothing else, so the
difference is the exposed communication, waiting included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.observer import NO_OBSERVER, Observer
from ctl.tune import preserved

if TYPE_CHECKING:
    from ctl.loop import Loop
    from ctl.step import TrainStep

_WARM_UP = 2  # blocks of each kind that are not timed: the first is traced


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Seconds per step of each block, float64 [rounds]; block i of one was next to that of the
    other."""

    whole: np.ndarray
    without: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """float64 [rounds], seconds per step; noise can make one negative."""
        return self.whole - self.without

    def __str__(self) -> str:
        low, median, high = np.percentile(self.exposed, [10, 50, 90]) * 1e3
        whole, without = np.median(self.whole) * 1e3, np.median(self.without) * 1e3
        return (
            f"without its all-reduce the step takes {without:.2f} ms, with it {whole:.2f} ms: "
            f"{median:.2f} ms exposed ({low:.2f} to {high:.2f}, p10 to p90 of "
            f"{len(self.exposed)} interleaved blocks)"
        )


class _WithoutReduction(Observer):
    """The step as it is, without its all-reduce."""

    @staticmethod
    def all_reduce(tensors: Sequence[tf.Tensor], **options: Any) -> list[tf.Tensor]:
        del options
        return [tf.identity(tensor) for tensor in tensors]


def ablate(loop: Loop, *, rounds: int = 8, steps: int = 20) -> Ablation:
    """Times ``rounds`` blocks of ``steps`` steps with the all-reduce and as many without.

    Nothing of the training changes: variables, metrics and the position in the data are those of
    before. With several workers all must call it.
    """
    step = loop.step
    before = step.observer
    observers = {True: NO_OBSERVER, False: _WithoutReduction()}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with _kept(loop):
        try:
            for number in range(_WARM_UP + rounds):
                for whole in (True, False) if number % 2 else (False, True):
                    step.observer = observers[whole]
                    start = time.perf_counter()
                    loop.train(loop.global_step + steps)
                    if number >= _WARM_UP:
                        seconds[whole].append((time.perf_counter() - start) / steps)
        finally:
            step.observer = before
    return Ablation(np.array(seconds[True]), np.array(seconds[False]))


@contextlib.contextmanager
def _kept(loop: Loop) -> Iterator[None]:
    """Puts every copy of every variable back, and the loop's actions away."""
    actions, loop.actions = loop.actions, []
    try:
        with preserved(loop.strategy, _variables(loop.step)):
            yield
    finally:
        loop.actions = actions
        loop.scalars.reset()  # the log has counted these steps


def _variables(step: TrainStep) -> list[tf.Variable]:
    state = [variable for group in step.state().values() for variable in group]
    return state + [v.value for metric in step.metrics for v in metric.variables]
