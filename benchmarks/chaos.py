"""Do jobs survive what may happen to them? Random faults, and what must hold after each.

  python benchmarks/chaos.py --seed=1 --hours=1
  python benchmarks/chaos.py --seed=1017 --schedules=1     # repeats one: the i-th uses seed + i
  python benchmarks/chaos.py --schedule='{"seed": 0, "workers": 2, …}'

A schedule is a list of attempts of the same job: real processes of 1 to 4 workers, or with
parameter servers. Faults come at random moments in each attempt but the last, which must finish.

After each attempt is checked: everything ended within its documented bound, and no process is left
(column "in time"); each exit code is the documented one ("right code"); the survivors name who is
to blame, and nobody else ("right blame"); and nothing that was saved is lost: the next attempt
goes on from the newest intact checkpoint, and the last checkpoint equals that of an undisturbed job
bit for bit ("nothing lost"). With parameter servers, whose updates have no order, the number of
steps must be right and all variables finite.

Ends with 1 if a check failed. A line for each failure says why, and how to repeat it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_faults
import chaos_judge
import chaos_run
from absl import flags
from chaos_draw import KINDS, STEPS, Schedule, draw, loads
from chaos_judge import CHECKS, Failure
from processes import progress

from ctl.checkpoint import manifest
from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command

FLAGS = flags.FLAGS

_LONGEST = 60.0  # seconds that a job without faults may take, before there is one to compare with

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
            failures, attempts = self._attempts(schedule, _LONGEST)
            if failures:
                raise CtlError(f"a job without faults failed: {failures[0].why}")
            state = chaos_judge.final_state(self._disk / "run")
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
            if wrong := _judge_variables(checkpoints):
                failures.append(Failure("state", wrong))
        elif chaos_judge.final_state(self._disk / "run") != state:
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
    ) -> tuple[list[Failure], list[chaos_run.Attempt]]:
        """Runs attempts until a check fails."""
        chaos_run.empty(self._disk)
        calm = f"calm-{schedule.workers}-{schedule.servers}"
        name = f"seed-{schedule.seed}" if schedule.seed >= 0 else calm
        attempts: list[chaos_run.Attempt] = []
        run_dir = self._disk / "run"
        for number in range(len(schedule.attempts)):
            before = chaos_faults.to_resume_from(run_dir / "checkpoints")
            attempt, damage = chaos_run.run(
                schedule,
                number,
                self._directory / f"{name}-{number}",
                self._disk,
                lambda attempt: chaos_judge.deadline(attempt, undisturbed, self._factor),
            )
            attempts.append(attempt)
            if failures := chaos_judge.judge(attempt, run_dir, before):
                return [Failure(f.check, f"attempt {number}: {f.why}") for f in failures], attempts
            damage()
        return [], attempts


def _summary(attempt: chaos_run.Attempt) -> dict[str, Any]:
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


def _judge_variables(checkpoints: Path) -> str:
    """What is wrong with the last checkpoint of a job with parameter servers, or ""."""
    step = chaos_faults.to_resume_from(checkpoints)
    if step != STEPS:
        return f"{step} steps were counted, not {STEPS}"
    child = os.fork()  # TensorFlow must start no thread in the process that forks
    if not child:
        code = 2
        try:
            import numpy as np
            import tensorflow as tf

            path = manifest.path_of(checkpoints, step)
            reader = tf.train.load_checkpoint(str(path / "variables"))
            values = [reader.get_tensor(n) for n in reader.get_variable_to_shape_map()]
            numbers = [v for v in values if getattr(v, "dtype", None) in (np.float32, np.int64)]
            code = 0 if numbers and all(np.isfinite(v).all() for v in numbers) else 1
        finally:
            os._exit(code)
    return "" if os.waitpid(child, 0)[1] == 0 else "a variable is not finite, or cannot be read"


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
        held = [sum(check not in checks for checks in failed) for check in CHECKS]
        lines.append(f"{kind:<10} {len(of):>10}" + "".join(f"{count:>14}" for count in held))
    return "\n".join(lines)


def main() -> None:
    chaos_run.prepare()

    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory() as disk,
        chaos_faults.small_disk(Path(disk)),
    ):
        runner = Runner(Path(FLAGS.keep_output or directory), Path(disk), FLAGS.factor)
        for schedule in schedules():
            progress(f"schedule {len(results) + 1}: seed {schedule.seed}")
            result = runner.run(schedule)
            results.append(result)
            if FLAGS.out:
                with open(FLAGS.out, "a") as file:
                    print(json.dumps(result), file=file)
            progress("")
            for failure in result["failures"]:
                print(f"seed {schedule.seed}: {failure['check']}: {failure['why']}", flush=True)
            if result["failures"]:
                print(f"  repeat: python benchmarks/chaos.py --schedule='{schedule.dumps()}'")
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
