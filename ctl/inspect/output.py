"""What is left of an inspection for people: the only place that knows its files.

``report.html`` opens in a browser, ``trace.json`` in https://ui.perfetto.dev, and the terminal gets
the tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from ctl import durable
from ctl.errors import CheckpointError, UsageError
from ctl.inspect import plan as plans
from ctl.inspect.link import Measured
from ctl.inspect.page import make_page
from ctl.inspect.report import print_report
from ctl.inspect.timeline import Timeline
from ctl.inspect.trace import make_trace
from ctl.inspect.verdict import verdict


def show(
    timeline: Timeline,
    directory: Path,
    *,
    measured: Measured | None = None,
    file: TextIO | None = None,
) -> None:
    """Writes the page and the trace of ``timeline`` to ``directory``; prints its tables, its
    verdict and where the files are to ``file`` (default: standard output).

    Raises:
        CheckpointError: a file cannot be written.
    """
    plan, note = _plan(timeline)
    lines = verdict(timeline, measured)
    page = make_page(timeline, lines, plan=plan, measured=measured)
    trace = json.dumps(make_trace(timeline), allow_nan=False, separators=(",", ":"))
    for name, text in (("report.html", page), ("trace.json", trace)):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            durable.write_text(directory / name, text, via=directory)
        except OSError as error:
            raise CheckpointError(f"cannot write {directory / name}: {error.strerror}") from error
    print_report(timeline, lines, plan=plan, measured=measured, file=file)
    if note:
        print(note, file=file)
    print(f"pictures: {directory / 'report.html'}", file=file)
    print(f"trace, for https://ui.perfetto.dev: {directory / 'trace.json'}", file=file)


def _plan(timeline: Timeline) -> tuple[plans.Plan | None, str]:
    """What the step moves, as worker 0 wrote it; or a line why it cannot be shown."""
    if timeline.plan is None:
        return None, ""
    try:
        return plans.from_json(timeline.plan), ""
    except UsageError as error:
        return None, f"what the step moves cannot be shown: {error}"
