"""Draws efficiency against replicas: one self-contained SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ctl.base import svg
from ctl.base.curves import BLUE, GREEN, SKY_BLUE, VERMILION
from ctl.inspect.predict.model import Prediction
from ctl.inspect.show.document import DARK_INK, DARK_PAGE, DARK_SOFT, FONT, LIGHT_INK, LIGHT_SOFT

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 590, 92, 336  # the labels of the curves are right of the frame

# For dark pages; on paper, dashes tell the curves apart.
_ORANGE, _GREEN = "#f0883e", "#3fb98f"
_STYLE = f"""
  .page {{ fill: #ffffff }} .frame {{ fill: none; stroke: #818b98 }} .grid {{ stroke: #e4e8ec }}
  text {{ font: 12px {FONT}; fill: {LIGHT_SOFT} }}
  text.title {{ font-size: 16px; font-weight: 600; fill: {LIGHT_INK} }}
  .x {{ text-anchor: middle }} .y {{ text-anchor: end }}
  .c0, .c1, .c2 {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
  .c0 {{ stroke: {BLUE} }} .c1 {{ stroke: {VERMILION}; stroke-dasharray: 7 4 }}
  .c2 {{ stroke: {GREEN}; stroke-dasharray: 2 3 }}
  text.t0 {{ fill: {BLUE} }} text.t1 {{ fill: #b04c00 }} text.t2 {{ fill: #00795a }}
  @media (prefers-color-scheme: dark) {{
    .page {{ fill: {DARK_PAGE} }} .frame {{ stroke: #656c76 }} .grid {{ stroke: #262c34 }}
    text {{ fill: {DARK_SOFT} }} text.title {{ fill: {DARK_INK} }}
    .c0 {{ stroke: {SKY_BLUE} }} .c1 {{ stroke: {_ORANGE} }} .c2 {{ stroke: {_GREEN} }}
    text.t0 {{ fill: {SKY_BLUE} }} text.t1 {{ fill: {_ORANGE} }} text.t2 {{ fill: {_GREEN} }}
  }}
"""


def draw(curves: Mapping[str, Sequence[Prediction]], title: str, notes: Sequence[str]) -> str:
    """An SVG document with a curve for each algorithm, 3 at most; ``notes`` are two lines below the
    title."""
    counts = [p.replicas for predictions in curves.values() for p in predictions]
    low, high = math.log10(min(counts)), math.log10(max(counts))

    def x(replicas: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(replicas) - low) / ((high - low) or 1.0)

    def y(efficiency: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(max(efficiency, 0.0), 1.0)

    parts = [f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>']
    parts.append(svg.text(_LEFT, 30, svg.shorten(title, _WIDTH - _LEFT, 16), "title"))
    for number, note in enumerate(notes):
        parts.append(svg.text(_LEFT, 51 + 18 * number, svg.shorten(note, _WIDTH - _LEFT - 8)))
    for percent in range(0, 101, 20):
        parts.append(svg.line(_LEFT, y(percent / 100), _RIGHT, y(percent / 100)))
        parts.append(svg.text(_LEFT - 8, y(percent / 100) + 4, f"{percent} %", "y"))
    for replicas in _decades(low, high):
        parts.append(svg.line(x(replicas), _TOP, x(replicas), _BOTTOM))
        parts.append(svg.text(x(replicas), _BOTTOM + 18, f"{replicas:,}", "x"))
    parts.append(svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "replicas", "x"))
    parts.append(
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" '
        f'height="{_BOTTOM - _TOP}"/>'
    )
    ends = []
    for number, (name, predictions) in enumerate(curves.items()):
        points = [f"{svg.number(x(p.replicas))} {svg.number(y(p.efficiency))}" for p in predictions]
        parts.append(svg.path(["M", "L".join(points)], f"c{number}"))
        last = predictions[-1].efficiency
        ends.append((y(last) + 4, f"{name} {last:.0%}", f"t{number}"))
    for at, label, kind in _apart(ends):
        parts.append(svg.text(_RIGHT + 8, at, label, kind))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img">\n'
        f"<title>{svg.escape(title)}</title>\n<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _decades(low: float, high: float) -> list[int]:
    """Powers of ten, or else of two, from 10^``low`` to 10^``high``."""
    for base in (10, 2):
        powers = [base**k for k in range(40) if low - 1e-9 <= math.log10(base**k) <= high + 1e-9]
        if len(powers) > 1:
            return powers
    return [round(10**low)]


def _apart(labels: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """``labels``, moved up so far that they are 16 pixels apart."""
    placed: list[tuple[float, str, str]] = []
    for at, label, kind in sorted(labels, reverse=True):  # from the foot upwards
        placed.append((min(at, placed[-1][0] - 16) if placed else at, label, kind))
    return placed
