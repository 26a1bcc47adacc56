"""Draws learning curves: as SVG, in a page or of its own, and as text for a terminal."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctl.base import svg
from ctl.base.svg import escape

# Okabe and Ito (2008), "Color Universal Design": distinguishable with any colour vision.
BLUE, SKY_BLUE, GREEN = "#0072b2", "#56b4e9", "#009e73"
ORANGE, VERMILION, PURPLE = "#e69f00", "#d55e00", "#cc79a7"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY_BLUE)  # of curves, in this order

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 424, 10, 212
POINTS = 300  # the most of a curve
_DASHES = ("none", "6 3", "2 3")
CURVES = len(COLOURS) * len(_DASHES)  # that can be told apart

_RULES = {
    ".curve": "fill: none; stroke-width: 1.8; stroke-linejoin: round",
    ".train": "opacity: 0.45",
    **{
        f".c{n}": f"stroke: {COLOURS[n % len(COLOURS)]}; "
        f"stroke-dasharray: {_DASHES[n // len(COLOURS)]}"
        for n in range(CURVES)
    },
    # After the dashes, of which a mark has none.
    ".mark": "stroke-width: 6; stroke-linecap: round; stroke-dasharray: none",
    ".frame": "fill: none",
}
_DARK_RULES = {".curve": "filter: brightness(1.4)", ".train": "opacity: 0.65"}

STYLE = svg.style(_RULES, _DARK_RULES)


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        points: ``(step, value)``, in ascending order of steps; both are finite.
        evaluates: whether it is of evaluations, whose points have marks. One of the training is
            faint.
        run: the number of its run, from 0 to `CURVES` - 1, which chooses the colour.
        gaps: steps, in ascending order, whose value is not finite: no line passes them.
    """

    points: Sequence[tuple[int, float]]
    evaluates: bool = False
    run: int = 0
    gaps: Sequence[int] = ()

    @property
    def lines(self) -> list[list[tuple[int, float]]]:
        """At most about `POINTS` of ``points``, in parts between which there are gaps."""
        parts: list[list[tuple[int, float]]] = []
        before = 0
        for step, value in _thinned(self.points):
            at = bisect.bisect(self.gaps, step)
            if not parts or at != before:
                parts.append([])
            parts[-1].append((step, value))
            before = at
        return parts


def chart(name: str, curves: Sequence[Curve]) -> str:
    """The scalar ``name`` over the steps as an SVG element without a title, for a page with `STYLE`
    and classes for text and grid. Empty if no curve has a point."""
    parts = _parts(curves)
    if not parts:
        return ""
    label = f"<title>{escape(name)} over the steps</title>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{label}{"".join(parts)}</svg>'


def picture(charts: Mapping[str, Sequence[Curve]], about: str = "") -> str:
    """An SVG document of its own, also for a notebook: the charts by their name, one below another,
    with colours for light and dark pages. ``about`` describes it for screen readers. Charts without
    a point are left out; without any, the picture is empty."""
    top, body = 6.0, []
    for name, curves in charts.items():
        if parts := _parts(curves):
            body.append(svg.text(LEFT, top + 16, svg.shorten(name, RIGHT - LEFT, 16), "title"))
            place = f'transform="translate(0 {svg.number(top + 18)})"'
            body.append(f"<g {place}>{''.join(parts)}</g>")
            top += 18 + HEIGHT
    drawn = [curve for curves in charts.values() for curve in curves if curve.points]
    at = float(LEFT)
    for evaluates, label in ((False, "training"), (True, "evaluation")):
        if body and any(curve.evaluates == evaluates for curve in drawn):
            y = svg.number(top + 12)
            kind = "eval" if evaluates else "train"
            body.append(svg.path([f"M{svg.number(at)} {y}h24"], f"curve {kind} c0"))
            if evaluates:
                body.append(svg.path([f"M{svg.number(at + 12)} {y}h0"], "curve mark eval c0"))
            body.append(svg.text(at + 30, top + 16, label))
            at += 48 + svg.text_width(label)
    return svg.document("ctl-curves", WIDTH, top + 28, body, _RULES, _DARK_RULES, about)


