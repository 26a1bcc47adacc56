"""A picture of a training at its end: the file ``summary.svg``, and a plot in text."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from absl import logging

from ctl.base import curves, durable
from ctl.base.console import COLUMNS
from ctl.base.curves import Curve
from ctl.errors import UsageError
from ctl.logs.runs import Run, read

FILE = "summary.svg"


def summarize(model_dir: Path) -> list[str]:
    """Writes ``summary.svg`` of the run in ``model_dir``: the loss, and the first metric of its
    evaluations. A file that cannot be written is a warning. Returns the same as lines of text, if
    standard output is a terminal that can show them."""
    try:
        charts = _charts(read(model_dir))
    except UsageError:
        return []  # nothing was logged
    try:
        picture = curves.picture(charts, f"{' and '.join(charts)} over the steps")
        durable.write_text(model_dir / FILE, picture, via=model_dir)
    except OSError as error:
        logging.warning("cannot write %s: %s", model_dir / FILE, error.strerror)
    return plots(charts, shutil.get_terminal_size().columns) if _shows_plots() else []


def _charts(run: Run) -> dict[str, list[Curve]]:
    metrics = [
        name
        for phase in ("eval", "train")
        for values in run.records.get(phase, {}).values()
        for name in values
        if phase == "eval" or name == "loss"
    ]
    others = [name for name in dict.fromkeys(metrics) if name != "loss"]
    return {
        name: run.curves(name) for name in [*(["loss"] if "loss" in metrics else []), *others[:1]]
    }


def _shows_plots() -> bool:
    try:
        "⠉●│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return sys.stdout.isatty()


def plots(charts: Mapping[str, Sequence[Curve]], columns: int) -> list[str]:
    """The charts as lines of at most ``columns``: two in a row if there is room. Empty if no chart
    has two points."""
    columns = min(columns, COLUMNS)
    beside = columns >= COLUMNS and len(charts) > 1
    each = (columns - 2) // 2 if beside else min(columns, COLUMNS - 20)
    drawn = [lines for n, c in charts.items() if (lines := curves.text_plot(n, c, each))]
    if not drawn:
        return []
    if beside:
        lines = ["  ".join(line) for line in zip_longest(*drawn, fillvalue="")]
    else:
        lines = [line for one in drawn for line in one]
    key = "dots: training; ●: evaluation"
    return ["", *(line.rstrip() for line in lines), *([key] if len(key) <= columns else [])]
