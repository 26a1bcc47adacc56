"""Does a long run stay as fast and as small as it began, and what do its logs and evaluations cost?

    python benchmarks/long_run.py
    python benchmarks/long_run.py --what=cost --cost_steps=4000 -- --model=convnet

Runs `python -m ctl.train` as a user does; what follows ``--`` are more of its flags. Exit code 1
names the goals that are missed. README.md says how the numbers are derived.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from growth import memory, sizes, tenths
from processes import check_names, in_turn, machine, progress, summary, write

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import check_flags, group, run_command

# What may differ: growth of a tenth over another, and the cost of what a user may leave out.
GOAL = 0.02
# The output of a run, which grows with its length.
LOGS = ("out", "run/metrics.jsonl")  # and the event files of TensorBoard
_EVERY_SECONDS = 0.5  # at most, between two looks at a process

with group("What is measured"):
    _WHAT = flags.DEFINE_list("what", "long,cost", "long, cost")
    _STEPS = flags.DEFINE_integer("steps", 200_000, "of the long run", lower_bound=1000)
    _COST_STEPS = flags.DEFINE_integer(
        "cost_steps", 20_000, "of a run whose cost is measured: its second half", lower_bound=400
    )
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "of the runs whose cost is measured", lower_bound=1)
with group("Results"):
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def _check(what: Sequence[str], steps: int, cost_steps: int) -> None:
    check_names("unknown --what", what, ["long", "cost"])
    if steps % 1000 or cost_steps % 200:
        raise UsageError("--steps must be divisible by 1000, --cost_steps by 200")


check_flags(["what", "steps", "cost_steps"], _check)


def command(model_dir: pathlib.Path, steps: int, *more: str) -> list[str]:
    run = [f"--model_dir={model_dir}", f"--train_steps={steps}", "--model=dense", "--noexport"]
    return [sys.executable, "-m", "ctl.train", *run, *more]


def records(model_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The records of the training, without an incomplete last line."""
    path = model_dir / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    found = [json.loads(line) for line in whole.splitlines()]
    return [record for record in found if record["phase"] == "train"]


