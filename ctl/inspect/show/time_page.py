"""Makes the page of `ctl.inspect time`: where the time of a run went, over all its starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ctl.base import svg
from ctl.base.curves import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION
from ctl.base.svg import escape
from ctl.base.units import time_text
from ctl.inspect.show.document import HATCH, STYLE, document, stacked_tables
from ctl.inspect.show.pictures import NARROW, WIDE, Frame
from ctl.logs.ledger import NAMES, Span, Spent, Start, spans, spent

STARTS = 40  # the most rows of the table of starts: the last ones
_MARKS = 60  # the most starts that are marked in the picture

_FILLS = {
    "steps": BLUE,
    "exposed": GREEN,
    "input": PURPLE,
    "compile": ORANGE,
    "start": "#e3d83a",
    "evaluation": SKY_BLUE,
    "saving": "#8c6d46",
    "waiting": "url(#hatch)",
    "lost": VERMILION,
    "down": "var(--soft)",
    "other": "var(--rule)",
}

_MEANINGS = {
    "steps": "calls that run steps, without the wait for input: compute, and communication that it "
    "does not hide, which --inspect_every tells apart",
    "exposed": "the part of the steps in which a replica only communicates, waiting for others "
    "included: its share in the steps that were inspected, taken for all steps of a start",
    "input": "steps that wait for their batch",
    "compile": "the first call of each graph of the training, whose few steps do not count, and "
    "tracing the evaluation",
    "start": "from the start of the process to its first step",
    "evaluation": "evaluations, with the actions after them",
    "saving": "what the loop waits for checkpoints; they are written beside the training",
    "waiting": "meeting the other workers, at the start and between calls",
    "lost": "steps and their input that a later start did again",
    "down": "no start of the run accounts for it: it was not running, or its process was frozen",
    "other": "Python between two calls, such as actions and logs, and what follows the last",
}

_STYLE = STYLE + "\n".join(
    [
        *(
            f".a-{name} {{ fill: {fill}; shape-rendering: crispEdges }}"
            for name, fill in _FILLS.items()
        ),
        ".accounts { max-width: 560px } .accounts svg { width: 14px; height: 12px; "
        "margin-right: 8px; vertical-align: -1px }",
        "",
    ]
)


def make_page(name: str, workers: Mapping[int, Sequence[Start]]) -> str:
    """The page as HTML, which is also well-formed XML. ``name``: of the run; ``workers``: the
    starts of each, see `ctl.logs.ledger.read`."""
    starts = workers[0]
    total = spent(starts)
    body = [
        "<h1>Where the time went</h1>",
        f'<p class="lead">{escape(_subtitle(name, starts))}</p>',
        _figures(total),
        "<section><h2>From the first start to the last moment</h2>",
        f'<p class="lead">{escape(_note(starts))}</p>',
        *(
            f'<div class="on-{kind}">{_picture(starts, frame)}</div>'
            for kind, frame in (("wide", WIDE), ("narrow", NARROW))
        ),
        "</section>",
        f"<section><h2>In all</h2>{_accounts(total)}{_measured(total)}</section>",
    ]
    for title, (header, rows) in tables(workers).items():
        body.append(f"<section><h2>{escape(title)}</h2>{stacked_tables(header, rows)}</section>")
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_MEANINGS[key])}</dd>"
        for key, name in total.names().items()
    )
    return document(
        "Where the time went", _STYLE, [*body, f"<footer><dl>{terms}</dl></footer>"], HATCH
    )


def tables(
    workers: Mapping[int, Sequence[Start]],
) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Tables by their titles: the last starts of worker 0; and all workers, if there are several.
    The cells are not escaped."""
    starts = workers[0]
    names = spent(starts).names()
    of_start: list[Counter[str]] = [Counter() for _ in starts]
    for span in spans(starts):
        of_start[span.start].update(span.seconds)
    header = ["began", "workers", "steps", *names.values(), "end"]
    rows = [
        [
            _date(start.began),
            str(start.workers),
            _steps(start),
            *(time_text(seconds[key]) for key in names),
            start.end or ("killed" if start is not starts[-1] else "killed, or running"),
        ]
        for start, seconds in zip(starts, of_start, strict=True)
    ]
    title = "Starts" if len(rows) <= STARTS else f"The last {STARTS} of {len(rows)} starts"
    made = {title: (header, rows[-STARTS:])}
    if len(workers) > 1:
        of_worker = {worker: spent(of).seconds for worker, of in workers.items()}
        keys = [key for key in NAMES if any(abs(s[key]) >= 0.05 for s in of_worker.values())]
        cells = [[f"{w}", *(time_text(s[key]) for key in keys)] for w, s in of_worker.items()]
        made["Each worker"] = (["worker", *(NAMES[key] for key in keys)], cells)
    return made


