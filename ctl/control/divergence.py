"""Detects a diverged training: the loss is not finite, or all updates are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable

from absl import logging

from ctl.checkpoint.manager import CheckpointManager
from ctl.errors import CheckpointError, DivergedError

# Skipped updates in a row after which a run is lost. The loss scale needs at most 15 halvings from
# its initial value to 1, so more skips than that are not its search for a scale.
_MOST_SKIPPED = 100


class Divergence:
    """Checks the steps of each call.

    Args:
        checkpoints: named in the message as the last good state, if any.
    """

    def __init__(self, checkpoints: CheckpointManager | None):
        self._checkpoints = checkpoints
        self._skipped_in_a_row = 0

    def check(
        self, step: int, steps: int, loss: float, skipped: int, first_bad: Callable[[], int]
    ) -> None:
        """Checks one call of the loop.

        Args:
            step: global step after the call.
            steps: number of steps of the call.
            loss: mean loss of these steps.
            skipped: number of these steps whose update was skipped.
            first_bad: returns the first step whose loss is not finite; called if ``loss`` is not.

        Raises:
            DivergedError: ``loss`` is not finite, or 100 or more updates in a row were skipped.
        """
        if not math.isfinite(loss):
            self._end(f"the loss is {loss} at step {first_bad()}")
        self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            self._end(
                f"the last {self._skipped_in_a_row} updates were skipped, their gradients were not "
                f"finite (step {step})"
            )

    def _end(self, what: str) -> None:
        good = None
        if self._checkpoints:
            try:
                self._checkpoints.wait()  # the pending save may be the last good checkpoint
            except CheckpointError as error:
                logging.error("%s", error)
            good = self._checkpoints.latest()
        raise DivergedError(
            f"{what}; last good checkpoint: {good.path if good else 'none'}; try a lower learning "
            "rate, clipping (--clip_norm) or --on_nan=skip"
        )
