"""How long steps wait for their input: for the ledger, and once for the user, with a remedy."""

from __future__ import annotations

from typing import Any

from absl import logging

from ctl.base.ledger import LEDGER
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

    def add(self, position: Any, seconds: float, first: bool = False) -> None:
        """Adds a call of ``seconds``, which has ended at ``position`` of the feed; ``first``: it
        was traced, and has waited for the first batches. At the end of a window of some seconds,
        logs if the steps waited for a large share of it; once for a loop. Batches that come in
        blocks are small, and are not waited for."""
        if not isinstance(position, Waited):
            return
        before, self._until_now = self._until_now, float(position.seconds)
        waited = self._until_now - (before if before <= self._until_now else 0.0)
        LEDGER.move("compile" if first else "steps", "input", min(waited, seconds))
        if first or self._said:
            return
        self._waited += waited
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
