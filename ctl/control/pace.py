"""Chooses how many steps one call of a loop runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Target duration of a call, in seconds. Between calls, Python handles signals and runs actions that
# are due by time, which costs about 1 ms.
_CALL_SECONDS = 0.5


class Pace:
    """Chooses the number of steps per call, so that a call takes about half a second.

    All workers must run the same number of steps, but their clocks differ. They therefore use the
    mean of their measurements, which each gets from the reduction at the end of the next call.

    Attributes:
        elapsed: seconds that calls have taken, without tracing: a clock that all workers share.

    Args:
        steps_per_loop: a fixed number of steps per call.
        first_alone: whether the first call runs one step all the same.
    """

    def __init__(self, steps_per_loop: int | None = None, first_alone: bool = False):
        self._fixed = steps_per_loop
        self._first_alone = first_alone
        self.elapsed = 0.0
        self._measured = self._agreed = 0.0  # seconds per step; 0: not known
        self._key: Any = None  # of the call that runs
        self._traced: set[Any] = set()  # keys of calls that succeeded
        self._first = True

    def steps(self) -> int:
        """The number of steps of the next call."""
        if self._fixed and (self._traced or not self._first_alone):
            return self._fixed
        return max(1, int(_CALL_SECONDS / self._agreed)) if self._agreed else 1

    def worker_report(self, *asked: bool) -> tf.Tensor:
        """Returns ``asked`` as 0/1, then seconds per step, float32 [len(asked) + 1]."""
        return tf.constant([*map(float, asked), self._measured])

    def will_trace(self, key: Any = ()) -> bool:
        """Whether the next call is traced before it runs, which makes its duration meaningless.
        Call it once before each call; the loop keeps one trace per ``key``."""
        self._first, self._key = key not in self._traced, key
        return self._first

    def record_duration(self, seconds: float, steps: int, mean: float | None) -> bool:
        """Updates the pace after a call of ``steps`` steps. ``mean`` is that of the workers'
        reports, in seconds per step; None for one worker.

        Returns False if the call was traced, so that its duration means nothing.
        """
        self._traced.add(self._key)
        if not self._first:
            self._measured = seconds / steps
        self._agreed = self._measured if mean is None else mean
        self.elapsed += self._agreed * steps
        return not self._first
