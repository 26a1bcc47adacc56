"""Measures the cost of the all-reduce by leaving it out of the step.

Runs the step with and without its all-reduce in interleaved blocks, and restores the state of every
replica afterwards. Only the collective is left out, so the difference is the exposed communication,
including the wait for other replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.jobs.trials import preserved
from ctl.phases.marks import Marks
from ctl.phases.observer import NO_OBSERVER, Observer

if TYPE_CHECKING:
    from ctl.loop import Loop

_WARM_UP = 2  # untimed blocks of each kind: the first one is traced


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Seconds per step with (``whole``) and without the all-reduce, float64 [rounds]. Blocks i of
    both kinds ran in sequence."""

    whole: np.ndarray
    without: np.ndarray

    @property
    def exposed(self) -> np.ndarray:
        """Exposed communication, float64 [rounds], seconds per step; noise can make it negative."""
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
    """The step without its all-reduce. ``called``: whether the step asked for one."""

    called = False

    def all_reduce(self, tensors: Sequence[tf.Tensor], **options: Any) -> list[tf.Tensor]:
        del options
        self.called = True
        return [tf.identity(tensor) for tensor in tensors]


def ablate(loop: Loop, *, rounds: int = 8, steps: int = 20) -> Ablation:
    """Times ``rounds`` blocks of ``steps`` steps with the all-reduce and as many without.

    Variables, metrics and the position in the data are restored afterwards. With several workers,
    all must call it.

    Raises:
        UsageError: the step sums gradients by itself, so nothing can be left out.
    """
    step = loop.step
    before = step.observer
    whole = NO_OBSERVER if isinstance(before, Marks) else before
    without = _WithoutReduction()
    observers = {True: whole, False: without}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with _kept(loop):
        try:
            for number in range(_WARM_UP + rounds):
                for reduces in (True, False) if number % 2 else (False, True):
                    step.observer = observers[reduces]
                    start = time.perf_counter()
                    loop.train(loop.global_step + steps, progress=False)
                    if not (reduces or without.called):
                        raise UsageError(
                            "the step sums gradients without step.observer.all_reduce, so its sum "
                            "cannot be skipped: leave out --ablate"
                        )
                    if number >= _WARM_UP:
                        seconds[reduces].append((time.perf_counter() - start) / steps)
        finally:
            step.observer = before
    return Ablation(np.array(seconds[True]), np.array(seconds[False]))


@contextlib.contextmanager
def _kept(loop: Loop) -> Iterator[None]:
    """Restores every copy of every variable afterwards, and runs no action of the loop."""
    actions, loop.actions = loop.actions, []
    try:
        with preserved(loop.step):
            yield
    finally:
        loop.actions = actions
        loop.scalars.reset()  # it has counted these steps
