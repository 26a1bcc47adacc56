"""Inspects steps while a loop trains: those of a block (`Inspection`), or a few at intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from absl import logging

from ctl.base import tf_internals
from ctl.base.actions import Action, Sink, Status
from ctl.base.ledger import LEDGER
from ctl.inspect.measure import WARM_UP
from ctl.inspect.measure.late_worker import LateWorker, late_worker
from ctl.inspect.measure.link import Measured
from ctl.inspect.measure.profile import profiled
from ctl.inspect.measure.recording import Recording
from ctl.inspect.measure.timeline import Timeline, exposed_seconds, join
from ctl.inspect.measure.verdict import verdict
from ctl.inspect.measure.window import Window
from ctl.inspect.show.report import print_report, scalars
from ctl.loop import Loop
from ctl.phases.plan.plan import Plan
from ctl.phases.plan.plan import from_json as plan_from_json

# Clocks are compared again after so many seconds: it takes 0.2 to 0.4 s, and they drift.
_ALIGN_AFTER = 30.0


class Inspection:
    """A context manager that inspects the last ``steps`` steps that a loop runs inside it::

        with ctl.Inspection(loop, steps=20) as seen:
            loop.train(until=100)
        print(*seen.verdict(), sep="\\n")

    Train at least 30 steps before: TensorFlow schedules its first steps differently.

    Args:
        loop: whose steps are inspected. All workers must do so at once.
        steps: number of steps to inspect, 1 or more.
        profile: also run TensorFlow's profiler, which splits the times of packs further. Train no
            more than some hundred steps inside the block then.

    Attributes:
        windows: of all workers, in order; set when the block ends.
        traces: profiles of the steps, see `ctl.inspect.measure.profile`; empty without ``profile``.
        timeline: the windows joined, see `ctl.inspect.measure.timeline`; set when the block ends.

    Raises:
        UsageError: the step cannot be stamped, or ``steps`` is below 1.
    """

    windows: list[Window]
    timeline: Timeline

    def __init__(self, loop: Loop, steps: int = 20, *, profile: bool = False):
        self._recording = Recording(loop, steps)
        self._profile = profiled(profile)

    def __enter__(self) -> Inspection:
        self.traces: list[Any] = self._profile.__enter__()
        self._recording.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recording.stop(failed=kind is not None)
        self._profile.__exit__(kind, error, traceback)
        if kind is None:
            self.windows = self._recording.take(self.traces)
            self.timeline = join(self.windows)

    def every(self, steps: int, sinks: Sequence[Sink]) -> Periodic:
        """An action for ``Loop(actions=...)`` that inspects every ``steps`` steps of a training."""
        return Periodic(self._recording, steps, sinks)

    @property
    def plan(self) -> Plan | None:
        """The plan of the inspected step, from worker 0; None if there is none."""
        return plan_from_json(self.timeline.plan) if self.timeline.plan else None

    @property
    def late_worker(self) -> LateWorker | None:
        """The worker that is late in most steps or in a rhythm; None if there is none."""
        return late_worker(self.timeline)

    def verdict(self, measured: Measured | None = None) -> tuple[str, ...]:
        """Lines: what bounds the step; why; what to try next; a worker late in a rhythm, if any."""
        return verdict(self.timeline, measured)

    def show(self, measured: Measured | None = None) -> None:
        """Prints the tables and the verdict. ``measured`` adds bandwidths relative to it."""
        print_report(self.timeline, self.verdict(measured), plan=self.plan, measured=measured)


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
        LEDGER.inspect(*exposed_seconds(timeline, self._recording.worker))
        for sink in self._sinks:
            sink.write({"phase": "inspect", "step": step, "time": time.time(), **scalars(timeline)})
        late = late_worker(timeline)
        if late and self._sinks:
            logging.warning(
                "worker %d is late: its %s takes longer, and the others wait %.1f ms %s",
                *(late.worker, late.phase, late.seconds * 1e3, late.when),
            )


def inspect_every(loop: Loop, steps: int, sinks: Sequence[Sink]) -> list[Action]:
    """The action that inspects every ``steps`` steps of ``loop``; an empty list, with a warning, if
    this TensorFlow cannot stamp."""
    reason = tf_internals.why_no_timestamps()
    if reason:
        logging.warning("--inspect_every: %s", reason)
        return []
    return [Inspection(loop).every(steps, sinks)]
