"""Does `python -m ctl.inspect hang` name the worker that hangs, and where?

  python -m tests.chaos.hang                           # 20 jobs with a frozen worker
  python -m tests.chaos.hang --faults=kill,raise,host,input,forward --runs=10

In each run, one worker of a job, drawn at random, fails:

  freeze    SIGSTOP stops it at a random moment
  kill      SIGKILL kills it at a random moment
  raise     it raises an exception between two steps
  host      it sleeps between two steps
  input     it never gets its batch
  forward   its forward pass never ends

What `judge` checks must hold: the other workers end with exit code 5, and so on. The verdict over
their records must name that worker and no other, and say how it failed.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path

from absl import flags

from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command

from .attempt import prepare, run
from .draw import STEPS, Fault, Schedule
from .judge import deadline, judge
from .run import LONGEST, progress

FLAGS = flags.FLAGS

# For each fault: its kind, its place in the user's code (else it comes at a random step), and what
# the verdict must say of the worker.
FAULTS = {
    "freeze": ("freeze", "", r"frozen or dead: silent for \d+ s"),
    "kill": ("kill", "", "gone: "),
    "raise": ("raise", "action", "gone: "),
    "host": ("hang", "action", "in the action function after step 5 for"),
    "input": ("hang", "data", "in input of training after step 5 for"),
    "forward": ("hang", "forward", "in forward of training after step 5 for"),
}
_AT_STEP = 5


def one(name: str, randoms: random.Random) -> tuple[bool, str]:
    """Runs one job. Returns whether the verdict is right, and its text or what went wrong."""
    from ctl.distributed.watch import hang
    from ctl.inspect.commands import hang as command

    kind, place, words = FAULTS[name]
    late, mark = randoms.randrange(FLAGS.workers), f"step {randoms.randrange(1, STEPS - 5)}"
    fault = Fault(0, kind, late, place or mark, step=_AT_STEP, seconds=randoms.uniform(0, 0.3))
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory, "disk")
        disk.mkdir()
        attempt, _ = run(
            Schedule(FLAGS.seed, FLAGS.workers, 0, ((fault,),)),
            0,
            Path(directory, "out"),
            disk,
            lambda attempt: deadline(attempt, LONGEST, FLAGS.factor),
        )
        if failures := judge(attempt, disk / "run", 0):
            return False, "; ".join(failure.why for failure in failures)
        verdict = hang.summary(command.load(disk / "run")[0])
    named = re.findall(r"worker (\d+) \(", verdict)
    return named == [str(late)] and re.search(words, verdict) is not None, verdict


def main() -> None:
    prepare()
    randoms = random.Random(FLAGS.seed)
    results: dict[str, dict[str, object]] = {}
    for name in FLAGS.faults:
        wrong = []
        for number in range(FLAGS.runs):
            progress(f"{name} {number + 1} of {FLAGS.runs}")
            right, verdict = one(name, randoms)
            if not right:
                wrong.append(verdict)
                print(f"{name}, run {number + 1}, wrong: {verdict}", flush=True)
        progress("")
        print(f"{name:<8} {FLAGS.runs - len(wrong)} of {FLAGS.runs} right", flush=True)
        results[name] = {"runs": FLAGS.runs, "right": FLAGS.runs - len(wrong), "wrong": wrong}
    print(f"the last verdict: {verdict}")
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(results, indent=1))
        print(f"json: {FLAGS.json}")
    if any(result["wrong"] for result in results.values()):
        raise CtlError("some verdicts are wrong")


if __name__ == "__main__":
    with group("Runs"):
        flags.DEFINE_list("faults", ["freeze"], f"Of {', '.join(FAULTS)}.")
        flags.DEFINE_integer("runs", 20, "Jobs for each fault.", lower_bound=1)
        flags.DEFINE_integer("workers", 3, "Workers of a job.", lower_bound=2)
        flags.DEFINE_float("factor", 1.0, "Stretches all bounds on a busy machine.", lower_bound=1)
        flags.DEFINE_integer("seed", 0, "Of who hangs, and when.")
        flags.DEFINE_string("json", None, "File for the results.")
    flags.register_validator(
        "faults", lambda names: set(names) <= set(FAULTS), f"choose of {', '.join(FAULTS)}"
    )
    run_command(main, __doc__)
