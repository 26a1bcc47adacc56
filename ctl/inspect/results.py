"""Shows a `Timeline` on the terminal and leaves its files, for `run` and `merge`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from ctl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from ctl.inspect.timeline import Timeline

flags.disclaim_key_flags()


def define_bandwidth_flag() -> None:
    """``--bandwidth``, in the group of the caller."""
    flags.DEFINE_string(
        "bandwidth",
        None,
        "What benchmarks/all_reduce.py --json wrote on this machine: bandwidths are shown as "
        "percentages of it.",
    )


def show(timeline: Timeline, bandwidth: str | None, directory: Path | None) -> None:
    """Prints tables and verdict; with ``directory``, writes ``report.html`` and ``trace.json``.

    Raises:
        UsageError: the file ``bandwidth`` is not what it should be.
        CheckpointError: a file cannot be written.
    """
    from ctl.inspect import link
    from ctl.inspect.page import make_page
    from ctl.inspect.plan import from_json as plan_from_json
    from ctl.inspect.report import print_report
    from ctl.inspect.trace import make_trace
    from ctl.inspect.verdict import measure_command, verdict

    measured = link.read(bandwidth) if bandwidth else None
    if measured and measured.replicas != len(timeline.rows):
        raise UsageError(
            f"{bandwidth} was measured with {measured.replicas} replicas, and these are "
            f"{len(timeline.rows)}: {measure_command(timeline)}"
        )
    plan = plan_from_json(timeline.plan) if timeline.plan else None
    lines = verdict(timeline, measured)
    print_report(timeline, lines, plan=plan, measured=measured)
    command = measure_command(timeline)
    if measured is None and len(timeline.rows) > 1 and not any(command in line for line in lines):
        print(f"For busbw as a share of what this machine can do: {command}, then --bandwidth.")
    if directory is None:
        return
    page, trace = directory / "report.html", directory / "trace.json"
    try:
        page.write_text(make_page(timeline, lines, plan=plan, measured=measured), encoding="utf-8")
        trace.write_text(json.dumps(make_trace(timeline), allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory}: {error.strerror}") from error
    print(f"page: {page}   trace for ui.perfetto.dev or chrome://tracing: {trace}")
