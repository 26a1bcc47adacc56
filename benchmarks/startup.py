"""How long from the start of a process to its first step, to `--help`, to the error of a bad flag?

    python benchmarks/startup.py
    python benchmarks/startup.py --what=help,bad_flag,tensorflow --rounds=9 --json=out.json

Each is a new process, timed from its start until it ends or answers. They take turns. README.md
says what each row measures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from absl import flags
from processes import Peer, check_names, in_turn, machine, progress, summary, write

from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command


def _ends(*arguments: str, exit_code: int = 0, starts: int = 1) -> Callable[[], float]:
    """A function that runs Python with ``arguments`` so many times, with an empty cache before the
    first, and returns the seconds of the last. It raises `CtlError` if an exit code is not
    ``exit_code``."""

    def measure() -> float:
        seconds = 0.0
        with tempfile.TemporaryDirectory() as directory:
            for start in range(starts):
                given = [a.replace("DIR", f"{directory}/{start}") for a in arguments]
                begin = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, *given],
                    env=os.environ | {"XDG_CACHE_HOME": directory},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT.value,
                )
                seconds = time.perf_counter() - begin
                if done.returncode != exit_code:
                    said = done.stderr.strip().splitlines() or ["nothing"]
                    code = f"exit code {done.returncode}"
                    raise CtlError(f"{' '.join(arguments)}: {code}: {said[-1]}")
        return seconds

    return measure


def _first_step(script: str, *arguments: str) -> Callable[[], float]:
    """A function that returns the seconds until a peer of `step_time.py` trained on one batch."""

    def measure() -> float:
        begin = time.perf_counter()
        with Peer(script, [script, f"--model={_MODEL.value}", *arguments]) as peer:
            peer.answer(_TIMEOUT.value)
            peer.say("1")
            peer.answer(_TIMEOUT.value)
            return time.perf_counter() - begin

    return measure


_TRAIN = ("-m", "ctl.train", "--model_dir=DIR", "--train_steps=1", "--noexport")

WHAT = {
    "python": _ends("-c", "pass"),
    "help": _ends("-m", "ctl.train", "--help"),
    "bad_flag": _ends("-m", "ctl.train", "--epohs=3", exit_code=2),
    "tensorflow": _ends("-c", "import tensorflow, keras"),
    "ctl": _first_step("ctl_loop.py"),
    "plain": _first_step("plain_loop.py"),
    "fit": _first_step("keras_fit.py"),
    "train": _ends(*_TRAIN),
    "train_again": _ends(*_TRAIN, starts=2),
}

with group("What is measured"):
    _WHAT = flags.DEFINE_list("what", list(WHAT), "see README.md")
    _MODEL = flags.DEFINE_string("model", "dense", "a model of ctl.jobs.models, for a first step")
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "processes of each", lower_bound=1)
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def main() -> None:
    check_names("unknown --what", _WHAT.value, WHAT)
    about = machine(os.getloadavg()[0])
    seconds: dict[str, list[float]] = {name: [] for name in _WHAT.value}
    for number in range(_ROUNDS.value):
        for name in in_turn(seconds, number):
            progress(f"round {number + 1}/{_ROUNDS.value}: {name}")
            try:
                seconds[name].append(WHAT[name]())
            except subprocess.TimeoutExpired:
                raise CtlError(
                    f"{name}: did not end in {_TIMEOUT.value:g} s; see --timeout"
                ) from None
    progress("")
    print("  ".join(f"{key}={value}" for key, value in about.items()), end="\n\n")
    print(f"{'seconds':14}{'median':>9}{'min':>9}{'max':>9}")
    for name, values in seconds.items():
        of = summary(values)
        print(f"{name:14}{of['median']:9.2f}{of['min']:9.2f}{of['max']:9.2f}")
    results = {
        name: {"seconds": summary(values), "rounds": values} for name, values in seconds.items()
    }
    write(_JSON.value, {"machine": about, "what": results})


if __name__ == "__main__":
    run_command(main, __doc__)
