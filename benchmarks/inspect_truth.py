"""Does `ctl.inspect` measure what is there? Plants delays in real workers and looks for them.

    python benchmarks/inspect_truth.py

Two workers train on loopback. In each case of 20 steps, one of them sleeps in one phase. Afterwards
the time stamps of worker 1 are shifted by --clock. The table shows the delay that `ctl.inspect`
measured and the share of steps in which it blamed the right worker and phase. In the --calm runs,
where nothing is planted, it should name no worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from processes import tasks

from ctl import launch
from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command
from ctl.inspect.measure.late_worker import accused, late_worker
from ctl.inspect.measure.timeline import Timeline, join
from ctl.inspect.measure.window import Window

_PEER = pathlib.Path(__file__).parent / "peers" / "inspected.py"

with group("What is planted"):
    _SECONDS = flags.DEFINE_float("seconds", 0.02, "length of the delay", lower_bound=0.0)
    _CLOCK = flags.DEFINE_float("clock", 2.0, "seconds that worker 1's clock is ahead")
    _ROUNDS = flags.DEFINE_integer("rounds", 3, "rounds over the delays", lower_bound=1)
    _CALM = flags.DEFINE_integer("calm", 20, "windows with nothing planted", lower_bound=0)
with group("How"):
    _TIMEOUT = flags.DEFINE_float("timeout", 600.0, "seconds for all of it")


@dataclasses.dataclass(frozen=True)
class Case:
    """A window of steps in which ``worker`` sleeps for ``seconds`` in ``phase`` of every step. With
    ``phase`` None, no worker sleeps."""

    name: str
    worker: int = 0
    phase: str | None = None
    seconds: float = 0.0


def observe(cases: Sequence[Case], directory: pathlib.Path, timeout: float) -> list[list[Window]]:
    """Trains two real workers, which keep their files in ``directory``.

    Returns:
        For each case, the windows of both workers.

    Raises:
        CtlError: a worker failed, or had not ended after ``timeout`` seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cases.json").write_text(json.dumps([dataclasses.asdict(c) for c in cases]))
    with contextlib.ExitStack() as stack:
        workers = []
        for index, task in enumerate(tasks(launch.cluster(2)["worker"])):
            log = stack.enter_context(open(directory / f"log-{index}", "w"))
            worker = subprocess.Popen(
                [sys.executable, str(_PEER), str(directory)],
                env={**os.environ, **task, "CUDA_VISIBLE_DEVICES": "-1"},
                stdout=log,
                stderr=log,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        for index, worker in enumerate(workers):
            try:
                code = worker.wait(timeout)
            except subprocess.TimeoutExpired:
                raise CtlError(f"worker {index} took more than {timeout:.0f} s") from None
            if code:
                said = (directory / f"log-{index}").read_text().strip().splitlines()
                raise CtlError(f"worker {index} failed: {said[-1] if said else code}")
    found: list[Any] = [json.loads((directory / f"{c.name}.json").read_text()) for c in cases]
    return [[Window.from_json(each) for each in windows] for windows in found]


def shifted(windows: Sequence[Window], ahead: float) -> list[Window]:
    """``windows`` as they would be if the clock of worker 1 was ``ahead`` seconds fast."""
    return [
        dataclasses.replace(w, stamps=w.stamps + ahead, barriers=w.barriers + ahead)
        if w.worker == 1
        else w
        for w in windows
    ]


def found_delay(timeline: Timeline, case: Case) -> tuple[float, float]:
    """How well ``timeline`` shows the delay of ``case``.

    Returns:
        Seconds that the phase took longer on the delayed worker than on the other one, median over
        the steps; the share of steps in which this worker and phase are accused.
    """
    took = timeline.phases[case.phase]
    delay = float(np.median(took[case.worker] - took[1 - case.worker]))
    blamed = [bool(each) and each[:2] == (case.worker, case.phase) for each in accused(timeline)]
    return delay, float(np.mean(blamed))


def main() -> None:
    planted = [
        Case(f"{phase}-{worker}-{number}", worker, phase, _SECONDS.value)
        for number in range(_ROUNDS.value)
        for phase in ("input", "forward")
        for worker in (0, 1)
    ]
    calm = [Case(f"calm-{number}") for number in range(_CALM.value)]
    with tempfile.TemporaryDirectory(prefix="ctl-truth-") as directory:
        seen = observe([*planted, *calm], pathlib.Path(directory), _TIMEOUT.value)
    print(f"planted: {_SECONDS.value * 1e3:.1f} ms; clock of worker 1: {_CLOCK.value:+.1f} s")
    print("worker  phase    measured ms  others waited ms  blamed  clock ms (+- bound)")
    for case, windows in zip(planted, seen, strict=False):
        timeline = join(shifted(windows, _CLOCK.value))
        delay, share = found_delay(timeline, case)
        waited = float(np.median(timeline.late[case.worker]))
        clock = timeline.clocks[1]
        off = (clock.offset - _CLOCK.value) * 1e3
        print(
            f"{case.worker:6}  {case.phase:7}  {delay * 1e3:11.2f}  {waited * 1e3:16.2f}  "
            f"{share:6.0%}  {off:+.2f} +- {clock.error * 1e3:.2f}"
        )
    named = [late_worker(join(windows)) for windows in seen[len(planted) :]]
    print(f"nothing planted: a worker was named in {sum(map(bool, named))} of {len(named)} runs")


if __name__ == "__main__":
    run_command(main, __doc__)
