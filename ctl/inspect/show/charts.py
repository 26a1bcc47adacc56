"""Draws measurements: one step, communication per step, lateness.

Each function takes plain numbers in seconds and returns one SVG element, whose colours are classes
of `ctl.inspect.show.style`. To bound the size of a picture, long windows show the worst of
neighbouring steps, and the caller chooses the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctl.base import svg
from ctl.inspect.measure.timeline import PHASES

WIDTH = 1040
LEFT, RIGHT = 190, 1024  # the measurements are between them, labels left of them
COLUMNS = 120  # the most columns of a picture of steps
TITLES = 200  # the most elements with a tooltip
# Where each level of the heat map begins: lateness as a share of the step.
LEVELS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50)


@dataclass(frozen=True)
class Span:
    """What a replica did during a time.

    Attributes:
        phase: one of `PHASES`.
        begin, end: seconds from the left end of the picture.
        text: written on it if there is room.
        title: the tooltip.
        level: its place from the top among spans that overlap.
    """

    phase: str
    begin: float
    end: float
    text: str = ""
    title: str = ""
    level: int = 0


@dataclass(frozen=True)
class Lane:
    """One replica in the picture of a step.

    Attributes:
        label: its name.
        note: a second line below the label.
        compute, communication: what it did.
        ready: seconds; when the gradients of each pack were ready.
        exposed: intervals in seconds; the replica communicated and had nothing left to compute.
    """

    label: str
    note: str
    compute: tuple[Span, ...]
    communication: tuple[Span, ...]
    ready: tuple[float, ...]
    exposed: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Bars:
    """Communication of one replica.

    Attributes:
        label: its name.
        note: a second line below the label.
        wait, transfer, exposed: [steps], seconds.
    """

    label: str
    note: str
    wait: Sequence[float]
    transfer: Sequence[float]
    exposed: Sequence[float]


def draw_step(lanes: Sequence[Lane], limit: float, name: str) -> str:
    """Draws one step: for each replica a lane of computation, and of communication below it.

    Args:
        lanes: the replicas.
        limit: seconds at the right end, so that two steps can be drawn on one scale.
        name: a description for screen readers.
    """
    limit = limit if math.isfinite(limit) and limit > 0 else 1e-3
    scale, unit = _unit(limit)

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(max(seconds, 0.0), limit) / limit

    top, height = 34, 66
    bottom = top + height * len(lanes)
    spans = [span for lane in lanes for span in (*lane.compute, *lane.communication)]
    seen = {span.phase for span in spans if x(span.end) - x(span.begin) >= 0.5}
    legend = [(f"p-{phase}", phase) for phase in PHASES if phase in seen]
    if any(lane.exposed for lane in lanes):
        legend.append(("exposed", "exposed: nothing left to compute"))
    parts = [_legend(legend)]
    for tick in svg.ticks(limit * scale, about=10):
        parts.append(svg.line(x(tick / scale), top - 6, x(tick / scale), bottom))
        parts.append(svg.text(x(tick / scale), bottom + 16, f"{tick:,g}", "x"))
    title = f"time since the step began, {unit}"
    parts.append(svg.text((LEFT + RIGHT) / 2, bottom + 34, title, "x"))
    for number, lane in enumerate(lanes):
        y = top + height * number
        parts.append(svg.text(0, y + 16, svg.shorten(lane.label, 116), "strong"))
        parts.append(svg.text(0, y + 33, svg.shorten(lane.note, 116, 11), "note"))
        parts.append(svg.text(LEFT - 8, y + 16, "compute", "y small"))
        parts.append(svg.text(LEFT - 8, y + 41, "all-reduce", "y small"))
        for span in lane.compute:
            parts += _span(span, x, y, 23)
        for at in lane.ready:
            parts.append(svg.line(x(at), y + 23, x(at), y + 28, "ready"))
        levels = 1 + max((span.level for span in lane.communication), default=0)
        for span in lane.communication:
            parts += _span(span, x, y + 28 + 19 * span.level / levels, 19 / levels)
        for begin, end in lane.exposed:
            parts.append(svg.rect(x(begin), y + 49, x(end) - x(begin), 4, "exposed"))
    return _figure(bottom + 44, name, parts)


def _span(span: Span, x: Callable[[float], float], y: float, height: float) -> list[str]:
    begin, width = x(span.begin), x(span.end) - x(span.begin)
    if not width > 0:
        return []
    # No tooltip for a span that is too thin to point at.
    title = span.title if width > 1.5 else ""
    parts = [svg.rect(begin, y, width, height, f"p-{span.phase}", title)]
    if span.text and height > 12 and svg.text_width(span.text, 11) + 8 < width:
        middle = begin + width / 2
        parts.append(svg.text(middle, y + height / 2 + 4, span.text, f"x small t-{span.phase}"))
    return parts


def draw_bars(rows: Sequence[Bars], steps: Sequence[int], name: str) -> str:
    """Draws wait and transfer of each step: one panel for each replica, all on one scale.

    Args:
        rows: the replicas.
        steps: the numbers of the steps.
        name: a description for screen readers.
    """
    groups = _groups(len(steps))
    panels = [_worst_of(row, groups) for row in rows]
    totals = [wait + transfer for panel in panels for wait, transfer, _ in panel]
    totals += [exposed for panel in panels for *_, exposed in panel]
    limit, clipped = _limit(totals)
    scale, unit = _unit(limit)
    top, height, gap = 34, 84, 22
    column = (RIGHT - LEFT) / len(groups)
    bar = min(0.76 * column, 30.0)
    bottom = top + (height + gap) * len(rows) - gap
    legend = [("p-wait", "wait for others"), ("p-transfer", "transfer"), ("level", "exposed")]
    titled = len(rows) * len(groups) <= TITLES
    parts = [_legend(legend)]
    if len(groups) < len(steps):
        parts.append(svg.text(RIGHT, 13, f"a bar is the worst of {len(groups[0])} steps", "y note"))
    for number, (row, panel) in enumerate(zip(rows, panels, strict=True)):
        foot = top + (height + gap) * number + height

        def y(seconds: float, foot: float = foot) -> float:
            return foot - (height - 14) * min(max(seconds, 0.0), limit) / limit

        parts.append(svg.text(0, foot - height + 24, svg.shorten(row.label, 130), "strong"))
        parts.append(svg.text(0, foot - height + 41, svg.shorten(row.note, 130, 11), "note"))
        for tick in svg.ticks(limit * scale, about=3):
            parts.append(svg.line(LEFT, y(tick / scale), RIGHT, y(tick / scale)))
            parts.append(svg.text(LEFT - 8, y(tick / scale) + 4, f"{tick:,g}", "y"))
        parts.append(svg.text(LEFT - 8, foot - height + 6, f"all-reduces, {unit}", "y small"))
        levels = []
        strokes: dict[str, list[str]] = {"wait": [], "transfer": []}
        for index, (wait, transfer, exposed) in enumerate(panel):
            at = LEFT + column * (index + 0.5) - bar / 2
            first, last = steps[groups[index][0]], steps[groups[index][-1]]
            title = f"step {_range(first, last)}: wait {duration(wait)}, transfer "
            title += f"{duration(transfer)}, exposed {duration(exposed)}"
            middle, end = y(transfer), y(wait + transfer)
            if titled:
                parts.append(svg.rect(at, middle, bar, foot - middle, "p-transfer", title))
                parts.append(svg.rect(at, end, bar, middle - end, "p-wait", title))
            else:
                x = svg.number(at + bar / 2)
                strokes["transfer"].append(f"M{x} {foot}V{svg.number(middle)}")
                strokes["wait"].append(f"M{x} {svg.number(middle)}V{svg.number(end)}")
            levels.append(f"M{svg.number(at - 1.5)} {svg.number(y(exposed))}h")
            levels.append(svg.number(bar + 3))
            if clipped and wait + transfer > limit * 1.001:
                over = f"▲{(wait + transfer) * scale:,.0f}"
                parts.append(svg.text(at + bar / 2, foot - height + 10, over, "x small"))
        parts += [_stroke(lines, f"s-{phase}", bar) for phase, lines in strokes.items()]
        parts.append(svg.path(levels, "level"))
        parts.append(svg.line(LEFT, foot, RIGHT, foot, "frame"))
    parts += _step_axis(steps, groups, bottom)
    return _figure(bottom + 44, name, parts)


def draw_lateness(
    labels: Sequence[str],
    notes: Sequence[str],
    late: Sequence[Sequence[float]],
    steps: Sequence[int],
    step_time: float,
    name: str,
) -> str:
    """Draws how much later than the others each row came to the packs: a heat map.

    Args:
        labels: the names of the rows.
        notes: a text on the right of each row.
        late: ``[rows, steps]``, seconds; NaN if unknown.
        steps: the numbers of the steps.
        step_time: seconds; the colours are shares of it, so that runs can be compared.
        name: a description for screen readers.
    """
    step_time = step_time if math.isfinite(step_time) and step_time > 0 else 1e-3
    groups = _groups(len(steps))
    right = RIGHT - 96
    row = 30 if len(labels) <= 4 else 20 if len(labels) <= 16 else 13
    column = (right - LEFT) / len(groups)
    top = 64
    bottom = top + row * len(labels)
    parts = [_heat_legend(step_time)]
    cells: list[list[str]] = [[] for _ in LEVELS]
    texts = []
    digits = 1 if step_time >= 5e-3 else 2
    titled = len(labels) * len(groups) <= TITLES
    length = svg.number(column - min(1.0, column / 8))
    small = "" if row >= 18 else " small"
    for number, (label, note) in enumerate(zip(labels, notes, strict=True)):
        y = top + row * number
        middle = y + row / 2 + 4
        parts.append(svg.text(LEFT - 8, middle, svg.shorten(label, 176), f"y{small}"))
        parts.append(svg.text(right + 8, middle, svg.shorten(note, 92, 11), "note"))
        for index, group in enumerate(groups):
            known = [late[number][i] for i in group if math.isfinite(late[number][i])]
            if not known:
                continue
            value, at = max(known), LEFT + column * index
            level = sum(value >= share * step_time for share in LEVELS[1:])
            title = f"{label}, step {_range(steps[group[0]], steps[group[-1]])}: "
            title += f"{duration(value)} behind"
            if titled:
                texts.append(svg.rect(at, y, column - 1, row - 1, f"h{level}", title))
            else:
                cells[level].append(f"M{svg.number(at)} {y + row / 2}h{length}")
            shown = f"{value * 1e3:.{digits}f}" if value else "0"
            if row >= 20 and svg.text_width(shown, 11) + 4 < column:
                texts.append(svg.text(at + column / 2, middle, shown, f"x small n{level}"))
    parts += [_stroke(cell, f"s{level}", row - 1) for level, cell in enumerate(cells) if cell]
    parts += texts
    parts.append(svg.text(LEFT - 8, top - 8, "replica", "y small"))
    parts.append(svg.text(right + 8, top - 8, "last to come", "small"))
    parts += _step_axis(steps, groups, bottom, right)
    return _figure(bottom + 44, name, parts)


def _stroke(parts: Sequence[str], kind: str, width: float) -> str:
    """Rectangles as thick strokes of one element, which takes a third of the bytes."""
    return f'<g stroke-width="{svg.number(width)}">{svg.path(parts, kind)}</g>' if parts else ""


def _heat_legend(step_time: float) -> str:
    parts = [svg.text(LEFT, 13, "behind the median of the others, % of a step (ms)", "small")]
    at = float(LEFT)
    for level, share in enumerate(LEVELS):
        shown = f"{share:.0%}+" if level else f"below {LEVELS[1]:.0%}"
        if level:
            shown += f" ({significant(share * step_time * 1e3)})"
        parts.append(svg.rect(at, 21, 14, 12, f"h{level} swatch"))
        parts.append(svg.text(at + 18, 31, shown, "small"))
        at += 34 + svg.text_width(shown, 11)
    return "".join(parts)


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


def _unit(limit: float) -> tuple[float, str]:
    """The unit of an axis from 0 to ``limit`` seconds: how many are in a second, and its name."""
    return (1e6, "µs") if limit < 5e-4 else (1e3, "ms") if limit < 20 else (1.0, "s")


def _limit(values: Sequence[float]) -> tuple[float, bool]:
    """The end of an axis, and whether values lie beyond it: over 4 times the 90th percentile."""
    values = sorted(value for value in values if math.isfinite(value) and value > 0)
    if not values:
        return 1e-3, False
    usual = values[int(0.9 * (len(values) - 1))]
    return (values[-1], False) if values[-1] <= 4 * usual else (2 * usual, True)


def _groups(count: int) -> list[range]:
    """``count`` steps in at most ``COLUMNS`` groups of neighbours."""
    size = max(1, math.ceil(count / COLUMNS))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _worst_of(row: Bars, groups: Sequence[range]) -> list[tuple[float, float, float]]:
    """Wait, transfer and exposed of the step with the longest communication in each group."""

    def finite(value: float) -> float:
        return value if math.isfinite(value) else 0.0

    found = []
    for group in groups:
        values = [
            (finite(row.wait[i]), finite(row.transfer[i]), finite(row.exposed[i])) for i in group
        ]
        found.append(max(values, key=lambda triple: triple[0] + triple[1]))
    return found


def _step_axis(
    steps: Sequence[int], groups: Sequence[range], y: float, right: float = RIGHT
) -> list[str]:
    column = (right - LEFT) / len(groups)
    widest = max(svg.text_width(f"{steps[i]:,}") for i in (0, -1)) + 14
    every = max(1, math.ceil(widest / column))
    parts = [svg.text((LEFT + right) / 2, y + 36, "number of the step", "x")]
    for index in range(0, len(groups), every):
        at = LEFT + column * (index + 0.5)
        parts.append(svg.text(at, y + 17, f"{steps[groups[index][0]]:,}", "x"))
    return parts


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    parts = []
    at: float = LEFT
    for kind, label in entries:
        if kind == "level":
            parts.append(svg.path([f"M{at} 9h14"], "level"))
        else:
            tall = 4 if kind == "exposed" else 12
            parts.append(svg.rect(at, 9 - tall / 2, 14, tall, kind))
        parts.append(svg.text(at + 19, 13, label))
        at += 38 + svg.text_width(label)
    return "".join(parts)


def _figure(height: float, name: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {svg.number(height)}"'
    return f'<svg {box} role="img" aria-label="{svg.escape(name)}">{"".join(parts)}</svg>'
