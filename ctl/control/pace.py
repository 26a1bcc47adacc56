"""How many steps one call of a loop runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

# Python wakes at least this often (seconds), to see signals and to let actions run that are due by
# time. A wake costs about 1 ms.
_WAKE_SECONDS = 0.5


class Totals(NamedTuple):
    """What all replicas have summed in a call of the loop: losses, and what workers reported."""

    loss: float  # of the mean losses of the global batches
    stop: float  # above 0: a worker was asked to stop
    pace: float  # see `Pace`


class Pace:
    """How many steps to run in one call, so that Python wakes about every `_WAKE_SECONDS`.

    All workers must run the same number, and their clocks differ: they go by the mean of what all
    of them measured, which each learns from the reduction at the end of the next call.
    """

    def __init__(self, steps_per_loop: int | None = None):
        self._fixed = steps_per_loop
        self._measured = self._agreed = 0.0  # seconds per step; 0: not known
        self._traced_for: Any = None
        self._first = True

    def steps(self) -> int:
        if self._fixed:
            return self._fixed
        return max(1, int(_WAKE_SECONDS / self._agreed)) if self._agreed else 1

    def report(self, stop: bool) -> tf.Tensor:
        """float32 [2], what this worker tells the others: that it was asked to stop, its pace."""
        return tf.constant([float(stop), self._measured])

    def traces(self, key: Any = ()) -> bool:
        """Whether the next call is traced before it runs, so that its time says nothing. The loop
        keeps a trace for each ``key``."""
        self._first, self._traced_for = key != self._traced_for, key
        return self._first

    def took(self, seconds: float, steps: int, mean: float | None) -> bool:
        """Learns from one call, and from the mean of all reports; None where there is one worker.

        Returns:
            False for a call whose time is mostly tracing.
        """
        if not self._first:
            self._measured = seconds / steps
        self._agreed = self._measured if mean is None else mean
        return not self._first
