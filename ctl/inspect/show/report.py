"""The only place that turns a `Timeline` into tables, and prints them on the terminal.

The page shows the same tables (`ctl.inspect.show.page`). Many replicas and packs are told in a
bounded number of rows: the spread, and those that the others wait for.
"""

from __future__ import annotations

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

from ctl.inspect.measure.verdict import share_of_measured
from ctl.inspect.show.charts import PHASES, significant, size_of
from ctl.logs import svg

if TYPE_CHECKING:
    from ctl.inspect.measure.link import Measured
    from ctl.inspect.measure.timeline import Row, Timeline
    from ctl.inspect.plan.plan import Plan

ROWS = 16  # of a table; more are summarised
WORST = 5  # named one by one where the rest is summarised
WIDE = 160  # columns of a "terminal" that is a file: nothing may be cut off


@dataclass(frozen=True)
class Table:
    """A table as text. The first cell of a row is its name; ``strong`` are the numbers of the rows
    to be seen first."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()


def row_names(rows: Sequence[Row]) -> list[str]:
    """What each row is called, in the fewest words that tell it from the others: there is little
    room for it in a picture."""
    several = len({row.worker for row in rows}) > 1
    split = len({row.replica for row in rows}) > 1
    if not several:
        return [f"replica {row.replica}" for row in rows]
    return [f"worker {row.worker}" + f", r{row.replica}" * split for row in rows]


def phase_table(timeline: Timeline) -> Table:
    """Medians over the steps, ms: what each replica did, and how its communication overlapped."""
    columns = {**timeline.phases, "hidden": timeline.hidden, "exposed": timeline.exposed}
    columns = {name: columns[name] for name in (*PHASES, "hidden", "exposed") if name in columns}
    columns |= {"late": timeline.late, "step": timeline.step_seconds}
    medians = {name: median(values, axis=1) * 1e3 for name, values in columns.items()}
    medians = {name: values for name, values in medians.items() if np.isfinite(values).any()}
    names = row_names(timeline.rows)
    late = np.nan_to_num(median(timeline.late, axis=1))
    shown, strong = range(len(names)), set()
    table = []
    if len(names) > ROWS:
        shown = sorted(np.argsort(-late, kind="stable")[:WORST].tolist())
        for what, of in (("min", np.nanmin), ("median", np.nanmedian), ("max", np.nanmax)):
            cells = (_cell(of(values), values) for values in medians.values())
            table.append((f"{what} of {len(names)}", *cells))
        strong = {1}
    for row in shown:
        table.append((names[row], *(_cell(values[row], values) for values in medians.values())))
    title = f"one step, ms: medians of {len(timeline.steps)} steps"
    if len(names) > ROWS:
        title += f"; the {len(shown)} that come last to the packs"
    return Table(title, ("", *medians), tuple(table), frozenset(strong))


def pack_table(timeline: Timeline, plan: Plan | None, measured: Measured | None) -> Table:
    """What each all-reduce moved and how fast, in nccl-tests' units (GB = 1e9 bytes)."""
    shares = {c.name: c.start_share for c in plan.collectives} if plan else {}
    seconds = [float(np.median(pack.seconds)) for pack in timeline.packs]
    columns = {
        "wait ms": [float(np.median(pack.wait.max(axis=0))) * 1e3 for pack in timeline.packs],
        "transfer ms": [1e3 * value for value in seconds],
        "algbw GB/s": [pack.algbw for pack in timeline.packs],
        "busbw GB/s": [pack.busbw for pack in timeline.packs],
    }
    cells = [[pack.name for pack in timeline.packs]]
    cells.append([size_of(pack.bytes) for pack in timeline.packs])
    cells += [[_cell(v, np.array(values)) for v in values] for values in columns.values()]
    names = ["", "size", *columns]
    if measured:
        names.append("% of measured")
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
    """For each pack, after which share of the backward pass its gradients were there: the median
    over rows and steps, in [0, 1]; NaN where the beginning of that pass is not known."""
    begin, end = timeline.marks.get("forward"), timeline.marks["backward"]
    if begin is None:
        return [np.nan] * len(timeline.packs)
    length = np.where(end > begin, end - begin, np.nan)
    shares = [np.clip((pack.ready - begin) / length, 0, 1) for pack in timeline.packs]
    return [float(median(share)) for share in shares]


def scalars(timeline: Timeline) -> dict[str, float]:
    """For TensorBoard: medians over the steps, of the replica where each is largest.

    ``allreduce/exposed_ms``: communication that nothing hides. ``allreduce/late_ms``: what the
    others waited for the latest replica. ``allreduce/busbw``, GB/s: of all packs together. What is
    not known is left out.
    """
    exposed = float(median(timeline.exposed.max(axis=0))) * 1e3
    late = float(median(timeline.late.max(axis=0))) * 1e3
    values = {"allreduce/exposed_ms": exposed, "allreduce/late_ms": late}
    seconds = float(np.median(_transferring(timeline)))
    size = sum(pack.bytes for pack in timeline.packs)
    if seconds > 0 and size:
        values["allreduce/busbw"] = size / seconds / 1e9 * timeline.packs[0].bus_factor
    return {name: value for name, value in values.items() if np.isfinite(value)}


def _transferring(timeline: Timeline) -> np.ndarray:
    """Seconds of each step, [S], in which some pack was transferred: packs may overlap."""
    seconds = np.zeros(len(timeline.steps))
    covered = np.full(len(timeline.steps), -np.inf)
    for pack in timeline.packs:
        there = (pack.begun + pack.wait).max(axis=0)
        done = there + pack.seconds
        seconds += np.maximum(0.0, done - np.maximum(there, covered))
        covered = np.maximum(covered, done)
    return seconds


def print_report(
    timeline: Timeline,
    verdict: Sequence[str],
    *,
    plan: Plan | None = None,
    measured: Measured | None = None,
    file: TextIO | None = None,
) -> None:
    """The tables and the verdict; without colours and never cut off where ``file`` (default:
    standard output) is no terminal."""
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


def percent(share: float | None) -> str:
    """A share as whole percents; "–" for None and what is not finite."""
    return "–" if share is None or not np.isfinite(share) else f"{share:.0%}"


def _cell(value: float, column: np.ndarray) -> str:
    """With as many decimals as its whole column, three digits for the largest: to be compared."""
    if value == 0 or not np.isfinite(value):
        return significant(value)
    largest = np.nanmax(np.abs(column))
    decimals = 3 if largest < 1 else 2 if largest < 10 else 1 if largest < 100 else 0
    return f"{value:,.{decimals}f}" if largest < 1e9 else significant(value)


def median(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Of what is not NaN; NaN of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis)
