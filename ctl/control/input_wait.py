"""Says once that steps wait for their input, and what makes it faster."""

from __future__ import annotations

from typing import Any

from absl import logging

from ctl.data.feed import Waited

_WINDOW_SECONDS = 5.0
_BOUND_SHARE = 0.3  # of the time; without it, the training would be 1.4 times as fast


class InputWait:
    """Adds up how long the steps of a loop wait for their batches.

    Args:
        dataset: its ``faster``, a string, says what to try.
    """

    def __init__(self, dataset: Any):
        self._remedy = getattr(dataset, "faster", "")
        self._waited = self._seconds = self._until_now = 0.0
        self._said = False

    def add(self, position: Any, seconds: float) -> None:
        """Adds a call of ``seconds``, which has ended at ``position`` of the feed. At the end of a
        window of some seconds, logs if the steps waited for a large share of it; once for a loop.
        Batches that come in blocks are small, and are not waited for."""
        if self._said or not isinstance(position, Waited):
            return
        before, self._until_now = self._until_now, float(position.seconds)
        self._waited += self._until_now - (before if before <= self._until_now else 0.0)
        self._seconds += seconds
        if self._seconds < _WINDOW_SECONDS:
            return
        if is_bound(self._waited, self._seconds):
            self._said = True
            logging.warning(
                "the input bounds the speed: steps waited for it for %.0f %% of the last %.0f s%s",
                100 * self._waited / self._seconds,
                self._seconds,
                f"; try {self._remedy}" if self._remedy else "",
            )
        self._waited = self._seconds = 0.0


def is_bound(waited: float, seconds: float) -> bool:
    """Whether the input bounds steps of ``seconds``, of which they ``waited`` for batches."""
    return waited >= _BOUND_SHARE * seconds
