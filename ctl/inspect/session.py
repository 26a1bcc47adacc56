"""Inspects steps while a loop trains: what `ctl.TrainStep.inspect` gives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ctl.actions import Sink
from ctl.errors import UsageError
from ctl.inspect.measure.blame import Blame, blame
from ctl.inspect.measure.link import Measured
from ctl.inspect.measure.profile import profiled
from ctl.inspect.measure.recording import Recording
from ctl.inspect.measure.timeline import Timeline, join
from ctl.inspect.measure.verdict import verdict
from ctl.inspect.measure.window import Window
from ctl.inspect.periodic import Periodic
from ctl.inspect.plan.plan import Plan
from ctl.inspect.plan.plan import from_json as plan_from_json
from ctl.inspect.show.report import print_report
from ctl.step import TrainStep


class Inspection:
    """What `TrainStep.inspect` gives: the last ``steps`` steps that a loop runs inside the block.

        with step.inspect(steps=20) as seen:
            loop.train(until=100)
        print(*seen.verdict(), sep="\\n")

    Warm up before, for 30 steps at least: the first are scheduled in other ways. With ``profile``,
    TensorFlow's profiler runs over the block, too, and the times of packs are split further; train
    no more than some hundred steps then.

    Attributes, after the block:
        windows: of all workers, in their order.
        timeline: of all of them, see `ctl.inspect.measure.timeline`.
    """

    windows: list[Window]
    timeline: Timeline

    def __init__(self, step: TrainStep, steps: int = 20, *, profile: bool = False):
        if step.strategy is None:
            raise UsageError("a step is inspected while a loop runs it: make the Loop first")
        self._recording = Recording(step, steps)
        self._profile = profiled() if profile else contextlib.nullcontext([])
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
        """The same every ``steps`` steps of a training: an action for ``Loop(actions=...)``."""
        return Periodic(self._recording, steps, sinks)

    @property
    def plan(self) -> Plan | None:
        """What the steps moved."""
        return plan_from_json(self.timeline.plan) if self.timeline.plan else None

    @property
    def blame(self) -> Blame | None:
        """The worker that is late again and again; None where there is none."""
        return blame(self.timeline)

    def verdict(self, measured: Measured | None = None) -> tuple[str, str, str]:
        """What bounds the step; why; what to try next."""
        return verdict(self.timeline, measured)

    def show(self, measured: Measured | None = None) -> None:
        """Prints the tables and the verdict."""
        print_report(self.timeline, self.verdict(measured), plan=self.plan, measured=measured)
