"""The command ``ctl.inspect hang``: one verdict from the flight records of all workers."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ctl.base import stores
from ctl.base.console import for_terminal
from ctl.distributed.watch.hang import places, summary, suspects
from ctl.distributed.watch.record import SAME_HANG_SECONDS, Record, read
from ctl.errors import UsageError
from ctl.flags.parsing import run_command
from ctl.inspect.measure import FOLDER
from ctl.logs.runs import read as read_run

_USAGE = """
Names the worker that kept the others of a run waiting, from their flight records.

  python -m ctl.inspect hang /tmp/run            # a --model_dir, or a directory of records
"""


def load(directory: Path) -> tuple[list[Record], list[str]]:
    """Reads the records of the last hang in ``directory`` and in its folder ``inspect``. Returns
    them, and one line for each file that is not used.

    Raises:
        UsageError: there is no readable record.
    """
    records, notes = [], []
    for place in (directory, directory / FOLDER):
        for path in sorted(place.glob("flight-worker-*.json")):
            try:
                records.append((path, read(path)))
            except (OSError, ValueError) as error:
                notes.append(f"{path.name} is not used: {error}")
    if not records:
        raise UsageError(
            "; ".join([f"no flight record in {directory}: give the --model_dir of the run", *notes])
        )
    newest = max(record.time for _, record in records)
    longest = max(record.since for _, record in records)
    used = []
    for path, record in records:
        if newest - record.time > max(SAME_HANG_SECONDS, 2 * longest):
            notes.append(
                f"{path.name} is not used: it is {newest - record.time:.0f} s older than the last"
            )
        else:
            used.append(record)
    return used, notes


def report(directory: Path) -> str:
    """The verdict, a line for each worker, and the stacks of the suspects.

    Raises:
        UsageError: there is no readable record.
    """
    records, notes = load(directory)
    lines = [summary(records), *_dated(directory, records), ""]
    for place in places(records):
        source = "its own record" if place.own else "last beat" if place.known else "nothing"
        state = str(place).partition("(")[2][:-1]
        lines.append(f"  worker {place.worker}: {state}  [{source}]")
    stuck = {r.worker: r.stacks.get("MainThread", ()) for r in records}
    for place in suspects(records):
        if stuck.get(place.worker):
            lines += ["", f"worker {place.worker}, main thread, innermost last:"]
            lines += [f"    {entry}" for entry in stuck[place.worker][-8:]]
    return "\n".join([*lines, *notes])


def _dated(directory: Path, records: Sequence[Record]) -> list[str]:
    """When the records were made, and how far the run has come since, as its log says."""
    made = max(record.time for record in records)
    lines = [f"recorded at {_date(made)}, {_ago(time.time() - made)}"]
    hung = max((record.step for record in records if record.step is not None), default=-1)
    log = directory / "metrics.jsonl"
    with contextlib.suppress(OSError, UsageError):
        logged = log.stat().st_mtime
        step = read_run(directory).step
        if logged > made and step > hung:
            lines.append(f"the run has gone on since: its log has step {step} at {_date(logged)}")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def run() -> None:
    """Runs the command."""
    run_command(main, _USAGE, takes_command=True)


def main(arguments: Sequence[str]) -> None:
    """Prints the report on the directory that ``arguments`` name.

    Raises:
        UsageError: not one directory, or it has no readable record.
    """
    if len(arguments) != 1:
        raise UsageError("name one directory: python -m ctl.inspect hang /tmp/run")
    print(for_terminal(report(stores.local(arguments[0])), sys.stdout))