def _parts(curves: Sequence[Curve]) -> list[str]:
    """The elements of a chart; none if no curve has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return []
    limit, low, high = _range(curves)
    step = svg.ticks(high - low, about=5)[1]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high, marks = first * step, last * step, [n * step for n in range(first, last + 1)]

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / limit

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    parts = []
    for mark in marks:
        parts += [svg.line(LEFT, y(mark), RIGHT, y(mark))]
        parts += [svg.text(LEFT - 6, y(mark) + 4, f"{mark:.4g}", "y")]
    for tick in svg.ticks(limit, least=1, about=4):
        label = count(tick)
        inside = WIDTH - 2 - svg.text_width(label) / 2
        parts.append(svg.text(min(x(tick), inside), BOTTOM + 17, label, "x"))
    parts.append(svg.text((LEFT + RIGHT) / 2, BOTTOM + 34, "number of the step", "x"))
    parts.append(svg.rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, "frame"))
    for curve in curves:
        kind = f"{'eval' if curve.evaluates else 'train'} c{curve.run}"
        lines: list[str] = []
        alone: list[str] = []  # points
        for points in curve.lines:
            places = [f"{svg.number(x(step))} {svg.number(y(value))}" for step, value in points]
            if len(places) > 1:
                lines += ["M", "L".join(places)]
            if curve.evaluates or len(places) == 1:
                alone += [f"M{place}h0" for place in places]
        parts += [svg.path(lines, f"curve {kind}")] * bool(lines)
        parts += [svg.path(alone, f"curve mark {kind}")] * bool(alone)
    return parts


def _range(curves: Sequence[Curve]) -> tuple[int, float, float]:
    """The last step, and the ends of an axis for the values, which differ."""
    values = [value for curve in curves for _, value in curve.points]
    limit = max(1, *(step for curve in curves for step, _ in curve.points))
    low, high = max(min(values), -1e300), min(max(values), 1e300)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    return limit, low, high


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` of ``points``, the last among them."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], *points[-1:]]


def count(step: float) -> str:
    """The number of a step, for an axis."""
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step:,.0f}"


# Bits of the dots of a Braille character, U+2800 to U+28FF: two columns of four.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ROWS = 6  # of a plot in text
_MARK = "●"


def text_plot(name: str, curves: Sequence[Curve], columns: int) -> list[str]:
    """The chart as lines of text, each ``columns`` wide: training as a line of dots, evaluations as
    ``●``. Empty if no curve has two points, or ``columns`` are too few."""
    curves = [curve for curve in curves if curve.points]
    if not any(len(curve.points) > 1 for curve in curves):
        return []
    limit, low, high = _range(curves)
    ends = {0: f"{high:.3g}", _ROWS - 1: f"{low:.3g}"}
    left = max(map(len, ends.values()))
    width = columns - left - 2  # of the plot: behind the ends, a space and the axis
    if width < 12:
        return []
    dots = [[0] * width for _ in range(_ROWS)]
    marks: dict[tuple[int, int], str] = {}

    def place(step: int, value: float) -> tuple[float, float]:
        height = (min(max(value, low), high) - low) / (high - low)
        return (2 * width - 1) * step / limit, (4 * _ROWS - 1) * (1 - height)

    for curve in curves:
        for points in curve.lines:
            places = [place(step, value) for step, value in points]
            if curve.evaluates:
                marks |= {(round(y) // 4, round(x) // 2): _MARK for x, y in places}
                continue
            for x, y in _between(places):
                dots[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    lines = [f"{'':{left + 2}}{svg.printable(name)}"]
    for row in range(_ROWS):
        cells = (
            marks.get((row, column)) or (chr(0x2800 + bits) if bits else " ")
            for column, bits in enumerate(dots[row])
        )
        lines.append(f"{ends.get(row, ''):>{left}} │{''.join(cells)}")
    last = count(limit)
    lines.append(f"{'':{left}} └{'─' * width}")
    lines.append(f"{'':{left}}  0{last:>{width - 1}}")
    return [line[:columns].ljust(columns) for line in lines]


def _between(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """The dots of a line through ``places``."""
    for (x1, y1), (x2, y2) in zip(places, [*places[1:], places[-1]], strict=True):
        steps = max(1, math.ceil(max(abs(x2 - x1), abs(y2 - y1))))
        for n in range(steps + 1):
            yield round(x1 + (x2 - x1) * n / steps), round(y1 + (y2 - y1) * n / steps)