def watch(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs one training of --steps steps.

    Returns:
        For the step time (the median time between two log lines, over their steps) and the memory,
        the first and the last tenth, and their ratio; ``grown``: the files that have grown by more
        than `GOAL` since the first tenth, and by how many bytes.
    """
    steps, samples = _STEPS.value, []
    seconds = min(_EVERY_SECONDS, steps * 5e-6)  # several looks in a tenth of a short run
    early: dict[str, int] | None = None
    with tempfile.TemporaryDirectory() as folder:
        model_dir, temporary = pathlib.Path(folder, "run"), pathlib.Path(folder, "tmp")
        temporary.mkdir()
        with open(pathlib.Path(folder, "out"), "w+") as out:
            process = subprocess.Popen(
                command(model_dir, steps, *arguments),
                env=os.environ | {"TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    time.sleep(seconds)
                    done = _last_step(model_dir)
                    progress(f"step {done:,} of {steps:,}")
                    try:
                        samples.append({"step": done, **memory(process.pid)})
                    except (OSError, KeyError):  # it is ending
                        break
                    # Several looks, since a checkpoint may just be taking the place of another.
                    if done >= steps / 20 and (early is None or done <= steps / 10):
                        early = early or {}
                        for name, size in sizes(pathlib.Path(folder)).items():
                            early[name] = max(size, early.get(name, 0))
                process.wait()
            finally:
                process.kill()
                process.wait()
            progress("")
            out.seek(0)
            if process.returncode:
                raise CtlError(f"ctl.train: {out.read().strip().splitlines()[-1]}")
        late = sizes(pathlib.Path(folder))
        lines = records(model_dir)
    windows = [
        {"step": b["step"], "ms": 1e3 * (b["time"] - a["time"]) / (b["step"] - a["step"])}
        for a, b in zip(lines, lines[1:], strict=False)
        if b["step"] > a["step"]
    ]
    if early is None:
        raise CtlError("the run is too short: give more --steps")
    results: dict[str, Any] = {"steps": steps, "samples": samples}
    for key, of in (("ms", windows), *((k, samples) for k in ("resident", "anonymous"))):
        first, last = tenths(of, steps, key)
        results[key] = {"first": first, "last": last, "ratio": last / first}
    for key in ("threads", "files"):
        results[key] = dict(zip(("first", "last"), tenths(samples, steps, key), strict=True))
    # A step has more digits later, so a file may grow by some bytes.
    before = {name: early.get(name, 0) for name in late}
    results["grown"] = {
        n: size - before[n] for n, size in late.items() if size > (1 + GOAL) * before[n]
    }
    return results


def _last_step(model_dir: pathlib.Path) -> int:
    """The step of the last log line; reads the end of the file only."""
    try:
        with open(model_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            found = re.findall(rb'"step": (\d+)', file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def show_long(of: dict[str, Any]) -> list[str]:
    """Prints the table; returns the goals that are missed."""
    missed = []
    print(f"{of['steps']:,} steps{'':10}{'first tenth':>14}{'last tenth':>14}{'ratio':>9}")
    mib = 2.0**20
    names = {"ms": ("ms/step", 1.0), "resident": ("resident MiB", mib)}
    names["anonymous"] = ("anonymous MiB", mib)
    for key, (name, unit) in names.items():
        row = of[key]
        print(f"{name:22}{row['first'] / unit:14.3f}{row['last'] / unit:14.3f}{row['ratio']:9.3f}")
        if row["ratio"] > 1 + GOAL:
            missed.append(f"{name} of the last tenth is {row['ratio']:.3f} of the first")
    for key in ("threads", "files"):
        name = {"threads": "threads", "files": "open files"}[key]
        print(f"{name:22}{of[key]['first']:14.0f}{of[key]['last']:14.0f}")
    for name, grown in sorted(of["grown"].items()):
        log = name in LOGS or "events.out.tfevents" in name
        print(f"{name} has grown by {grown:,} bytes{'' if log else ', and is not a log'}")
        if not log:
            missed.append(f"{name} has grown")
    return missed


def cost(arguments: Sequence[str]) -> dict[str, Any]:
    """Seconds per step of the second half of runs that take turns: with the defaults, without
    evaluations, and without log lines either."""
    steps = _COST_STEPS.value
    never, bare = f"--evaluate_every={steps}", f"--log_every={steps // 2}"
    kinds = {"defaults": [], "no_evaluation": [never], "bare": [never, bare, "--notensorboard"]}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(_ROUNDS.value):
        for kind in in_turn(kinds, number):
            progress(f"round {number + 1} of {_ROUNDS.value}: {kind}")
            with tempfile.TemporaryDirectory() as folder:
                model_dir = pathlib.Path(folder, "run")
                done = subprocess.run(
                    command(model_dir, steps, *arguments, *kinds[kind]),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    raise CtlError(f"ctl.train: {done.stderr.strip().splitlines()[-1]}")
                at = {record["step"]: record["time"] for record in records(model_dir)}
            seconds[kind].append((at[steps] - at[steps // 2]) / (steps - steps // 2))
    progress("")

    def over(kind: str, reference: str) -> dict[str, float]:
        pairs = zip(seconds[kind], seconds[reference], strict=True)
        return summary([mine / other - 1 for mine, other in pairs])

    return {
        "seconds": seconds,
        "logging": over("no_evaluation", "bare"),
        "evaluation": over("defaults", "no_evaluation"),
    }


def show_cost(of: dict[str, Any]) -> list[str]:
    """Prints the table; returns the goals that are missed."""
    missed = []
    for kind, seconds in of["seconds"].items():
        print(f"{kind:16}{1e3 * statistics.median(seconds):9.3f} ms/step")
    for name in ("logging", "evaluation"):
        share = of[name]
        spread = f"{share['min']:+.1%} to {share['max']:+.1%}"
        print(f"{name} costs {share['median']:+.1%} ({spread}); goal: at most {GOAL:.0%}")
        if share["median"] > GOAL:
            missed.append(f"{name} costs {share['median']:.1%} of the training")
    return missed


def main(arguments: Sequence[str]) -> None:
    about: dict[str, Any] = {"machine": machine(os.getloadavg()[0])}
    print(*(f"{key}={value}" for key, value in about["machine"].items()))
    missed = []
    for what, measure, show in (("long", watch, show_long), ("cost", cost, show_cost)):
        if what in _WHAT.value:
            about[what] = measure(arguments)
            missed += show(about[what])
            write(_JSON.value, about, say=False)
    if missed:
        raise CtlError("missed: " + "; ".join(missed))


if __name__ == "__main__":
    run_command(main, __doc__, takes_command=True)
