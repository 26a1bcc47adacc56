"""Turns a `Timeline` into tables, and prints them on the terminal.

The page shows the same tables (`ctl.inspect.show.page`). The number of rows is bounded: a table of
many replicas has their spread and the latest ones, a table of many packs has the slowest.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ctl.base import svg
from ctl.base.units import size_text
from ctl.inspect.measure.timeline import PHASES, covered_seconds, of_one_step
from ctl.inspect.measure.verdict import share_of_measured

if TYPE_CHECKING:
    from ctl.inspect.measure.link import Measured
    from ctl.inspect.measure.timeline import Row, Timeline
    from ctl.phases.plan.plan import Plan

ROWS = 16  # the most rows of a table; more are summarised
WORST = 5  # rows that are still shown if the rest is summarised
# How late replicas are: name of a column or scalar -> quantile over the steps. A median does not
# show a replica that is late in every 4th step.
LATE = {"late": 0.5, "late p95": 0.95, "late worst": 1.0}
WIDE = 160  # columns if the output is no terminal, so that no text is cut off


@dataclass(frozen=True)
class Table:
    """A table of texts. The first cell of a row is its name; the rows at the indices ``strong`` are
    highlighted."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()


def row_names(rows: Sequence[Row]) -> list[str]:
    """A name for each row, with just the words that tell it from the others."""
    several = len({row.worker for row in rows}) > 1
    split = len({row.replica for row in rows}) > 1
    if not several:
        return [f"replica {row.replica}" for row in rows]
    return [f"worker {row.worker}" + f", r{row.replica}" * split for row in rows]


def phase_table(timeline: Timeline) -> Table:
    """Medians over the steps, in ms: phases, hidden and exposed communication, lateness, step. Of
    the lateness, also the 95th percentile and the largest value. Of several replicas, a row has the
    mean, see `of_one_step`."""
    columns = {**timeline.phases, "hidden": timeline.hidden, "exposed": timeline.exposed}
    columns = {name: columns[name] for name in (*PHASES, "hidden", "exposed") if name in columns}
    columns["step"] = timeline.step_seconds
    means = {name: of_one_step(values) * 1e3 for name, values in columns.items()}
    cells_ms = {name: median(values, axis=1) * 1e3 for name, values in columns.items()}
    steps = cells_ms.pop("step")
    cells_ms |= {name: quantile(timeline.late, q, axis=1) * 1e3 for name, q in LATE.items()}
    cells_ms["step"] = steps
    latest = np.argsort(-np.nan_to_num(cells_ms["late p95"]), kind="stable")
    cells_ms = {name: values for name, values in cells_ms.items() if np.isfinite(values).any()}
    names = row_names(timeline.rows)
    shown: Sequence[int] = range(len(names))
    strong: set[int] = set()
    table = []
    if len(names) > 1:
        cells = (_cell(means.get(name, np.nan), v) for name, v in cells_ms.items())
        table.append((f"mean of {len(names)}", *cells))
        strong = {0}
    if len(names) > ROWS:
        shown = sorted(latest[:WORST].tolist())
        for what, of in (("min", np.nanmin), ("median", np.nanmedian), ("max", np.nanmax)):
            cells = (_cell(of(values), values) for values in cells_ms.values())
            table.append((f"{what} of {len(names)}", *cells))
    for row in shown:
        table.append((names[row], *(_cell(values[row], values) for values in cells_ms.values())))
    title = f"one step, ms: medians of {len(timeline.steps)} steps"
    if len(names) > ROWS:
        title += f"; the {len(shown)} that come last to the packs"
    return Table(title, ("", *cells_ms), tuple(table), frozenset(strong))


def pack_table(timeline: Timeline, plan: Plan | None, measured: Measured | None) -> Table:
    """The size and speed of each all-reduce, in the units of nccl-tests (1 GB = 1e9 bytes).

    ``plan`` adds the share of the backward pass after which a pack can start, ``measured`` the
    bandwidth relative to it.
    """
    shares = {c.name: c.start_share for c in plan.collectives} if plan else {}
    seconds = [float(np.median(pack.seconds)) for pack in timeline.packs]
    columns = {
        "wait ms": [float(np.median(pack.wait.max(axis=0))) * 1e3 for pack in timeline.packs],
        "transfer ms": [1e3 * value for value in seconds],
        "algbw GB/s": [pack.algbw for pack in timeline.packs],
        "busbw GB/s": [pack.busbw for pack in timeline.packs],
    }
    cells = [[pack.name for pack in timeline.packs]]
    cells.append([size_text(pack.bytes) for pack in timeline.packs])
    cells += [[_cell(v, np.array(values)) for v in values] for values in columns.values()]
    names = ["", "size", *columns]
    if measured:
        names.append(f"% of measured {measured.operation}")
        cells.append([percent(share_of_measured(pack, measured)) for pack in timeline.packs])
    names += ["can start", "ready"]
    cells.append([percent(shares.get(pack.name)) for pack in timeline.packs])
    cells.append([percent(share) for share in ready_shares(timeline)])
    rows = list(zip(*cells, strict=True))
    title = "all-reduces, medians; can start, ready: after so much of the backward pass"
    if len(rows) > ROWS:
        slowest = sorted(np.argsort(seconds, kind="stable")[-ROWS:].tolist())
        title += f"; the {ROWS} slowest of {len(rows)}"
        rows = [rows[index] for index in slowest]
    return Table(title, tuple(names), tuple(rows))


