"""Inspects some steps: the only place that turns marks on and off and gathers what they saw."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.inspect.blame import Blame, blame
from ctl.inspect.clocks import barriers
from ctl.inspect.link import Measured
from ctl.inspect.marks import Marks, Ring
from ctl.inspect.plan import Plan
from ctl.inspect.plan import from_json as plan_from_json
from ctl.inspect.profile import profiled, with_collectives
from ctl.inspect.report import print_report
from ctl.inspect.timeline import Timeline, join
from ctl.inspect.verdict import verdict
from ctl.inspect.window import Pack, Window
from ctl.step import TrainStep
from ctl.workers import all_gather, cluster_of, is_multi_worker


class Recording:
    """Marks that can be switched on and off any number of times, with one trace.

    With several workers all must do so at the same steps, and all must call `take`.

    Args:
        step: a built step.
        steps: how many the windows hold; the last of those that ran.
    """

    def __init__(self, step: TrainStep, steps: int):
        if steps < 1:
            raise UsageError(f"a window of {steps} steps: it must have 1 or more")
        self.step = step
        self._ring = Ring(step, steps + 1)  # a step begins where the one before was applied
        self._before: Marks | None = None
        before = step.marks.stores if step.marks else ()
        self._marks = Marks(step, *before, self._ring)
        self._barriers: np.ndarray | None = None
        self._plan: dict[str, Any] | None = None

    def start(self) -> None:
        """From the next call of the loop on, steps are stamped."""
        self._ring.clear()
        self._before, self.step.marks = self.step.marks, self._marks

    def stop(self) -> None:
        """The steps that follow are not stamped."""
        if self._plan is None and len(self._ring.read()[0]):
            self._plan = self.step.plan().to_json()  # of the trace that has run
        self.step.marks = self._before

    def take(self, traces: Sequence[Any] = (), *, align: bool = True) -> list[Window]:
        """The windows of all workers, in their order, on every worker.

        Args:
            traces: of the profiler over the same steps, see `ctl.inspect.profile`.
            align: meet the other workers to compare clocks, which takes 0.2 to 0.4 s; otherwise the
                last meeting counts, or this one when it is the first.
        """
        strategy = self.step.strategy
        if align or self._barriers is None:
            self._barriers = barriers(strategy)
        steps, stamps = self._ring.read()
        cluster = cluster_of(strategy) if is_multi_worker(strategy) else None
        mine = Window(
            worker=cluster.index if cluster else 0,
            workers=len(cluster.workers) if cluster else 1,
            steps=steps,
            names=self._ring.names,
            stamps=stamps,
            packs=tuple(
                Pack(f"pack{number}", size) for number, size in enumerate(self._marks.pack_bytes)
            ),
            in_order=self._marks.in_order,
            barriers=self._barriers,
            description=_describe(self.step),
            plan=self._plan,
        )
        mine = with_collectives(mine, traces)
        if not cluster:
            return [mine]
        texts = all_gather(strategy, json.dumps(mine.to_json()).encode(), "an inspection")
        return [Window.from_json(json.loads(text)) for text in texts]


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
        timeline: of all of them, see `ctl.inspect.timeline`.
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


def _describe(step: TrainStep) -> str:
    strategy = step.strategy
    kind = type(strategy).__name__
    replicas = strategy.num_replicas_in_sync
    return (
        f"{step.model.name}, {step.model.count_params():,} parameters, {replicas} "
        f"replica{'s' if replicas > 1 else ''} under {kind}, TensorFlow {tf.__version__}"
    )
