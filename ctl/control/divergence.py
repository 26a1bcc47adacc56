"""Whether a training is lost: its loss is not finite, or nothing is updated any more."""

from __future__ import annotations

import math
from collections.abc import Callable

from absl import logging

from ctl.checkpoint.manager import CheckpointManager
from ctl.errors import CheckpointError, DivergedError

# Updates in a row that were skipped because gradients were not finite. A loss scale needs at most
# 15 halvings to get from its first value to 1, so after so many the run is lost.
_MOST_SKIPPED = 100


class Divergence:
    """Judges the steps of each call. ``checkpoints``: where the last good state is, or None."""

    def __init__(self, checkpoints: CheckpointManager | None):
        self._checkpoints = checkpoints
        self._skipped_in_a_row = 0

    def check(
        self, step: int, steps: int, loss: float, skipped: int, first_bad: Callable[[], int]
    ) -> None:
        """Raises `DivergedError` where the training is lost.

        Args:
            step: the global step, after ``steps`` steps.
            loss: the sum of their losses.
            skipped: how many of them updated nothing.
            first_bad: the step whose loss is not finite; called where ``loss`` is not.
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
                self._checkpoints.wait()  # the write in flight may be the last good one
            except CheckpointError as error:
                logging.error("%s", error)
            good = self._checkpoints.latest()
        raise DivergedError(
            f"{what}; last good checkpoint: {good.path if good else 'none'}; try a lower learning "
            "rate, clipping (--clip_norm) or --on_nan=skip"
        )
