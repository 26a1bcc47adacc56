"""Draws efficiency against replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ctl.base import svg
from ctl.base.curves import BLUE, GREEN, SKY_BLUE, VERMILION
from ctl.inspect.predict.model import Prediction

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 590, 92, 336  # the labels of the curves are right of the frame

_CURVE = "fill: none; stroke-width: 2; stroke-linejoin: round; stroke: "
_LIGHT = {  # dashes tell the curves apart on paper
    ".c0": _CURVE + BLUE,
    ".c1": f"{_CURVE}{VERMILION}; stroke-dasharray: 7 4",
    ".c2": f"{_CURVE}{GREEN}; stroke-dasharray: 2 3",
    "text.t0": f"fill: {BLUE}",
    "text.t1": "fill: #b04c00",
    "text.t2": "fill: #00795a",
}
_DARK_COLOURS = (SKY_BLUE, "#f0883e", "#3fb98f")
_DARK = {f".c{n}": f"stroke: {colour}" for n, colour in enumerate(_DARK_COLOURS)}
_DARK |= {f"text.t{n}": f"fill: {colour}" for n, colour in enumerate(_DARK_COLOURS)}


def draw(curves: Mapping[str, Sequence[Prediction]], title: str, notes: Sequence[str]) -> str:
    """An SVG document with a curve for each algorithm, 3 at most; ``notes`` are two lines below the
    title."""
    counts = [p.replicas for predictions in curves.values() for p in predictions]
    low, high = math.log10(min(counts)), math.log10(max(counts))

    def x(replicas: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(replicas) - low) / ((high - low) or 1.0)

    def y(efficiency: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(max(efficiency, 0.0), 1.0)

    parts = [svg.text(_LEFT, 30, svg.shorten(title, _WIDTH - _LEFT, 16), "title")]
    for number, note in enumerate(notes):
        parts.append(svg.text(_LEFT, 51 + 18 * number, svg.shorten(note, _WIDTH - _LEFT - 8)))
    for percent in range(0, 101, 20):
        parts.append(svg.line(_LEFT, y(percent / 100), _RIGHT, y(percent / 100)))
        parts.append(svg.text(_LEFT - 8, y(percent / 100) + 4, f"{percent} %", "y"))
    for replicas in _decades(low, high):
        parts.append(svg.line(x(replicas), _TOP, x(replicas), _BOTTOM))
        parts.append(svg.text(x(replicas), _BOTTOM + 18, f"{replicas:,}", "x"))
    parts.append(svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "replicas", "x"))
    parts.append(svg.rect(_LEFT, _TOP, _RIGHT - _LEFT, _BOTTOM - _TOP, "frame"))
    ends = []
    for number, (name, predictions) in enumerate(curves.items()):
        points = [f"{svg.number(x(p.replicas))} {svg.number(y(p.efficiency))}" for p in predictions]
        parts.append(svg.path(["M", "L".join(points)], f"c{number}"))
        last = predictions[-1].efficiency
        ends.append((y(last) + 4, f"{name} {last:.0%}", f"t{number}"))
    for at, label, kind in _apart(ends):
        parts.append(svg.text(_RIGHT + 8, at, label, kind))
    return svg.document("ctl-efficiency", _WIDTH, _HEIGHT, parts, _LIGHT, _DARK, title)


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
