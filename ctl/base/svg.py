"""Writes SVG: coordinates, escaped text, ticks of an axis, and whole pictures.

The content comes from files and from names that users choose, so it is not trusted: text is
escaped and its unprintable characters are replaced; coordinates are finite and short.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape as _escape

# Not allowed in XML, invisible, or changing the direction of text.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
)
_FAR = 1e5  # Larger than any picture; browsers fail beyond 2**24.

FONT = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif'
DARK_PAGE = "#0d1117"
LIGHT_INK, LIGHT_SOFT = "#1f2328", "#59636e"
DARK_INK, DARK_SOFT = "#f0f6fc", "#9198a1"

# Of a `document`; a page has rules of its own.
_LIGHT_RULES = {
    ".page": "fill: #ffffff",
    ".frame": "fill: none; stroke: #818b98",
    ".grid": "stroke: #e4e8ec",
    "text": f"font-family: {FONT}; font-size: 12px; fill: {LIGHT_SOFT}",
    "text.title": f"font-size: 16px; font-weight: 600; fill: {LIGHT_INK}",
    ".x": "text-anchor: middle",
    ".y": "text-anchor: end",
}
_DARK_RULES = {
    ".page": f"fill: {DARK_PAGE}",
    ".frame": "stroke: #656c76",
    ".grid": "stroke: #262c34",
    "text": f"fill: {DARK_SOFT}",
    "text.title": f"fill: {DARK_INK}",
}


def printable(text: object) -> str:
    """``text`` with U+FFFD in place of characters that are invalid in XML or control a terminal."""
    return _UNPRINTABLE.sub("\ufffd", str(text))


def escape(text: object) -> str:
    """`printable` text, escaped for content and quoted attributes of HTML, SVG and XML."""
    return _escape(printable(text), {'"': "&quot;", "'": "&#39;"})


def shorten(text: object, width: float, pixel: float = 12.0) -> str:
    """Cuts ``text`` and ends it with "…" if it is wider than ``width`` pixels, see `text_width`."""
    text = str(text)
    if text_width(text, pixel) <= width:
        return text
    while text and text_width(text + "…", pixel) > width:
        text = text[:-1]
    return text + "…"


def text_width(text: str, pixel: float = 12.0) -> float:
    """Estimates the width of ``text`` in pixels, rather too wide, in a sans-serif font of
    ``pixel`` pixels."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return pixel * (0.58 * (len(text) - wide) + 1.05 * wide)


def number(value: float) -> str:
    """Formats a coordinate with one decimal, limited to ±1e5; 0 if it is not finite."""
    if not math.isfinite(value):
        value = 0.0
    return f"{min(max(value, -_FAR), _FAR):.1f}".removesuffix(".0")


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """A ``<text>`` element at ``(x, y)``, the start of its base line.

    ``kind`` is its class, which may move the anchor to the middle or the end.
    """
    return f'<text{_class(kind)} x="{number(x)}" y="{number(y)}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """A ``<line>`` element of class ``kind``."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f"<line{_class(kind)} {ends}/>"


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A ``<rect>`` element of class ``kind``; browsers show ``title`` as a tooltip."""
    place = f'x="{number(x)}" y="{number(y)}"'
    size = f'width="{number(max(width, 0.0))}" height="{number(max(height, 0.0))}"'
    start = f"<rect{_class(kind)} {place} {size}"
    return f"{start}><title>{escape(title)}</title></rect>" if title else f"{start}/>"


def path(parts: Iterable[str], kind: str) -> str:
    """A ``<path>`` element; ``parts`` are commands such as ``M3 4h5``, not escaped."""
    return f'<path{_class(kind)} d="{"".join(parts)}"/>'


def ticks(limit: float, least: float = 0.0, about: int = 6) -> list[float]:
    """0 and at most ``about`` ticks in (0, ``limit``], where ``limit`` is above 0.

    Their distance is 1, 2 or 5 times a power of ten, or ``least`` if that is more.
    """
    power = 10.0 ** math.floor(math.log10(limit / about))
    step = next(m for m in (1, 2, 5, 10) if about * m * power >= 0.999 * limit) * power
    step = max(least, step)
    return [i * step for i in range(math.floor(limit / step * (1 + 1e-9)) + 1)]


def style(light: Mapping[str, str], dark: Mapping[str, str], scope: str = "") -> str:
    """A style sheet: rules by selector, and those that replace them on a dark screen."""
    rules, dark_rules = (
        "\n".join(f"{scope}{selector} {{ {rule} }}" for selector, rule in of.items())
        for of in (light, dark)
    )
    return f"{rules}\n@media screen and (prefers-color-scheme: dark) {{\n{dark_rules}\n}}\n"


def document(
    kind: str,
    width: float,
    height: float,
    parts: Sequence[str],
    light: Mapping[str, str],
    dark: Mapping[str, str],
    title: str = "",
) -> str:
    """An SVG document of its own, for light and dark pages, with a background.

    Elements have the light rules as attributes: some programs read no selectors of descendants,
    which a part of a page needs, and make a height of "auto" 0, outside of a screen.

    Args:
        kind: its class, for which alone its style holds: in a notebook, it is a part of a page.
        width, height: pixels.
        parts: elements, with the classes ``frame``, ``grid``, ``title``, and for the anchor of a
            text ``x`` (middle) and ``y`` (end).
        light, dark: rules for other classes, see `style`.
        title: describes it for screen readers.
    """
    fits = f"@media screen {{\nsvg.{kind} {{ max-width: 100%; height: auto }}\n}}\n"
    rules = fits + style({}, _DARK_RULES | dict(dark), f"svg.{kind} ").lstrip()
    size = f'width="{number(width)}" height="{number(height)}"'
    label = f"<title>{escape(title)}</title>\n" if title else ""
    drawn = "\n".join([f'<rect class="page" {size}/>', *parts])
    body = _with_attributes(drawn, _LIGHT_RULES | dict(light))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" '
        f'viewBox="0 0 {number(width)} {number(height)}" {size} '
        f'role="img">\n{label}'
        f"<style>\n{rules}</style>\n{body}\n</svg>\n"
    )


def _with_attributes(elements: str, rules: Mapping[str, str]) -> str:
    """``elements`` with what the ``rules`` say of each, later ones first. Selectors are a tag, a
    class, or both."""

    def attributes(found: re.Match[str]) -> str:
        tag, kinds = found[1], (found[2] or "").split()
        declared: dict[str, str] = {}
        for selector, rule in rules.items():
            name, _, kind = selector.partition(".")
            if name in ("", tag) and (not kind or kind in kinds):
                declared |= dict(each.split(": ", 1) for each in rule.split("; "))
        added = (f' {name}="{escape(value)}"' for name, value in declared.items())
        return found[0] + "".join(added)

    return re.sub(r'<(text|line|rect|path)\b(?: class="([^"]*)")?', attributes, elements)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
