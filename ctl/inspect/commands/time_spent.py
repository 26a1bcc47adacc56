"""The command ``ctl.inspect time``: where the time of a run went, over all its starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from ctl.base import durable, stores
from ctl.base.svg import printable
from ctl.base.units import time_text
from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command
from ctl.inspect.measure import FOLDER
from ctl.logs.ledger import NAMES, Start, read, spent

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_WIDTH = max(map(len, NAMES.values()))

_USAGE = """
Shows where the time of a run went, over all its starts, and how much of it was in steps that count.

  python -m ctl.inspect time /tmp/run            # a --model_dir; the run may go on

Prints a table, and writes the page inspect/time.html to that directory.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Time"):
        flags.DEFINE_boolean("json", False, "Print one JSON object, and write no page.")
    FLAGS.set_gnu_getopt(True)  # flags may follow the directory
    run_command(main, _USAGE, takes_command=True)


def main(arguments: Sequence[str]) -> None:
    """Prints where the time of the run went whose directory ``arguments`` name.

    Raises:
        UsageError: not one directory, or it has no ledger.
        CheckpointError: the page cannot be written.
    """
    if len(arguments) != 1:
        raise UsageError("name one directory: python -m ctl.inspect time /tmp/run")
    directory = stores.local(arguments[0])
    workers = read(directory)
    total = spent(workers[0])
    if FLAGS.json:
        print(json.dumps(_to_json(workers), allow_nan=False))
        return
    print(f"goodput {100 * total.goodput:.1f} %: time in steps that count, over wall time")
    rows = [(name, total.seconds[key]) for key, name in total.names().items()]
    for name, seconds in [*rows, ("wall time", total.wall)]:
        share = 100 * seconds / max(total.wall, 1e-9)
        print(f"  {name:<{_WIDTH}}  {time_text(seconds):>10}  {share:5.1f} %")
    if "exposed" in total.names():
        measured = time_text(total.inspected)
        print(f"exposed communication: as in the {measured} of steps that were inspected")

    from ctl.inspect.show.time_page import make_page

    page = directory / FOLDER / "time.html"
    with durable.writing(page):
        page.parent.mkdir(exist_ok=True)
        durable.write_text(page, make_page(printable(directory), workers), via=page.parent)
    print(f"page: {stores.send(arguments[0], f'{FOLDER}/{page.name}')}")


def _to_json(workers: Mapping[int, Sequence[Start]]) -> dict[str, Any]:
    total = spent(workers[0])
    return {
        "schema": 1,
        "goodput": total.goodput,
        "wall_seconds": total.wall,
        "seconds": total.seconds,
        "inspected_seconds": total.inspected,
        "seconds_of_worker": {worker: spent(of).seconds for worker, of in workers.items()},
        "starts": [
            {
                "began": start.began,
                "ended": start.ended,
                "workers": start.workers,
                "from_step": start.last.first,
                "to_step": start.last.step,
                "end": start.end,
            }
            for start in workers[0]
        ],
    }
