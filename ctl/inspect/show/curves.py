"""Makes the page of `ctl.compare`: the table of runs, and a picture for each scalar."""

from __future__ import annotations

from collections.abc import Sequence

from ctl.base.svg import escape
from ctl.inspect.show.document import COLOURS, STYLE, document, html_table
from ctl.logs.curves import NOT_DRAWN, draw
from ctl.logs.runs import Run

_DASHES = ("none", "6 3", "2 3")
CURVES = len(COLOURS) * len(_DASHES)  # that can be told apart

_STYLE = (
    STYLE
    + ".curves { display: grid; gap: 20px; "
    + "grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }\n"
    + ".curves h2 { margin: 12px 0 4px } .curves svg { display: block; width: 100% }\n"
    + ".curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }\n"
    + ".train { opacity: 0.45 } .frame { fill: none }\n"
    + ".legend { list-style: none; padding: 0; overflow-wrap: anywhere }\n"
    + ".legend svg { width: 34px; height: 10px; vertical-align: middle; margin-right: 8px }\n"
    + "@media screen and (prefers-color-scheme: dark) {"
    + " .curve { filter: brightness(1.4) } .train { opacity: 0.65 } }\n"
    + "".join(
        f".c{n} {{ stroke: {COLOURS[n % len(COLOURS)]}; "
        f"stroke-dasharray: {_DASHES[n // len(COLOURS)]} }}\n"
        for n in range(CURVES)
    )
)


def make_page(
    runs: Sequence[Run], header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> str:
    """The page as HTML, with the first `CURVES` of ``runs``, the table of `ctl.compare.table`, and
    ``notes`` about what was left out."""
    drawn = runs[:CURVES]
    names: dict[str, None] = {}
    for run in drawn:
        for steps in run.records.values():
            names |= dict.fromkeys(name for values in steps.values() for name in values)
    pictures = [
        f"<section><h2>{escape(name)}</h2>{picture}</section>"
        for name in names
        if name not in NOT_DRAWN and (picture := draw(drawn, name))
    ]
    legend = "".join(
        f'<li><svg viewBox="0 0 34 10" aria-hidden="true"><path class="curve c{n}" d="M0 5h34"/>'
        f"</svg>{escape(run.name)}</li>"
        for n, run in enumerate(drawn)
    )
    left_out = [f"{len(runs) - CURVES} runs are not drawn"] if len(runs) > CURVES else []
    body = [
        f"<h1>{len(runs)} {'run' if len(runs) == 1 else 'runs'} compared</h1>",
        *(f'<p class="alarm">{escape(note)}</p>' for note in (*notes, *left_out)),
        html_table(header, rows),
        f'<ul class="legend">{legend}</ul>',
        '<p class="lead">Faint: training. Strong, with points: evaluation.</p>',
        f'<div class="curves">{"".join(pictures)}</div>',
    ]
    return document("Runs compared", _STYLE, body)
