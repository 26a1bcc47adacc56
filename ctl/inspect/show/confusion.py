"""Makes the page of `ctl.evaluate --report`: classes, confusion matrix, and the worst examples."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ctl.base import svg
from ctl.base.svg import escape
from ctl.inspect.mistakes import Report
from ctl.inspect.show.document import document
from ctl.inspect.show.style import STYLE

LARGEST = 100  # classes of a matrix that is drawn
_NUMBERED = 25  # classes of a matrix whose cells have numbers
_LEVELS = 7  # of the colours, see `ctl.inspect.show.style`

_STYLE = (
    STYLE
    + ".right { fill: none; stroke: var(--soft) }\n"
    + ".wide svg.matrix { max-width: 1040px; min-width: 0 }\n"
    + ".worst { display: grid; gap: 14px; padding: 0; list-style: none; "
    + "grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)) }\n"
    + ".worst li { padding: 8px; border: 1px solid var(--rule); border-radius: 6px; "
    + "font-size: 12px; line-height: 1.4; overflow-wrap: anywhere }\n"
    + ".worst img { display: block; width: 112px; max-width: 100%; margin-bottom: 6px; "
    + "image-rendering: pixelated }\n"
    + ".worst span { color: var(--soft) }\n"
    + "@media (max-width: 600px) { main { padding: 16px 14px 40px } }\n"
)


def make_page(report: Report, title: str, scores: Sequence[str]) -> str:
    """The page as HTML.

    Args:
        report: see `ctl.inspect.mistakes.collect`.
        title: what was evaluated.
        scores: ``accuracy 0.91`` and the like.
    """
    figures = "".join(f"<li>{escape(score)}</li>" for score in scores)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<ul class="figures">{figures}</ul>',
        f'<section><h2>Classes</h2><div class="wide"><table>{_classes(report)}</table></div>'
        "</section>",
    ]
    if len(report.classes) <= LARGEST:
        body.append(
            '<section><h2>Confusion matrix</h2><p class="lead">A row for each label, a column for '
            "each prediction. The colour is the share of the row; right ones have a frame.</p>"
            f'<div class="wide">{draw(report)}</div></section>'
        )
    body.append(
        '<section><h2>Worst examples</h2><p class="lead">Those with the highest loss, with their '
        f'place in the data. A wrong label is among them often.</p><ul class="worst">'
        f"{_worst(report)}</ul></section>"
    )
    return document(escape(title), _STYLE, body, images=True)


def _classes(report: Report) -> str:
    rows = [
        "<tr><th>class</th><th>examples</th><th>accuracy</th><th>most often taken for</th></tr>"
    ]
    for label, (name, accuracy) in enumerate(zip(report.classes, report.accuracies, strict=True)):
        other = report.confused(label)
        taken = ""
        if other is not None:
            taken = f"{report.classes[other]} ({report.confusion[label, other]})"
        shown = "" if accuracy is None else f"{accuracy:.4f}"
        cells = (name, int(report.confusion[label].sum()), shown, taken)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "".join(rows)


def draw(report: Report) -> str:
    """The confusion matrix as an SVG element."""
    count = len(report.classes)
    cell = 56.0 if count <= 12 else max(8.0, 900.0 / count)
    longest = max(svg.text_width(name) for name in report.classes)
    left = min(160.0, longest + 16)
    top, width = 26.0, left + cell * count + 8
    parts = []
    for label, name in enumerate(report.classes):
        y = top + label * cell
        if cell >= 12:
            shown = svg.shorten(name, left - 12)
            parts.append(svg.text(left - 8, y + cell / 2 + 4, shown, "y"))
            head = svg.shorten(name, cell - 4) if count <= 12 else str(label)
            parts.append(svg.text(left + (label + 0.5) * cell, top - 8, head, "x"))
        total = max(1, int(report.confusion[label].sum()))
        for predicted, value in enumerate(report.confusion[label].tolist()):
            x = left + predicted * cell
            # A few mistakes in a hundred have a colour already.
            level = min(_LEVELS - 1, round((_LEVELS - 1) * (value / total) ** 0.5))
            about = f"{name} taken for {report.classes[predicted]}: {value} of {total}"
            parts.append(svg.rect(x, y, cell - 1, cell - 1, f"h{level}", about))
            if value and count <= _NUMBERED:
                parts.append(svg.text(x + cell / 2, y + cell / 2 + 4, value, f"x n{level}"))
            if label == predicted:
                parts.append(svg.rect(x, y, cell - 1, cell - 1, "right"))
    box = f"0 0 {svg.number(width)} {svg.number(top + cell * count + 6)}"
    return (
        f'<svg class="matrix" viewBox="{box}" role="img"><title>Confusion matrix</title>'
        f"{''.join(parts)}</svg>"
    )


def _worst(report: Report) -> str:
    items = []
    for one in report.worst:
        picture = ""
        if one.png:
            data = base64.b64encode(one.png).decode()
            picture = f'<img src="data:image/png;base64,{data}" alt="example {one.number}"/>'
        items.append(
            f"<li>{picture}<b>{escape(report.classes[one.label])}</b><br/>taken for "
            f"{escape(report.classes[one.predicted])} ({100 * one.probability:.0f} %)<br/>"
            f"<span>loss {one.loss:.2f}, example {one.number}</span></li>"
        )
    return "".join(items)
