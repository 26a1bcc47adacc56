"""The command ``ctl.inspect merge``: joins the files of all workers; needs no TensorFlow.

The command run shows its result as this one does, see `show`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from ctl.base import durable, stores
from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import Timeline

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_WRITTEN = "report.html", "trace.json"

_USAGE = """
Joins the files that `ctl.inspect run` wrote on each worker, model_dir/inspect/worker-I.json.

  python -m ctl.inspect merge /tmp/run/inspect

Prints the tables and the verdict, and writes report.html and trace.json to that directory.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Merge"):
        define_bandwidth_flag()
    run_command(main, _USAGE, takes_command=True)


def main(arguments: Sequence[str]) -> None:
    """Joins the windows of all workers, which are in the directory that ``arguments`` name.

    Raises:
        UsageError: not one directory, or its files are not the windows of one run.
        CheckpointError: the page or the trace cannot be written.
    """
    if len(arguments) != 1:
        raise UsageError("name one directory: python -m ctl.inspect merge /tmp/run/inspect")

    from ctl.inspect.measure.timeline import join
    from ctl.inspect.measure.window import read_all

    directory = stores.local(arguments[0])
    show(join(read_all(directory)), FLAGS.bandwidth, directory)
    if stores.is_url(arguments[0]):
        print("in the store:", *(stores.send(arguments[0], name) for name in _WRITTEN))


def define_bandwidth_flag() -> None:
    """Defines ``--bandwidth`` in the group of the caller."""
    flags.DEFINE_string(
        "bandwidth",
        None,
        "Output of benchmarks/all_reduce.py --json on this machine. Bandwidths are shown as "
        "percentages of it.",
    )


def show(
    timeline: Timeline, bandwidth: str | None, directory: Path | None, more: Sequence[str] = ()
) -> None:
    """Prints tables and verdict; writes ``report.html`` and ``trace.json``.

    Args:
        timeline: of all workers.
        bandwidth: a file from ``benchmarks/all_reduce.py --json``, to compare with; or None.
        directory: where the files are written; None writes none.
        more: lines below the verdict.

    Raises:
        UsageError: ``bandwidth`` is no such file, or of another strategy or number of replicas.
        CheckpointError: a file cannot be written.
    """
    from ctl.inspect.measure import link
    from ctl.inspect.measure.verdict import measure_command, verdict
    from ctl.inspect.show.page import make_page
    from ctl.inspect.show.report import print_report
    from ctl.inspect.show.trace import make_trace
    from ctl.phases.plan.plan import from_json

    measured = link.read(bandwidth) if bandwidth else None
    strategy = "multi_worker" if timeline.workers > 1 else "mirrored"
    if measured and (measured.strategy, measured.replicas) != (strategy, len(timeline.rows)):
        raise UsageError(
            f"{bandwidth} was measured with {measured.replicas} replicas under "
            f"{measured.strategy}, but this run has {len(timeline.rows)} under {strategy}: run "
            f"{measure_command(timeline)}"
        )
    plan = note = None
    try:
        plan = None if timeline.plan is None else from_json(timeline.plan)
    except UsageError as error:
        note = f"cannot show what the step moves: {error}"
    lines = (*verdict(timeline, measured), *more)
    print_report(timeline, lines, plan=plan, measured=measured)
    if note:
        print(note)
    command = measure_command(timeline)
    said = measured is not None or any(command in line for line in lines)
    if timeline.packs and len(timeline.rows) > 1 and not said:
        print(
            f"For busbw as a share of what this machine can do: {command}, then "
            "--bandwidth=link.json."
        )
    if directory is None:
        return
    page = make_page(timeline, lines, plan=plan, measured=measured)
    trace = json.dumps(make_trace(timeline), allow_nan=False, separators=(",", ":"))
    for name, text in zip(_WRITTEN, (page, trace), strict=True):
        with durable.writing(directory / name):
            directory.mkdir(parents=True, exist_ok=True)
            durable.write_text(directory / name, text, via=directory)
    print(f"page: {directory / 'report.html'}")
    print(f"trace, for ui.perfetto.dev or chrome://tracing: {directory / 'trace.json'}")
