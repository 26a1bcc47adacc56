"""Makes the page of `ctl.compare`: the tables of runs, and a chart for each scalar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctl.base import curves
from ctl.base.curves import CURVES
from ctl.base.svg import escape
from ctl.inspect.show.document import STYLE, document, stacked_tables
from ctl.logs.runs import Run

# Not of the model: these are in the table, or the same for all.
_NOT_DRAWN = ("steps_per_second", "examples_per_second")

_STYLE = (
    STYLE
    + ".curves { display: grid; gap: 20px; "
    + "grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }\n"
    + ".curves h2 { margin: 12px 0 4px; overflow-wrap: anywhere }\n"
    + ".curves svg { display: block; width: 100%; max-width: 640px }\n"
    + ".legend { list-style: none; padding: 0; overflow-wrap: anywhere }\n"
    + ".legend svg { width: 34px; height: 10px; vertical-align: middle; margin-right: 8px }\n"
    + curves.STYLE
)


def make_page(
    runs: Sequence[Run],
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
    notes: Sequence[str],
) -> str:
    """The page as HTML: the ``tables`` of `ctl.compare.tables` by their titles, ``notes`` about
    what was left out, and curves of the first `CURVES` of ``runs``."""
    drawn = runs[:CURVES]
    names: dict[str, None] = {}
    for run in drawn:
        for steps in run.records.values():
            names |= dict.fromkeys(name for values in steps.values() for name in values)
    pictures = [
        f"<section><h2>{escape(name)}</h2>{picture}</section>"
        for name in names
        if name not in _NOT_DRAWN and (picture := draw(drawn, name))
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
    ]
    for title, (header, rows) in tables.items():
        body.append(f"<section><h2>{escape(title)}</h2>{stacked_tables(header, rows)}</section>")
    if pictures:
        body += [
            f'<ul class="legend">{legend}</ul>',
            '<p class="lead">Faint: training. Strong, with points: evaluation.</p>',
            f'<div class="curves">{"".join(pictures)}</div>',
        ]
    return document("Runs compared", _STYLE, body)


def draw(runs: Sequence[Run], name: str) -> str:
    """The chart of the scalar ``name`` of all ``runs``. Empty if none has it."""
    return curves.chart(name, [c for n, run in enumerate(runs) for c in run.curves(name, n)])
