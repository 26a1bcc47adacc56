"""Draws a `Timeline`: one step, wait and transfer of each step, who comes late.

A few replicas are drawn in full. Of many, those that explain the step are drawn: the last to come,
the one that waited longest, and some between them. Long windows show the worst of neighbouring
steps. So the size of a picture is bounded. Colours are classes of `ctl.inspect.show.document`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctl.base import svg
from ctl.inspect.measure.timeline import PHASES, covered_seconds
from ctl.inspect.show.report import duration, median, row_names, significant

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import PackTimes, Timeline

LANES = 8  # the most replicas in the picture of a step
PANELS = 4  # the most replicas in the picture of waits
CELLS = 64  # the most rows of the heat map
PACKS = 200  # the most packs of a lane
TITLES = 200  # the most elements with a tooltip
# Where each level of the heat map begins: lateness as a share of the step.
LEVELS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50)
_ROW = 18  # height of a row of a legend


@dataclasses.dataclass(frozen=True)
class Frame:
    """The layout of a picture.

    Attributes:
        width: of the picture.
        left, right: the measurements are between them, labels left of them.
        label: width of the label of a replica.
        legend: where the rows of the legend begin.
        columns: the most columns of a picture of steps.
        ticks: the most on an axis of time.
        last: width of the column right of the heat map.
        has_details: whether there is room for tooltips, and for what the legend says, too.
    """

    width: int
    left: int
    right: int
    label: int
    legend: int
    columns: int
    ticks: int
    last: int
    has_details: bool


WIDE = Frame(1040, 190, 1024, 116, 190, columns=120, ticks=10, last=96, has_details=True)
NARROW = Frame(372, 114, 364, 86, 0, columns=40, ticks=4, last=80, has_details=False)


def typical_and_worst(timeline: Timeline) -> list[tuple[str, int]]:
    """Names and indices of two steps, or of one if they are the same.

    The phases of the typical step are nearest to their medians; the worst step is the longest.
    """
    phases = np.nan_to_num(np.stack([*timeline.phases.values(), timeline.late]))
    unlike = np.abs(phases - np.median(phases, axis=2, keepdims=True)).sum(axis=(0, 1))
    typical = int(unlike.argmin())
    worst = int(np.nan_to_num(timeline.step_seconds.max(axis=0)).argmax())
    return [("typical", typical)] + ([("worst", worst)] if worst != typical else [])


def choose(
    late: np.ndarray, wait: np.ndarray, most: int, least: float
) -> tuple[list[int], dict[int, str]]:
    """Chooses at most ``most`` rows.

    Args:
        late: [N], seconds: how late each row came to the packs.
        wait: [N], seconds: how long each row waited in them.
        most: the number of rows to choose, 2 or more.
        least: seconds; a row gets a note only above.

    Returns:
        The rows, ascending; and row -> note, for some of them.
    """
    late, wait = np.nan_to_num(late), np.nan_to_num(wait)
    notes = {}
    if len(late) > 1 and wait.max() > least:
        notes[int(wait.argmax())] = "waits longest"
    if len(late) > 1 and late.max() > least:
        notes[int(late.argmax())] = "comes last"
    if len(late) <= most:
        return list(range(len(late))), notes
    chosen = dict.fromkeys(notes)
    by_wait = np.argsort(wait, kind="stable")
    for position in np.linspace(0, len(late) - 1, most):  # the spread, from short to long waits
        if len(chosen) < most:
            chosen[int(by_wait[round(position)])] = None
    return sorted(chosen), notes


def noise(timeline: Timeline) -> float:
    """Seconds of lateness that are noise: 1 % of the median step, or the error of the clocks."""
    least = 0.01 * float(np.nan_to_num(median(timeline.step_seconds)))
    return max(least, timeline.clock_error)


def length(timeline: Timeline, index: int) -> float:
    """Seconds from the first beginning to the last end of a step, over all rows."""
    begin = timeline.begin[:, index]
    return float((begin + timeline.step_seconds[:, index]).max() - begin.min())


def step_picture(
    timeline: Timeline, index: int, name: str, limit: float, frame: Frame = WIDE
) -> tuple[str, int]:
    """Draws the step at ``index``: for each replica a lane of computation, and of communication
    below it. Returns the SVG, and the number of replicas in it.

    ``limit`` is the right end in seconds, so that two steps can be drawn on one scale. ``name``
    describes the picture for screen readers.
    """
    most = min(LANES, max(2, 240 // (min(len(timeline.packs), PACKS) + 4)))  # bounds the file
    wait = _waited(timeline)[:, index]
    rows, notes = choose(timeline.late[:, index], wait, most, noise(timeline))
    names = row_names(timeline.rows)
    limit = limit if math.isfinite(limit) and limit > 0 else 1e-3
    scale, unit = _unit(limit)
    lanes = _Lanes(timeline, index, limit, frame)
    top, height = 34, 66
    bottom = top + height * len(rows)
    for number, row in enumerate(rows):
        lanes.draw(row, names[row], notes.get(row, ""), top + height * number)
    legend = [(f"p-{phase}", phase) for phase in PHASES if phase in lanes.phases]
    if lanes.has_exposed:
        legend.append(("exposed", "exposed: nothing left to compute"))
    parts = []
    for tick in svg.ticks(limit * scale, about=frame.ticks):
        x = lanes.x(tick / scale)
        parts.append(svg.line(x, top - 6, x, bottom))
        parts.append(svg.text(x, bottom + 16, f"{tick:,g}", "x"))
    title = f"time since the step began, {unit}"
    parts.append(svg.text((frame.left + frame.right) / 2, bottom + 34, title, "x"))
    parts += lanes.elements()
    return _figure(bottom + 44, name, _legend(legend, frame), parts, frame), len(rows)


class _Lanes:
    """The lanes of one step.

    Attributes:
        parts: what was drawn, but for `shapes`.
        shapes: where there are no tooltips, the outlines of each class: one element takes a third
            of the bytes.
        phases: those that are wide enough to be seen.
        has_exposed: whether a replica communicated and had nothing left to compute.
    """

    def __init__(self, timeline: Timeline, index: int, limit: float, frame: Frame):
        self._timeline, self._index, self._limit, self._frame = timeline, index, limit, frame
        self._zero = timeline.begin[:, index].min()
        self.parts: list[str] = []
        self.shapes: dict[str, list[str]] = {}
        self.phases: set[str] = set()
        self.has_exposed = False

    def x(self, seconds: float) -> float:
        frame, share = self._frame, min(max(seconds, 0.0), self._limit) / self._limit
        return frame.left + (frame.right - frame.left) * share

    def elements(self) -> list[str]:
        """All that was drawn: texts lie on shapes."""
        return [*(svg.path(lines, kind) for kind, lines in self.shapes.items()), *self.parts]

    def _box(self, x: float, y: float, width: float, height: float, kind: str, title: str) -> None:
        """Draws a rectangle of class ``kind``, with ``title`` as a tooltip if there is room."""
        if self._frame.has_details:
            self.parts.append(svg.rect(x, y, width, height, kind, title))
        else:
            wide, high = svg.number(width), svg.number(height)
            line = f"M{svg.number(x)} {svg.number(y)}h{wide}v{high}h-{wide}z"
            self.shapes.setdefault(kind, []).append(line)

    def draw(self, row: int, label: str, note: str, y: float) -> None:
        """Draws a replica, with ``note`` as a second line below its label."""
        timeline, index, zero = self._timeline, self._index, self._zero
        frame = self._frame
        self.parts.append(svg.text(0, y + 16, svg.shorten(label, frame.label), "strong"))
        self.parts.append(svg.text(0, y + 33, svg.shorten(note, frame.label, 11), "note"))
        if frame.has_details:
            self.parts.append(svg.text(frame.left - 8, y + 16, "compute", "y small"))
            self.parts.append(svg.text(frame.left - 8, y + 41, "all-reduce", "y small"))
        at = timeline.begin[row, index] - zero
        end = at + timeline.step_seconds[row, index]
        computed = []
        for phase, text, seconds in computed_phases(timeline, row, index):
            computed.append((phase, text, at, at + seconds))
            at += seconds
        computed.append(("apply", "apply", end - timeline.phases["apply"][row, index], end))
        for phase, text, since, until in computed:
            title = f"{label}: {text}, {duration(until - since)}"
            self._span(phase, since, until, y, 23, text, title)
        packs = timeline.packs[:PACKS]
        for pack in packs:
            ready = self.x(pack.ready[row, index] - zero)
            if self._frame.has_details:
                self.parts.append(svg.line(ready, y + 23, ready, y + 28, "ready"))
            else:
                self.shapes.setdefault("ready", []).append(f"M{svg.number(ready)} {y + 23}v5")
        exposed, covered = [], at
        level_of = levels(packs, row, index)
        height = 19 / (1 + max(level_of, default=0))
        for pack, level in zip(packs, level_of, strict=True):
            parts = pack_parts(pack, row, index)
            title = f"{label}: {pack.name}, {pack.bytes:,} bytes"
            title += "".join(f", {name} {duration(until - since)}" for name, since, until in parts)
            below = y + 28 + height * level
            for name, since, until in parts:
                texts = {"wait": f"wait {duration(until - since)}", "transfer": pack.name}
                span = since - zero, until - zero
                self._span(name, *span, below, height, texts.get(name, ""), title)
            start, done = parts[0][1] - zero, parts[-1][2] - zero
            if done > covered:
                left = self.x(max(start, covered))
                exposed.append((left, self.x(done) - left))
                covered = done
        for left, width in exposed:
            self._box(left, y + 49, width, 4, "exposed", "")
        self.has_exposed |= bool(exposed)

    def _span(
        self,
        phase: str,
        begin: float,
        end: float,
        y: float,
        height: float,
        text: str,
        title: str,
    ) -> None:
        """Draws one of `PHASES`: with ``text`` if there is room, and ``title`` as a tooltip."""
        left, width = self.x(begin), self.x(end) - self.x(begin)
        if not width > 0:
            return
        if width >= 0.5:
            self.phases.add(phase)
        # No tooltip for a span that is too thin to point at.
        title = title if width > 1.5 else ""
        self._box(left, y, width, height, f"p-{phase}", title)
        if text and height > 12 and svg.text_width(text, 11) + 8 < width:
            kind = f"x small t-{phase}"
            self.parts.append(svg.text(left + width / 2, y + height / 2 + 4, text, kind))


def pack_parts(pack: PackTimes, row: int, index: int) -> list[tuple[str, float, float]]:
    """The parts of an all-reduce on a replica in one step, in order and without gaps: name, begin
    and end, seconds since `Timeline.origin`. The names are "wait", "transfer" and, with a profile,
    "pack" for packing and unpacking."""
    start, begun = float(pack.start[row, index]), float(pack.begun[row, index])
    there = begun + float(pack.wait[row, index])
    ended = there + float(pack.transfer[row, index])
    after = np.nan_to_num(pack.packing[row, index]) - (begun - start)
    parts = [("wait", begun, there), ("transfer", there, ended)]
    if begun > start:
        parts.insert(0, ("pack", start, begun))
    if after > 0:
        parts.append(("pack", ended, ended + float(after)))
    return parts


def levels(packs: Sequence[PackTimes], row: int, index: int) -> list[int]:
    """For each pack, the level at which it overlaps no other; 0 for packs that run in turn."""
    free_at: list[float] = []  # for each level, the end of its last pack
    found = []
    for pack in packs:
        parts = pack_parts(pack, row, index)
        start, done = parts[0][1], parts[-1][2]
        rounding = start + 1e-6
        level = next((i for i, free in enumerate(free_at) if free <= rounding), len(free_at))
        free_at[level : level + 1] = [done]
        found.append(level)
    return found


def computed_phases(timeline: Timeline, row: int, index: int) -> list[tuple[str, str, float]]:
    """The phases that a replica computed up to its last gradients: phase, text to show, seconds."""
    found = []
    for phase in ("input", "forward", "backward"):
        seconds = float(timeline.phases[phase][row, index])
        joint = phase == "backward" and not np.isfinite(timeline.phases["forward"][row, index])
        if np.isfinite(seconds):
            found.append((phase, "forward and backward" if joint else phase, seconds))
    return found


def _waited(timeline: Timeline) -> np.ndarray:
    """[N, S], seconds in which a row waited in any pack; packs may overlap."""
    spans = [(pack.begun, pack.begun + pack.wait) for pack in timeline.packs]
    return np.zeros(timeline.late.shape) + covered_seconds(spans)


def waits_picture(timeline: Timeline, frame: Frame = WIDE) -> tuple[str, int]:
    """Draws wait and transfer of every step: one panel for each replica, all on one scale. Returns
    the SVG, and the number of replicas in it."""
    total = timeline.hidden + timeline.exposed  # not the sum over packs, which may overlap
    wait = np.minimum(_waited(timeline), total)  # they may differ by rounding
    late = median(timeline.late, axis=1)
    rows, notes = choose(late, median(wait, axis=1), PANELS, noise(timeline))
    names, steps = row_names(timeline.rows), timeline.steps.tolist()
    groups = _groups(len(steps), frame)
    seconds = np.stack([wait, total - wait, timeline.exposed])
    panels = [_worst_of(seconds[:, row], groups) for row in rows]
    bars = [bar for panel in panels for bar in panel]
    limit, clipped = _limit([wait + transfer for wait, transfer, _ in bars] + [e for *_, e in bars])
    scale, unit = _unit(limit)
    top, height, gap = 34, 84, 22
    column = (frame.right - frame.left) / len(groups)
    width = min(0.76 * column, 30.0)
    bottom = top + (height + gap) * len(rows) - gap
    titled = len(bars) <= TITLES and frame.has_details
    entries = [("p-wait", "wait for others"), ("p-transfer", "transfer"), ("level", "exposed")]
    if len(groups) < len(steps):
        entries.append(("", f"a bar is the worst of {len(groups[0])} steps"))
    parts = []
    for number, (row, panel) in enumerate(zip(rows, panels, strict=True)):
        foot = top + (height + gap) * number + height

        def y(seconds: float, foot: float = foot) -> float:
            return foot - (height - 14) * min(max(seconds, 0.0), limit) / limit

        label = svg.shorten(names[row], frame.label)
        parts.append(svg.text(0, foot - height + 24, label, "strong"))
        note = svg.shorten(notes.get(row, ""), frame.label, 11)
        parts.append(svg.text(0, foot - height + 41, note, "note"))
        for tick in svg.ticks(limit * scale, about=3):
            parts.append(svg.line(frame.left, y(tick / scale), frame.right, y(tick / scale)))
            parts.append(svg.text(frame.left - 8, y(tick / scale) + 4, f"{tick:,g}", "y"))
        parts.append(svg.text(frame.left - 8, foot - height + 6, f"all-reduces, {unit}", "y small"))
        marks = []
        strokes: dict[str, list[str]] = {"wait": [], "transfer": []}
        for index, (waited, transfer, exposed) in enumerate(panel):
            at = frame.left + column * (index + 0.5) - width / 2
            title = f"step {_range(steps, groups[index])}: wait {duration(waited)}, transfer "
            title += f"{duration(transfer)}, exposed {duration(exposed)}"
            middle, end = y(transfer), y(waited + transfer)
            if titled:
                parts.append(svg.rect(at, middle, width, foot - middle, "p-transfer", title))
                parts.append(svg.rect(at, end, width, middle - end, "p-wait", title))
            else:
                x = svg.number(at + width / 2)
                strokes["transfer"].append(f"M{x} {foot}V{svg.number(middle)}")
                strokes["wait"].append(f"M{x} {svg.number(middle)}V{svg.number(end)}")
            marks.append(f"M{svg.number(at - 1.5)} {svg.number(y(exposed))}h")
            marks.append(svg.number(width + 3))
            if clipped and waited + transfer > limit * 1.001:
                over = f"▲{(waited + transfer) * scale:,.0f}"
                parts.append(svg.text(at + width / 2, foot - height + 10, over, "x small"))
        parts += [_stroke(lines, f"s-{phase}", width) for phase, lines in strokes.items()]
        parts.append(svg.path(marks, "level"))
        parts.append(svg.line(frame.left, foot, frame.right, foot, "frame"))
    parts += _step_axis(steps, groups, bottom, frame.left, frame.right)
    name = "Wait and transfer of each step"
    return _figure(bottom + 44, name, _legend(entries, frame), parts, frame), len(rows)


def lateness_picture(timeline: Timeline, frame: Frame = WIDE) -> tuple[str, int]:
    """Draws the heat map of how much later than the others each replica came to the packs: of all
    replicas, or of the latest if there are too many. Colours are shares of the median step, so that
    runs can be compared. Returns the SVG, and the number of replicas in it."""
    late = np.nan_to_num(timeline.late)
    rows: Sequence[int] = range(len(late))
    if len(late) > CELLS:
        rows = sorted(np.argsort(-late.mean(axis=1), kind="stable")[:CELLS].tolist())
    came_last = np.bincount(late.argmax(axis=0)[late.max(axis=0) > 0], minlength=len(late))
    names, steps = row_names(timeline.rows), timeline.steps.tolist()
    step_time = float(median(timeline.step_seconds))
    step_time = step_time if math.isfinite(step_time) and step_time > 0 else 1e-3
    groups = _groups(len(steps), frame)
    right = frame.right - frame.last
    height = 30 if len(rows) <= 4 else 20 if len(rows) <= 16 else 13
    column = (right - frame.left) / len(groups)
    top = 64
    bottom = top + height * len(rows)
    parts = []
    cells: list[list[str]] = [[] for _ in LEVELS]
    texts = []
    digits = 1 if step_time >= 5e-3 else 2
    titled = len(rows) * len(groups) <= TITLES and frame.has_details
    width = svg.number(column - min(1.0, column / 8))
    small = "" if height >= 18 else " small"
    for number, row in enumerate(rows):
        y = top + height * number
        middle = y + height / 2 + 4
        note = f"{came_last[row]} of {len(steps)}" if came_last[row] else ""
        label = svg.shorten(names[row], frame.left - 14)
        parts.append(svg.text(frame.left - 8, middle, label, f"y{small}"))
        parts.append(svg.text(right + 8, middle, svg.shorten(note, frame.last - 4, 11), "note"))
        for index, group in enumerate(groups):
            known = [value for value in timeline.late[row, group] if math.isfinite(value)]
            if not known:
                continue
            value, at = max(known), frame.left + column * index
            level = sum(value >= share * step_time for share in LEVELS[1:])
            title = f"{names[row]}, step {_range(steps, group)}: {duration(value)} behind"
            if titled:
                texts.append(svg.rect(at, y, column - 1, height - 1, f"h{level}", title))
            else:
                cells[level].append(f"M{svg.number(at)} {y + height / 2}h{width}")
            shown = f"{value * 1e3:.{digits}f}" if value else "0"
            if height >= 20 and svg.text_width(shown, 11) + 4 < column:
                texts.append(svg.text(at + column / 2, middle, shown, f"x small n{level}"))
    parts += [_stroke(cell, f"s{level}", height - 1) for level, cell in enumerate(cells) if cell]
    parts += texts
    parts.append(svg.text(frame.left - 8, top - 8, "replica", "y small"))
    parts.append(svg.text(right + 8, top - 8, "last to come", "small"))
    parts += _step_axis(steps, groups, bottom, frame.left, right)
    name = "How late each replica came to the all-reduces of each step"
    return _figure(bottom + 44, name, _heat_legend(step_time, frame), parts, frame), len(rows)


def _stroke(parts: Sequence[str], kind: str, width: float) -> str:
    """Rectangles as thick strokes of one element, which takes a third of the bytes."""
    return f'<g stroke-width="{svg.number(width)}">{svg.path(parts, kind)}</g>' if parts else ""


def _heat_legend(step_time: float, frame: Frame) -> tuple[str, int]:
    title = "behind the median of the others, % of a step (ms)"
    entries = []
    for level, share in enumerate(LEVELS):
        shown = f"{share:.0%}+" if level else f"below {LEVELS[1]:.0%}"
        if level:
            shown += f" ({significant(share * step_time * 1e3)})"
        entries.append((f"h{level} swatch", shown))
    parts, rows = _legend(entries, frame, 27)
    return svg.text(frame.legend, 13, title, "small") + parts, rows


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


def _groups(count: int, frame: Frame) -> list[range]:
    """``count`` steps in at most ``columns`` groups of neighbours."""
    size = max(1, math.ceil(count / frame.columns))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _worst_of(seconds: np.ndarray, groups: Sequence[range]) -> list[list[float]]:
    """Wait, transfer and exposed, ``seconds`` [3, S], of the step with the longest communication in
    each group; what is not finite is 0."""
    known = np.where(np.isfinite(seconds), seconds, 0.0)
    longest = (group[int(known[:2, group].sum(axis=0).argmax())] for group in groups)
    return [known[:, index].tolist() for index in longest]


def _step_axis(
    steps: Sequence[int], groups: Sequence[range], y: float, left: float, right: float
) -> list[str]:
    column = (right - left) / len(groups)
    widest = max(svg.text_width(f"{steps[i]:,}") for i in (0, -1)) + 14
    every = max(1, math.ceil(widest / column))
    parts = [svg.text((left + right) / 2, y + 36, "number of the step", "x")]
    for index in range(0, len(groups), every):
        at = left + column * (index + 0.5)
        parts.append(svg.text(at, y + 17, f"{steps[groups[index][0]]:,}", "x"))
    return parts


def _range(steps: Sequence[int], group: range) -> str:
    first, last = steps[group[0]], steps[group[-1]]
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _legend(entries: Sequence[tuple[str, str]], frame: Frame, middle: float = 9) -> tuple[str, int]:
    """A legend, its first row around ``middle``: the class of a colour and its text, or "" and a
    text. Returns its SVG, and the number of its rows."""
    parts = []
    at, rows = float(frame.legend), 1
    for kind, label in entries:
        width = 38 + svg.text_width(label)
        if at > frame.legend and at + width > frame.width + 19:
            at, rows, middle = float(frame.legend), rows + 1, middle + _ROW
        if kind == "level":
            parts.append(svg.path([f"M{svg.number(at)} {middle}h14"], "level"))
        elif kind:
            tall = 4 if kind == "exposed" else 12
            parts.append(svg.rect(at, middle - tall / 2, 14, tall, kind))
        parts.append(svg.text(at + (19 if kind else 0), middle + 4, label))
        at += width
    return "".join(parts), rows


def _figure(
    height: float, name: str, legend: tuple[str, int], parts: Sequence[str], frame: Frame
) -> str:
    """A picture of ``height`` with one row of the ``legend``, and higher with more."""
    drawn, rows = legend
    below = _ROW * (rows - 1)
    box = f'viewBox="0 0 {frame.width} {svg.number(height + below)}"'
    body = "".join(parts)
    body = f'<g transform="translate(0 {below})">{body}</g>' if below else body
    return f'<svg {box} role="img" aria-label="{svg.escape(name)}">{drawn}{body}</svg>'
