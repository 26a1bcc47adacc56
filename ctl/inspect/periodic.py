"""Inspects some steps every so many steps of a training, and logs scalars."""

from __future__ import annotations

import time
from collections.abc import Sequence

from absl import logging

from ctl.base.actions import Sink, Status
from ctl.inspect.measure import WARM_UP
from ctl.inspect.measure.late_worker import late_worker
from ctl.inspect.measure.recording import Recording
from ctl.inspect.measure.timeline import join
from ctl.inspect.show.report import scalars

# Clocks are compared again after so many seconds: it takes 0.2 to 0.4 s, and they drift.
_ALIGN_AFTER = 30.0


class Periodic:
    """An action that inspects a window of steps every ``every`` steps.

    It writes the scalars of `ctl.inspect.show.report.scalars` and names a late worker in the log.
    With several workers, all need this action. The first window costs a trace of the step and runs
    `WARM_UP` more steps. Marks cost time inside a window only (`benchmarks/inspect_overhead.py`).

    Args:
        recording: its ``steps`` are the length of a window.
        every: steps from the beginning of a window to the beginning of the next.
        sinks: receive the scalars; empty on workers that do not log.
    """

    def __init__(self, recording: Recording, every: int, sinks: Sequence[Sink]):
        self._recording = recording
        self._every = every
        self._sinks = sinks
        self._until: int | None = None  # the end of the current window, if there is one
        self._windows = 0

    def steps_until_due(self, step: int) -> int:
        """Steps from ``step`` to the next beginning or end of a window."""
        if self._until is not None and step < self._until:
            return self._until - step
        return self._every - step % self._every

    def __call__(self, status: Status) -> None:
        """Begins or ends a window if one is due."""
        if self._until is not None and status.step >= self._until:
            self._finish(status.step)
        if self._until is None and status.step % self._every == 0 and not status.final:
            self._recording.start()
            self._until = (
                status.step + self._recording.steps + 1 + (0 if self._windows else WARM_UP)
            )

    def _finish(self, step: int) -> None:
        self._recording.stop()
        self._until = None
        windows = self._recording.take(align=not self._windows)
        if windows[0].clock_age > _ALIGN_AFTER:  # a window that all workers have, so all agree
            windows = self._recording.take()
        self._windows += 1
        timeline = join(windows)
        for sink in self._sinks:
            sink.write({"phase": "inspect", "step": step, "time": time.time(), **scalars(timeline)})
        late = late_worker(timeline)
        if late and self._sinks:
            logging.warning(
                "worker %d is late: the others wait %.1f ms %s, its %s takes longer",
                *(late.worker, late.seconds * 1e3, late.when, late.phase),
            )
