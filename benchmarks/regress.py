"""Is the working tree slower than a commit?

    python benchmarks/regress.py HEAD~1
    python benchmarks/regress.py --rows=dense,restore --processes=5 HEAD~5

For each row, a process of the commit and one of the working tree take turns, each with its own
sources and peers. A round is a block of each, and yields a ratio: the working tree over the commit.
A row is slower if in every pair of processes the median ratio is above 1 + --tolerance, with 95 %
confidence. Exit code 1 names the slower rows.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from processes import Peer, bounds, check_names, machine, progress, write

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import check_flags, group, run_command

# What runs in turns: a function that runs one block, and returns its seconds.
Block = Callable[[], float]

_HERE = pathlib.Path(__file__).resolve().parents[1]


def trains(stack: contextlib.ExitStack, tree: pathlib.Path, *arguments: str) -> Block:
    """A loop that trains about --block_seconds in a block."""
    peer = _peer(stack, tree, tree, "ctl_loop.py", *arguments)

    def block(steps: int) -> float:
        peer.say(str(steps))
        return peer.answer(_TIMEOUT.value)["seconds"] / steps

    return _of_block_seconds(block)


def trains_kind(stack: contextlib.ExitStack, tree: pathlib.Path, kind: str) -> Block:
    """As `trains`, of a model of `model_kinds.py`. Both peers are those of the working tree."""
    peer = _peer(stack, tree, _HERE, "kinds_worker.py", f"--kind={kind}")

    def block(steps: int) -> float:
        return peer.ask(_TIMEOUT.value, steps=steps)["seconds"] / steps

    return _of_block_seconds(block)


def _of_block_seconds(block: Callable[[int], float]) -> Block:
    """``block`` with as many steps as take about --block_seconds."""
    for _ in range(3):
        block(20)
    steps = max(1, round(_BLOCK_SECONDS.value / block(20)))
    return lambda: block(steps)


def saves(stack: contextlib.ExitStack, tree: pathlib.Path, key: str) -> Block:
    """A save and a restore of 100 MB in 20 variables; ``key`` names the time of a part."""
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    given = ("--megabytes=100", "--variables=20", f"--directory={directory}")
    peer = _peer(stack, tree, tree, "checkpoint_saver.py", *given)

    def block() -> float:
        return peer.ask(_TIMEOUT.value, who="ctl")[key]

    block()
    return block


def starts(stack: contextlib.ExitStack, tree: pathlib.Path) -> Block:
    """The whole process of a training of one step."""

    def block() -> float:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "ctl.train", f"--model_dir={directory}"]
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, "--train_steps=1", "--noexport"],
                cwd=tree,  # where `-m` looks first
                capture_output=True,
                text=True,
                timeout=_TIMEOUT.value,
            )
            if done.returncode:
                raise CtlError(f"start: {done.stderr.strip().splitlines()[-1]}")
            return time.perf_counter() - begin

    return block


ROWS: dict[str, Callable[[contextlib.ExitStack, pathlib.Path], Block]] = {
    "dense": lambda *at: trains(*at, "--model=dense"),
    "dense_off": lambda *at: trains(*at, "--model=dense", "--off"),
    "dense_2_replicas": lambda *at: trains(*at, "--model=dense", "--replicas=2"),
    "convnet": lambda *at: trains(*at, "--model=convnet"),
    "convnet_2_replicas": lambda *at: trains(*at, "--model=convnet", "--replicas=2"),
    "recommender": lambda *at: trains_kind(*at, "recommender"),
    "gru": lambda *at: trains_kind(*at, "gru"),
    "save": lambda *at: saves(*at, "stands_still"),
    "durable": lambda *at: saves(*at, "durable"),
    "restore": lambda *at: saves(*at, "restored"),
    "start": starts,
}

with group("What is compared"):
    _ROWS = flags.DEFINE_list("rows", list(ROWS), "any of these; see README.md")
with group("How"):
    _PROCESSES = flags.DEFINE_integer("processes", 3, "pairs of processes", lower_bound=1)
    _ROUNDS = flags.DEFINE_integer("rounds", 11, "of each pair", lower_bound=6)
    _TOLERANCE = flags.DEFINE_float("tolerance", 0.02, "slower by less is equal", lower_bound=0)
    _BLOCK_SECONDS = flags.DEFINE_float("block_seconds", 0.3, "of training", lower_bound=0)
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def _check(rows: list[str]) -> None:
    check_names("unknown row", rows, ROWS)


check_flags(["rows"], _check)


def _peer(
    stack: contextlib.ExitStack,
    tree: pathlib.Path,
    scripts: pathlib.Path,
    script: str,
    *arguments: str,
) -> Peer:
    """A process of the peer ``script`` in ``scripts``, with the package in ``tree``."""
    command = [str(scripts / "benchmarks" / "peers" / script), *arguments]
    environment = {"PYTHONPATH": str(tree)}
    peer = stack.enter_context(Peer(f"{script} of {tree}", command, environment))
    peer.answer(_TIMEOUT.value)
    return peer


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[pathlib.Path]:
    """A folder with the sources of ``commit``. Raises `UsageError` if there is none."""
    git = ["git", "-C", str(_HERE)]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run([*git, "archive", commit, "--"], capture_output=True, check=False)
        if archive.returncode:
            raise UsageError(f"git: {archive.stderr.decode().strip().splitlines()[0]}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield pathlib.Path(folder)


def compare(row: str, before: pathlib.Path) -> list[list[tuple[float, float]]]:
    """For each pair of processes, the seconds of the commit and of the working tree by round."""
    pairs = []
    for number in range(_PROCESSES.value):
        with contextlib.ExitStack() as stack:
            progress(f"{row}, pair {number + 1} of {_PROCESSES.value}")
            old, new = (ROWS[row](stack, tree) for tree in (before, _HERE))
            rounds = []
            for turn in range(_ROUNDS.value):
                if turn % 2:
                    second, first = new(), old()
                else:
                    first, second = old(), new()
                rounds.append((first, second))
            pairs.append(rounds)
    progress("")
    return pairs


def result(pairs: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """The row of a table: milliseconds, ratios of all pairs, and the verdict."""
    ratios = [[new / old for old, new in rounds] for rounds in pairs]
    intervals = [bounds(each) for each in ratios]
    low, high = 1 - _TOLERANCE.value, 1 + _TOLERANCE.value
    verdict = "equal"
    if all(least > high for least, _ in intervals):
        verdict = "slower"
    elif all(most < low for _, most in intervals):
        verdict = "faster"
    old, new = ([pair[i] for rounds in pairs for pair in rounds] for i in (0, 1))
    return {
        "before": statistics.median(old),
        "now": statistics.median(new),
        "ratios": [statistics.median(each) for each in ratios],
        "intervals": intervals,
        "verdict": verdict,
        "rounds": pairs,
    }


_COLUMNS = {"before ms": 11, "now ms": 11, "ratio": 8, "least": 8, "most": 8}


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        raise UsageError("give one commit after the flags, e.g. HEAD~1")
    about, results = machine(os.getloadavg()[0]), {}
    with checked_out(arguments[0]) as before:
        print(*(f"{k}={v}" for k, v in about.items()))
        columns = "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())
        print(f"{'row':<20}{columns}  verdict")
        for row in _ROWS.value:
            results[row] = one = result(compare(row, before))
            print(
                f"{row:<20}{one['before'] * 1e3:11.3f}{one['now'] * 1e3:11.3f}"
                f"{statistics.median(one['ratios']):8.3f}{min(a for a, _ in one['intervals']):8.3f}"
                f"{max(b for _, b in one['intervals']):8.3f}  {one['verdict']}",
                flush=True,
            )
    write(_JSON.value, {"commit": arguments[0], "machine": about, "rows": results})
    slower = [row for row, one in results.items() if one["verdict"] == "slower"]
    if slower:
        raise CtlError(f"slower than {arguments[0]}: {', '.join(slower)}")


if __name__ == "__main__":
    run_command(main, __doc__, takes_command=True)
