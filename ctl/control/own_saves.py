"""When a loop saves without being asked: see ``save_every_seconds`` of `ctl.CheckpointManager`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import logging

from ctl.checkpoint.manager import CheckpointManager
from ctl.control.pace import Pace


class OwnSaves:
    """Decides when `ctl.Loop.train` saves into ``checkpoints``, by the clock of ``pace``, which all
    workers share.

    Attributes:
        seconds: of steps between two saves; None if only the program saves.
        last: the step of the last save of anybody; -1 for none.
        last_own: that of the last one that the program has not asked for.
    """

    def __init__(self, checkpoints: CheckpointManager | None, pace: Pace):
        self.seconds: float | None = getattr(checkpoints, "save_every_seconds", None)
        self.last = self.last_own = -1
        self._checkpoints, self._pace = checkpoints, pace
        self._last_time = 0.0  # by `Pace.elapsed`
        self._paused = False

    def note(self, step: int) -> None:
        """The state of ``step`` is saved, or was restored."""
        self.last, self._last_time = step, self._pace.elapsed

    @property
    def are_on(self) -> bool:
        """Whether the loop saves by itself now."""
        return bool(self.seconds) and not self._paused and not self._are_closed

    @property
    def are_due(self) -> bool:
        """Whether the steps since the last save have taken long enough."""
        return self.are_on and self._pace.elapsed - self._last_time >= (self.seconds or 0.0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, others save: the evaluations of a training."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def warn_if_closed(self) -> None:
        """Logs that nothing is saved, if a later manager has closed that of the loop."""
        if self.seconds and self._are_closed:
            logging.warning("train() saves nothing: the manager of the checkpoints is closed")

    @property
    def _are_closed(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_closed
