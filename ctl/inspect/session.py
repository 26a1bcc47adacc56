"""Inspects steps while a loop trains; see `Inspection`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from absl import logging

from ctl.base import tf_internals
from ctl.base.actions import Action, Sink
from ctl.inspect.measure.late_worker import LateWorker, late_worker
from ctl.inspect.measure.link import Measured
from ctl.inspect.measure.profile import profiled
from ctl.inspect.measure.recording import Recording
from ctl.inspect.measure.timeline import Timeline, join
from ctl.inspect.measure.verdict import verdict
from ctl.inspect.measure.window import Window
from ctl.inspect.periodic import Periodic
from ctl.inspect.show.report import print_report
from ctl.loop import Loop
from ctl.phases.plan.plan import Plan
from ctl.phases.plan.plan import from_json as plan_from_json


class Inspection:
    """A context manager that inspects the last ``steps`` steps that a loop runs inside it.

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
        timeline: the windows joined, see `ctl.inspect.measure.timeline`; set when the block ends.

    Raises:
        UsageError: the step cannot be stamped, or ``steps`` is below 1.
    """

    windows: list[Window]
    timeline: Timeline

    def __init__(self, loop: Loop, steps: int = 20, *, profile: bool = False):
        self._recording = Recording(loop, steps)
        self._profile: contextlib.AbstractContextManager[list[Any]] = (
            profiled() if profile else contextlib.nullcontext([])
        )
        self._traces: list[Any] = []

    def __enter__(self) -> Inspection:
        self._traces = self._profile.__enter__()
        self._recording.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recording.stop()
        self._profile.__exit__(kind, error, traceback)
        if kind is None:
            self.windows = self._recording.take(self._traces)
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


def inspect_every(loop: Loop, steps: int, sinks: Sequence[Sink]) -> list[Action]:
    """The action that inspects every ``steps`` steps of ``loop``; an empty list, with a warning, if
    this TensorFlow cannot stamp."""
    reason = tf_internals.why_no_timestamps()
    if reason:
        logging.warning("--inspect_every: %s", reason)
        return []
    return [Inspection(loop).every(steps, sinks)]
