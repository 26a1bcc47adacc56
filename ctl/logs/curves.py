"""Draws a scalar of runs over the steps, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctl.base import svg
from ctl.base.svg import escape
from ctl.logs.runs import Run

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 430, 28, 230
POINTS = 300  # the most of a curve
# Not of the model: these are in the table, or the same for all.
NOT_DRAWN = ("steps_per_second", "examples_per_second")


def draw(runs: Sequence[Run], name: str) -> str:
    """One picture: the scalar ``name`` of all ``runs`` over the steps. Empty if none has it."""
    curves = [
        (number, phase, _thinned(points))
        for number, run in enumerate(runs)
        for phase in ("train", "eval")
        if (points := run.curve(phase, name))
    ]
    if not curves:
        return ""
    values = [value for _, _, points in curves for _, value in points]
    limit = max(1, *(step for _, _, points in curves for step, _ in points))
    low, high, marks = _axis(min(values), max(values))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / limit

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    parts = []
    for mark in marks:
        parts += [svg.line(LEFT, y(mark), RIGHT, y(mark))]
        parts += [svg.text(LEFT - 6, y(mark) + 4, f"{mark:.4g}", "y")]
    for tick in svg.ticks(limit, least=1, about=4):
        parts.append(svg.text(x(tick), BOTTOM + 17, _count(tick), "x"))
    parts.append(svg.text((LEFT + RIGHT) / 2, BOTTOM + 34, "number of the step", "x"))
    parts.append(svg.text(LEFT, 16, svg.shorten(name, RIGHT - LEFT)))
    parts.append(svg.rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, "frame"))
    for number, phase, points in curves:
        places = [f"{svg.number(x(step))} {svg.number(y(value))}" for step, value in points]
        kind = f"curve {phase} c{number}"
        parts.append(svg.path(["M", "L".join(places)], kind))
        if phase == "eval":
            dots = [f"M{place}m-2 0h4m-2 -2v4" for place in places]
            parts.append(svg.path(dots, kind))
    label = escape(f"{name} over the steps")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{label}</title>'
        f"{''.join(parts)}</svg>"
    )


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` of ``points``, the last among them."""
    every = -(-len(points) // POINTS)
    return points[:-1:every] + points[-1:]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The ends of an axis for values from ``low`` to ``high``, and its marks."""
    low, high = max(low, -1e300), min(high, 1e300)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    step = svg.ticks(high - low, about=5)[1]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, last * step, [n * step for n in range(first, last + 1)]


def _count(step: float) -> str:
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step:,.0f}"