def ready_shares(timeline: Timeline) -> list[float]:
    """For each pack, the share of the backward pass after which its gradients were ready.

    Medians over rows and steps, in [0, 1]; NaN if the beginning of the pass is unknown.
    """
    begin, end = timeline.marks.get("forward"), timeline.marks["backward"]
    if begin is None:
        return [np.nan] * len(timeline.packs)
    length = np.where(end > begin, end - begin, np.nan)
    shares = [np.clip((pack.ready - begin) / length, 0, 1) for pack in timeline.packs]
    return [float(median(share)) for share in shares]


def scalars(timeline: Timeline) -> dict[str, float]:
    """Scalars for TensorBoard; unknown ones are left out: all, if the replicas reduce unseen.

    ``allreduce/exposed_ms``: communication that the backward pass does not hide, see `of_one_step`.
    ``allreduce/late_ms``: how much later than the others the latest replica came to the packs; a
    delay counts once, for any number of packs. The median over the steps of the largest value of
    any replica. ``allreduce/late_p95_ms`` and ``allreduce/late_worst_ms``: the 95th percentile and
    the largest value of the lateness. ``allreduce/busbw``, GB/s: of all packs together.
    """
    values = {"allreduce/exposed_ms": of_one_step(timeline.exposed) * 1e3}
    for name, share in LATE.items():
        late = float(quantile(timeline.late.max(axis=0), share)) * 1e3
        values[f"allreduce/{name.replace(' ', '_')}_ms"] = late
    seconds = float(np.median(transferring(timeline)))
    if seconds > 0 and timeline.bytes:
        values["allreduce/busbw"] = timeline.bytes / seconds / 1e9 * timeline.packs[0].bus_factor
    return {name: value for name, value in values.items() if np.isfinite(value)}


def transferring(timeline: Timeline) -> np.ndarray:
    """float64 [S]: seconds of each step in which any pack was transferred; packs may overlap."""
    there = [(pack.begun + pack.wait).max(axis=0) for pack in timeline.packs]
    return covered_seconds(
        [(at, at + pack.seconds) for at, pack in zip(there, timeline.packs, strict=True)]
    )


def print_report(
    timeline: Timeline,
    verdict: Sequence[str],
    *,
    plan: Plan | None = None,
    measured: Measured | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints the tables and, below them, the lines of the verdict. See `pack_table`.

    ``file``: by default standard output. If it is no terminal, tables have no colours and are
    `WIDE` columns wide.
    """
    file = file or sys.stdout
    console = Console(file=file, highlight=False, width=None if file.isatty() else WIDE)
    for table in (phase_table(timeline), pack_table(timeline, plan, measured)):
        if table.rows:
            console.print(_rich(table))
    for line in verdict:
        console.print(Text(svg.printable(line)), soft_wrap=True)


def _rich(table: Table) -> RichTable:
    # Text, not str: a name may look like rich's markup.
    made = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    made.title_style = "italic"
    for index, column in enumerate(table.columns):
        made.add_column(Text(column), justify="right" if index else "left")
    for number, row in enumerate(table.rows):
        cells = [Text(svg.printable(cell)) for cell in row]
        made.add_row(*cells, style="bold" if number in table.strong else None)
    return made


def significant(value: float) -> str:
    """``value`` with three digits, without an exponent below 1e9: 0.012, 1.23, 12.3, 123, 1,234."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    if digits > 5:
        return f"{value:.3f}".rstrip("0").rstrip(".").replace("-0", "0") or "0"
    return f"{value:,.{max(0, digits)}f}" if abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds with a unit: 12.3 ms, 45.6 µs, 1.23 s."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * scale >= 1:
            return f"{significant(seconds * scale)} {unit}"
    return f"{significant(round(seconds * 1e6, 1))} µs"


def percent(share: float | None) -> str:
    """A share as whole percents; "–" if it is None or not finite."""
    return "–" if share is None or not np.isfinite(share) else f"{share:.0%}"


def _cell(value: float, column: np.ndarray) -> str:
    """``value`` with as many decimals as its column, which has three digits for its largest."""
    if value == 0 or not np.isfinite(value):
        return significant(value)
    largest = np.nanmax(np.abs(column))
    decimals = 3 if largest < 1 else 2 if largest < 10 else 1 if largest < 100 else 0
    return f"{value:,.{decimals}f}" if largest < 1e9 else significant(value)


def median(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The median of the values that are not NaN; NaN if there are none."""
    return quantile(values, 0.5, axis)


def quantile(values: np.ndarray, share: float, axis: int | None = None) -> np.ndarray:
    """The quantile of the values that are not NaN, ``share`` in [0, 1]; NaN if there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanquantile(values, share, axis=axis)
