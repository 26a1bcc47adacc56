"""Runs drawn schedules of faults, and checks what must hold after each attempt.

  python -m tests.chaos.run --seed=1 --hours=1
  python -m tests.chaos.run --seed=1017 --schedules=1     # repeats one: the i-th uses seed + i
  python -m tests.chaos.run --schedule='{"seed": 0, "workers": 2, …}'

Ends with 1 if a check failed. A line for each failure says why, and how to repeat it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command

from .attempt import Attempt, empty, prepare, run, small_disk, to_resume_from
from .draw import KINDS, Schedule, draw, loads
from .judge import Failure, deadline, final_state, judge, wrong_variables

FLAGS = flags.FLAGS

LONGEST = 60.0  # seconds that a job without faults may take, before there is one to compare with

# What is checked, and the columns of the table.
_COLUMNS = {
    "time": "in time",
    "code": "right code",
    "blame": "right blame",
    "state": "nothing lost",
}


class Runner:
    """Runs schedules in a directory. ``disk``: where the jobs save."""

    def __init__(self, directory: Path, disk: Path, factor: float):
        self._directory, self._disk, self._factor = directory, disk, factor
        self._calm: dict[tuple[int, int], tuple[float, str]] = {}

    def _undisturbed(self, workers: int, servers: int) -> tuple[float, str]:
        """Seconds and final state of a job without faults; the same for all of its kind."""
        if (workers, servers) not in self._calm:
            schedule = Schedule(-1, workers, servers, ((),))
            failures, attempts = self._attempts(schedule, LONGEST)
            if failures:
                raise CtlError(f"a job without faults failed: {failures[0].why}")
            state = final_state(self._disk / "run")
            self._calm[workers, servers] = attempts[0].seconds, state
        return self._calm[workers, servers]

    def run(self, schedule: Schedule) -> dict[str, Any]:
        """Runs a schedule. Returns what happened, for JSON."""
        seconds, state = self._undisturbed(schedule.workers, schedule.servers)
        failures, attempts = self._attempts(schedule, seconds)
        checkpoints = self._disk / "run" / "checkpoints"
        if failures:
            pass  # the last attempt was not reached, or has not finished
        elif schedule.servers:
            if wrong := wrong_variables(checkpoints):
                failures.append(Failure("state", wrong))
        elif final_state(self._disk / "run") != state:
            failures.append(Failure("state", "the last checkpoint is not that of a calm job"))
        return {
            "schedule": json.loads(schedule.dumps()),
            "kinds": sorted({hit.fault.kind for attempt in attempts for hit in attempt.hits}),
            "seconds": [round(attempt.seconds, 1) for attempt in attempts],
            "failures": [dataclasses.asdict(failure) for failure in failures],
            "attempts": [_summary(attempt) for attempt in attempts],
        }

    def _attempts(
        self, schedule: Schedule, undisturbed: float
    ) -> tuple[list[Failure], list[Attempt]]:
        """Runs attempts until a check fails."""
        empty(self._disk)
        calm = f"calm-{schedule.workers}-{schedule.servers}"
        name = f"seed-{schedule.seed}" if schedule.seed >= 0 else calm
        attempts: list[Attempt] = []
        run_dir = self._disk / "run"
        for number in range(len(schedule.attempts)):
            before = to_resume_from(run_dir / "checkpoints")
            attempt, damage = run(
                schedule,
                number,
                self._directory / f"{name}-{number}",
                self._disk,
                lambda attempt: deadline(attempt, undisturbed, self._factor),
            )
            attempts.append(attempt)
            if failures := judge(attempt, run_dir, before):
                return [Failure(f.check, f"attempt {number}: {f.why}") for f in failures], attempts
            damage()
        return [], attempts


def _summary(attempt: Attempt) -> dict[str, Any]:
    return {
        "hits": [
            {
                "number": hit.fault.number,
                "kind": hit.fault.kind,
                "after": round(hit.at - attempt.began, 2),
                "marks": hit.marks,
            }
            for hit in attempt.hits
        ],
        "ends": {
            name: [(code, round(at - attempt.began, 2)) for code, at in ends]
            for name, ends in attempt.ends.items()
        },
        "damaged": attempt.damaged,
    }


def schedules() -> Iterator[Schedule]:
    """Those that the flags ask for."""
    if FLAGS.schedule:
        yield loads(FLAGS.schedule)
        return
    until = time.monotonic() + 3600 * FLAGS.hours
    number = 0
    while number < FLAGS.schedules if FLAGS.schedules else time.monotonic() < until:
        yield draw(FLAGS.seed + number, workers=FLAGS.workers, attempts=FLAGS.attempts)
        number += 1


def table(results: list[dict[str, Any]]) -> str:
    """A line for each kind of fault: in how many schedules it came, and in how many of these each
    check held in all attempts."""
    lines = [f"{'fault':<10} {'schedules':>10}" + "".join(f"{c:>14}" for c in _COLUMNS.values())]
    for kind in [*KINDS, "all"]:
        of = [r for r in results if kind == "all" or kind in r["kinds"]]
        failed = [{failure["check"] for failure in r["failures"]} for r in of]
        held = [sum(check not in checks for checks in failed) for check in _COLUMNS]
        lines.append(f"{kind:<10} {len(of):>10}" + "".join(f"{count:>14}" for count in held))
    return "\n".join(lines)


def progress(text: str) -> None:
    """Replaces the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    prepare()
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as disk,
        small_disk(Path(disk)),
    ):
        runner = Runner(Path(FLAGS.keep_output or directory), Path(disk), FLAGS.factor)
        for schedule in schedules():
            progress(f"schedule {len(results) + 1}: seed {schedule.seed}")
            result = runner.run(schedule)
            progress("")
            results.append(result)
            if FLAGS.out:
                with open(FLAGS.out, "a") as file:
                    print(json.dumps(result), file=file)
            for failure in result["failures"]:
                print(f"seed {schedule.seed}: {failure['check']}: {failure['why']}", flush=True)
            if result["failures"]:
                print(f"  repeat: python -m tests.chaos.run --schedule='{schedule.dumps()}'")
    minutes = (time.monotonic() - began) / 60
    print(table(results))
    print(f"{len(results)} schedules in {minutes:.1f} minutes")
    if failed := [str(r["schedule"]["seed"]) for r in results if r["failures"]]:
        raise CtlError(f"{len(failed)} schedules failed, of the seeds {', '.join(failed)}")


if __name__ == "__main__":
    with group("Schedules"):
        flags.DEFINE_integer("seed", 0, "Of the first schedule; the next ones follow.")
        flags.DEFINE_float("hours", 0.1, "How long schedules are begun.", lower_bound=0)
        flags.DEFINE_integer("schedules", 0, "How many, instead of --hours.", lower_bound=0)
        flags.DEFINE_string("schedule", None, "One schedule as JSON, instead of drawn ones.")
        flags.DEFINE_integer("workers", 4, "Most workers of a job.", lower_bound=1)
        flags.DEFINE_integer("attempts", 2, "Most attempts with faults.", lower_bound=1)
        flags.DEFINE_float("factor", 1.0, "Stretches all bounds on a busy machine.", lower_bound=1)
        flags.DEFINE_string("out", None, "File to add a line of JSON to for each schedule.")
        flags.DEFINE_string("keep_output", None, "An empty directory, for the output of all tasks.")
    run_command(main, __doc__)
