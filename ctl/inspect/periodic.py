"""Marks now and then during a training: the only place that logs what they say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import logging

from ctl.actions import Sink
from ctl.inspect.measure.blame import blame
from ctl.inspect.measure.recording import Recording
from ctl.inspect.measure.timeline import join
from ctl.inspect.show.report import scalars

if TYPE_CHECKING:
    from ctl.loop import Status

_WARM_UP = 40  # steps after the first switch, which has a trace of its own
# Clocks are compared every so many windows: that takes 0.2 to 0.4 s, and they drift by some ppm.
_ALIGN_EVERY = 10


class Periodic:
    """An action that inspects some steps every ``every`` steps and writes ``allreduce/exposed_ms``,
    ``allreduce/busbw`` and ``allreduce/late_ms``; a late worker is named in the log.

    With several workers all need one. The first window costs a trace of the step; in a window marks
    cost what `benchmarks/inspect_overhead.py` prints, and nothing outside of it.

    Args:
        recording: of so many steps as a window has.
        every: steps from the begin of a window to that of the next.
        sinks: where scalars go; none on workers that do not log.
    """

    def __init__(self, recording: Recording, every: int, sinks: Sequence[Sink]):
        self._recording = recording
        self._every = every
        self._sinks = sinks
        self._until: int | None = None  # the step at which the window ends that is under way
        self._windows = 0

    def steps_until_due(self, step: int) -> int:
        """Steps to the begin or the end of a window."""
        if self._until is not None and step < self._until:
            return self._until - step
        return self._every - step % self._every

    def __call__(self, status: Status) -> None:
        if self._until is not None and status.step >= self._until:
            self._finish(status.step)
        if self._until is None and status.step % self._every == 0 and not status.final:
            self._recording.start()
            self._until = (
                status.step + self._recording.steps + 1 + (0 if self._windows else _WARM_UP)
            )

    def _finish(self, step: int) -> None:
        self._recording.stop()
        self._until = None
        windows = self._recording.take(align=self._windows % _ALIGN_EVERY == 0)
        self._windows += 1
        timeline = join(windows)
        for sink in self._sinks:
            sink.write({"phase": "inspect", "step": step, "time": time.time(), **scalars(timeline)})
        late = blame(timeline)
        if late and self._sinks:
            logging.warning(
                "worker %d is late: the others wait %.1f ms in %d of %d steps, its %s takes longer",
                *(late.worker, late.seconds * 1e3, late.steps, late.of, late.phase),
            )
