"""The command ``ctl.compare``: a table of runs, and a page with their learning curves."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from ctl.base import stores
from ctl.base.console import write_file
from ctl.base.svg import printable
from ctl.base.units import time_text
from ctl.errors import UsageError
from ctl.flags.config import shown
from ctl.flags.parsing import define_path, group, run_command
from ctl.logs.runs import Run, differing_flags, read

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Compares runs of ctl.train: results, time, the flags that differ, and learning curves.

  python -m ctl.compare /tmp/run-1 /tmp/run-2                      # a table
  python -m ctl.compare --page=compare.html /tmp/run-1 /tmp/run-2  # and curves, for a browser
  python -m ctl.compare /tmp/run-* --json

A run may still be training. Directories without a run are reported and skipped.
"""

_WIDE = 10_000  # columns of what is not a terminal, so that no line is cut


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Output"):
        define_path("page", None, "Write an HTML page to this file: the table and the curves.")
        flags.DEFINE_boolean("json", False, "Print one JSON object instead of the table.")
    FLAGS.set_gnu_getopt(True)  # flags may follow the runs
    run_command(main, _USAGE, takes_command=True)


def main(directories: Sequence[str]) -> None:
    """Reads the runs and prints the table.

    Raises:
        UsageError: no run can be read, or no directory is named.
        CheckpointError: the page cannot be written.
    """
    if not directories:
        raise UsageError(
            "name the directories of runs: python -m ctl.compare /tmp/run-1 /tmp/run-2"
        )
    runs, notes = [], []
    for directory in dict.fromkeys(directories):
        try:
            found = dataclasses.replace(read(stores.local(directory)), name=directory)
        except UsageError as error:
            notes.append(str(error))
            continue
        runs.append(found)
        notes += found.notes
    for note in notes:
        print(printable(" ".join(note.split())), file=sys.stderr)
    if not runs:
        raise UsageError("there is no run to compare")
    if FLAGS.json:
        print(json.dumps({"schema": 1, "runs": [_to_json(one, runs) for one in runs]}))
    else:
        _print(tables(runs))
    if FLAGS.page:
        from ctl.inspect.show.curves import make_page

        write_file("page", FLAGS.page, make_page(runs, tables(runs), notes))


def tables(runs: list[Run]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """The tables by their titles: a header, and a row of cells for each run. First the results,
    then the flags that differ, if any. The cells are not escaped."""
    results = [one.results() for one in runs]
    metrics = list(dict.fromkeys(name for of_run in results for name in of_run))
    known = {name for of in results for name, found in of.items() if found.best is not None}
    kinds = {name: ("best", "last") if name in known else ("last",) for name in metrics}
    header = [f"{kind} {name}" for name in metrics for kind in kinds[name]]
    rows = []
    for one, of_run in zip(runs, results, strict=True):
        row = [one.name]
        for name in metrics:
            found = of_run.get(name)
            if name in known:
                best = (
                    f"{found.best:.4f} at {found.step}" if found and found.best is not None else ""
                )
                row.append(best)
            row.append(f"{found.last:.4f}" if found else "")
        of = f"{one.step} of {one.until}" if (one.until or 0) > one.step else str(one.step)
        rows.append([*row, of, time_text(one.seconds), time_text(one.seconds * one.replicas)])
    made = {"Results": (["run", *header, "steps", "train time", "replica time"], rows)}
    if names := differing_flags(runs):
        cells = [[one.name, *(_plain(one.flag(name)) for name in names)] for one in runs]
        made["Flags that differ"] = (["run", *names], cells)
    return made


def _plain(value: Any) -> str:
    """A value of a flag as one would give it."""
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    return value if isinstance(value, str) else shown(value)


def _print(made: Mapping[str, tuple[list[str], list[list[str]]]]) -> None:
    """Prints a column for each run, so that some runs fit into a terminal, and a line for each
    column of the tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    lines = [
        [escape(printable(cell)) for cell in line]
        for number, (header, rows) in enumerate(made.values())
        for line in list(zip(header, *rows, strict=True))[min(number, 1) :]  # the names once
    ]
    shown_table = Table(box=None, pad_edge=False)
    for cell in lines[0]:
        shown_table.add_column(cell, overflow="fold")
    for line in lines[1:]:
        shown_table.add_row(*line)
    piped = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=piped).print(shown_table)


def _to_json(one: Run, runs: list[Run]) -> dict[str, object]:
    return {
        "run": one.name,
        "step": one.step,
        "until": one.until,
        "flags": {name: one.flag(name) for name in differing_flags(runs)},
        "results": {name: dataclasses.asdict(best) for name, best in one.results().items()},
        "train_seconds": one.seconds,
        "replica_seconds": one.seconds * one.replicas,
    }


if __name__ == "__main__":
    run()
