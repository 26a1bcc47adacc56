"""The only place that writes SVG elements: coordinates, text that is escaped, ticks of an axis.

What is drawn comes from files and from users' names, so nothing here trusts it: text is escaped and
rid of what no page may contain, coordinates are finite and short.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable
from xml.sax.saxutils import escape as _escape

# Not allowed in XML, invisible, or turning the direction of the text around them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u200b-\u200f\u202a-\u202e\u2066-\u2069]"
)
_FAR = 1e5  # No picture is that large; browsers draw nonsense beyond 2**24.


def printable(text: object) -> str:
    """``text`` without what no page may contain and what would command a terminal."""
    return _UNPRINTABLE.sub("\ufffd", str(text))


def escape(text: object) -> str:
    """``text`` as it may stand between tags and in a quoted attribute of HTML, SVG and XML."""
    return _escape(printable(text), {'"': "&quot;", "'": "&#39;"})


def shorten(text: object, width: float, pixel: float = 12.0) -> str:
    """``text``, cut at the end with "…" where it would be wider than ``width`` pixels.

    The width is an estimate, from above: there is no font here to measure it with.
    """
    text = str(text)
    if text_width(text, pixel) <= width:
        return text
    while text and text_width(text + "…", pixel) > width:
        text = text[:-1]
    return text + "…"


def text_width(text: str, pixel: float = 12.0) -> float:
    """About how wide ``text`` is in a sans-serif font of ``pixel`` pixels."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return pixel * (0.58 * (len(text) - wide) + 1.05 * wide)


def number(value: float) -> str:
    """A coordinate: one decimal, finite, on the page."""
    if not math.isfinite(value):
        value = 0.0
    return f"{min(max(value, -_FAR), _FAR):.1f}".removesuffix(".0")


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """A line of text whose base line starts (or, by ``kind``, ends) at ``(x, y)``."""
    return f'<text{_class(kind)} x="{number(x)}" y="{number(y)}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    x1, y1, x2, y2 = map(number, (x1, y1, x2, y2))
    return f'<line{_class(kind)} x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle; ``title`` is what a browser shows where the pointer rests."""
    x, y, width, height = map(number, (x, y, max(width, 0.0), max(height, 0.0)))
    start = f'<rect{_class(kind)} x="{x}" y="{y}" width="{width}" height="{height}"'
    return f"{start}><title>{escape(title)}</title></rect>" if title else f"{start}/>"


def path(parts: Iterable[str], kind: str) -> str:
    """``parts`` are commands made of `number`, e.g. ``M3 4h5``."""
    return f'<path{_class(kind)} d="{"".join(parts)}"/>'


def ticks(limit: float, least: float = 0.0, about: int = 6) -> list[float]:
    """At most ``about`` multiples of 1, 2 or 5 times a power of ten in (0, ``limit``], and 0."""
    power = 10.0 ** math.floor(math.log10(limit / about))
    step = next(m for m in (1, 2, 5, 10) if about * m * power >= 0.999 * limit) * power
    step = max(least, step)
    return [i * step for i in range(math.floor(limit / step * (1 + 1e-9)) + 1)]


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