def _subtitle(name: str, starts: Sequence[Start]) -> str:
    sizes = list(dict.fromkeys(start.workers for start in starts))
    words = [name, f"{len(starts):,} start{'' if len(starts) == 1 else 's'}"]
    words.append(f"{', '.join(map(str, sizes[:8]))} worker{'' if sizes == [1] else 's'}")
    return " · ".join([*words, f"from {_date(starts[0].began)} to {_date(starts[-1].ended)} UTC"])


def _figures(total: Spent) -> str:
    cards = [
        (f"{100 * total.goodput:.1f} %", "goodput: time in steps that count, over wall time"),
        (time_text(total.wall), "wall time"),
        (time_text(total.seconds["lost"]), "lost to failures: steps done again"),
        (time_text(total.seconds["down"]), "down"),
    ]
    items = (f"<li><b>{escape(a)}</b><span>{escape(b)}</span></li>" for a, b in cards)
    return f'<ul class="figures">{"".join(items)}</ul>'


def _note(starts: Sequence[Start]) -> str:
    note = "What each moment was spent for; from the bottom: the steps."
    if 1 < len(starts) <= _MARKS:
        note += " A line at the top marks a start."
    if any(start.leaves_a_pause for start in starts[:-1]):
        note += " Pauses after the end of a run, and after a start that was refused, are left out."
    return note


def _picture(starts: Sequence[Start], frame: Frame) -> str:
    """Columns of equal time, each divided by what the time was spent for."""
    parts_of_time = list(spans(starts))
    wall = max(sum(span.end - span.begin for span in parts_of_time), 1e-3)
    columns = _columns(parts_of_time, wall, frame.columns)
    left, right, top, bottom = 44.0, float(frame.right), 14.0, 194.0
    width = (right - left) / frame.columns
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(svg.line(left, y, right, y))
        parts.append(svg.text(left - 6, y + 4, f"{100 * share:.0f} %", "y"))
    for number, column in enumerate(columns):
        whole, height = sum(column.values()) or 1.0, bottom - top
        for key in reversed(NAMES):  # each down to the axis, so that no gap shows between two
            if column[key] > 0:
                x = left + width * number
                parts.append(svg.rect(x, bottom - height, width, height, f"a-{key}"))
                height -= (bottom - top) * column[key] / whole
    if 1 < len(starts) <= _MARKS:
        at = 0.0
        for span in parts_of_time:
            if span.begin == starts[span.start].began:
                x = left + (right - left) * at / wall
                parts.append(svg.line(x, top - 10, x, top - 2, "ready"))
            at += span.end - span.begin
    seconds, unit = (3600, "h") if wall > 7200 else (60, "min") if wall > 120 else (1, "s")
    for tick in svg.ticks(wall / seconds, about=frame.ticks):
        x = left + (right - left) * tick * seconds / wall
        parts.append(svg.text(min(x, right - 8), bottom + 17, f"{tick:g}", "x"))
    parts.append(svg.text((left + right) / 2, bottom + 35, f"since the first start, {unit}", "x"))
    title = "<title>What each moment of the run was spent for</title>"
    box = f'viewBox="0 0 {frame.width} {svg.number(bottom + 42)}"'
    return f'<svg {box} role="img">{title}{"".join(parts)}</svg>'


def _measured(total: Spent) -> str:
    if "exposed" not in total.names():
        return ""
    seconds = time_text(total.inspected)
    return f'<p class="lead">Exposed communication as in the {seconds} of inspected steps.</p>'


def _columns(parts: Iterable[Span], wall: float, count: int) -> list[dict[str, float]]:
    """Seconds by account in each of ``count`` parts of the time, without what is below 0."""
    columns: list[dict[str, float]] = [dict.fromkeys(NAMES, 0.0) for _ in range(count)]
    at = 0.0
    for span in parts:
        begin, at = at, at + span.end - span.begin
        first, last = begin / wall * count, at / wall * count
        for number in range(max(0, int(first)), min(count, int(last) + 1)):
            inside = min(last, number + 1) - max(first, number)
            for key, seconds in span.seconds.items():
                columns[number][key] += seconds * inside / max(last - first, 1e-12)
    return [{key: max(0.0, s) for key, s in column.items()} for column in columns]


def _accounts(total: Spent) -> str:
    rows = []
    for key, name in total.names().items():
        swatch = svg.rect(0, 0, 14, 12, f"a-{key}")
        share = 100 * total.seconds[key] / max(total.wall, 1e-9)
        rows.append(
            f'<tr><td><svg viewBox="0 0 14 12" aria-hidden="true">{swatch}</svg>{escape(name)}</td>'
            f"<td>{time_text(total.seconds[key])}</td><td>{share:.1f} %</td></tr>"
        )
    return (
        '<table class="accounts"><tr><th></th><th>time</th><th>share</th></tr>'
        f"{''.join(rows)}</table>"
    )


def _steps(start: Start) -> str:
    last = start.last
    return "" if last.step is None else f"{last.first:,} to {last.step:,}"


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"
