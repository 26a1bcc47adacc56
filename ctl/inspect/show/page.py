"""Makes the HTML page of a `Timeline`.

The page is one file that opens offline. Pictures are inline SVG, there is no script, and the
content security policy allows only its own style. Text that comes from a file is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctl.base.svg import escape
from ctl.base.units import size_text
from ctl.inspect.measure.late_worker import late_worker
from ctl.inspect.measure.timeline import of_one_step
from ctl.inspect.measure.verdict import exposed_parts
from ctl.inspect.show import pictures
from ctl.inspect.show.document import HATCH, STYLE, document, html_table
from ctl.inspect.show.report import (
    duration,
    pack_table,
    percent,
    phase_table,
    row_names,
    scalars,
    significant,
    transferring,
)

if TYPE_CHECKING:
    from ctl.inspect.measure.link import Measured
    from ctl.inspect.measure.timeline import Timeline
    from ctl.phases.plan.plan import Collective, Member, Plan

COLLECTIVES = 64  # the most of a plan in the page
NAMES = 400  # the most variables in the page
_FRAMES = (pictures.WIDE, pictures.NARROW)

_DEFINITIONS = (
    ("input", "from the end of the step before until the replica has its part of the batch"),
    ("wait", "from when this replica could start a pack until the last one could"),
    ("transfer", "from then until the sums are here"),
    ("hidden, exposed", "communication while a replica still computed, and after that"),
    (
        "mean",
        "of the medians of the replicas; the verdict and the figures use it, too",
    ),
    (
        "late",
        "how much later than the median of the others a replica had its gradients ready; of all "
        "packs, the largest value, so a delay counts once",
    ),
    ("late p95, late worst", "the 95th percentile of late over the steps, and its largest value"),
    (
        "can start",
        "the share of the backward pass that a pack needs before it can start, from the graph",
    ),
    ("ready", "the share of the backward pass after which its gradients were ready, as measured"),
    ("algbw", "bytes of a pack divided by its time, 1 GB = 1e9 bytes (nccl-tests)"),
    ("busbw", "algbw · 2(n−1)/n with n replicas: comparable with the speed of a link"),
)


def make_page(
    timeline: Timeline,
    verdict: Sequence[str],
    *,
    plan: Plan | None = None,
    measured: Measured | None = None,
) -> str:
    """The page as HTML, which is also well-formed XML. ``plan`` adds what the step moves,
    ``measured`` a comparison with the all-reduce of this machine."""
    title = "The all-reduce, seen through"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">{escape(_subtitle(timeline))}</p>',
        '<div class="verdict">' + "".join(f"<p>{escape(v)}</p>" for v in verdict) + "</div>",
        _figures(timeline, measured),
        *_step_sections(timeline),
    ]
    if timeline.packs and len(timeline.rows) > 1:
        body += [_waits_section(timeline), _lateness_section(timeline)]
    for table in (phase_table(timeline), pack_table(timeline, plan, measured)):
        if table.rows:
            body.append(
                f"<section><h2>{escape(table.title[:1].upper() + table.title[1:])}</h2>"
                f"{html_table(table.columns, table.rows, table.strong)}</section>"
            )
    if plan and (plan.replicas > 1 or plan.collectives or plan.lints):
        body.append(_plan_section(plan))
    body.append(_footer(timeline))
    return document(title, STYLE, body, HATCH)


def _subtitle(timeline: Timeline) -> str:
    first, last = int(timeline.steps[0]), int(timeline.steps[-1])
    words = [_count(timeline.workers, "worker"), _count(len(timeline.rows), "replica")]
    words.append(f"{_count(len(timeline.steps), 'step')} ({first:,} to {last:,})")
    return " · ".join([*words, timeline.description] if timeline.description else words)


def _figures(timeline: Timeline, measured: Measured | None) -> str:
    step = of_one_step(timeline.step_seconds)
    values = scalars(timeline)
    exposed = values.get("allreduce/exposed_ms", np.nan) / 1e3
    hidden = of_one_step(timeline.hidden)
    cards = [(duration(step), "step")]
    if timeline.packs:
        share = percent(exposed / step if step > 0 else None)
        said = f"exposed communication, {share} of the step: {exposed_parts(timeline)}"
        cards.append((duration(exposed), said))
        cards.append((duration(hidden), "communication hidden behind compute"))
    if "allreduce/busbw" in values:
        said = "bus bandwidth of the all-reduces"
        if measured:
            alone = sum(measured.seconds(pack.bytes) for pack in timeline.packs)
            reached = alone / float(np.median(transferring(timeline)))
            said += f" ({percent(reached)} of what was measured)"
        cards.append((f"{significant(values['allreduce/busbw'])} GB/s", said))
    if timeline.packs and len(timeline.rows) > 1:
        late = values.get("allreduce/late_ms", np.nan) / 1e3
        named = late_worker(timeline)
        said = "waited for the last to come"
        if named:
            worker, replica = named.worker, named.replica
            row = timeline.rows.index((worker, replica))
            late = named.seconds
            said = f"waited for {row_names(timeline.rows)[row]}, {named.when}"
        cards.append((duration(late), said))
    items = (f"<li><b>{escape(a)}</b><span>{escape(b)}</span></li>" for a, b in cards)
    note = "Medians over the steps."
    if len(timeline.rows) > 1:
        note += " Step, exposed and hidden: the mean of the replicas, as in verdict and table."
    return f'<ul class="figures">{"".join(items)}</ul><p class="lead">{note}</p>'


def _step_sections(timeline: Timeline) -> list[str]:
    chosen = pictures.typical_and_worst(timeline)
    lengths = [pictures.length(timeline, index) for _, index in chosen]
    # One scale, unless the typical step would be too small on it.
    shared = max(lengths) if max(lengths) <= 2.5 * lengths[0] else None
    sections = []
    for (what, index), seconds in zip(chosen, lengths, strict=True):
        number = int(timeline.steps[index])
        name = f"The {what} step, number {number:,}: {duration(seconds)}"
        if len(timeline.rows) > 1:
            name += " from the first begin to the last end"
        drawn = [
            pictures.step_picture(timeline, index, name, shared or seconds, frame)
            for frame in _FRAMES
        ]
        note = _shown(drawn, timeline)
        if what == "worst" and not shared:
            note += " The scale is another one than above."
        sections.append(_section(name, note, drawn))
    return sections


def _waits_section(timeline: Timeline) -> str:
    drawn = [pictures.waits_picture(timeline, frame) for frame in _FRAMES]
    note = "What a replica spends in all-reduces, all packs together. " + _shown(drawn, timeline)
    return _section("Wait and transfer, step by step", note, drawn)


def _lateness_section(timeline: Timeline) -> str:
    drawn = [pictures.lateness_picture(timeline, frame) for frame in _FRAMES]
    note = "One replica in one colour: it makes the others wait. Scattered: noise. "
    return _section("Who comes late", note + _shown(drawn, timeline), drawn)


def _shown(drawn: Sequence[tuple[str, int]], timeline: Timeline) -> str:
    (_, shown), *_ = drawn
    rows = len(timeline.rows)
    return "" if shown == rows else f"{shown} of {rows} replicas are shown; trace.json has all."


def _section(title: str, note: str, drawn: Sequence[tuple[str, int]]) -> str:
    """A section with a picture for wide pages, and one for narrow ones."""
    note = f'<p class="lead">{escape(note.strip())}</p>' if note.strip() else ""
    (wide, _), (narrow, _) = drawn
    both = f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'
    return f"<section><h2>{escape(title)}</h2>{note}{both}</section>"


def _plan_section(plan: Plan) -> str:
    sizes = "".join(f'<th class="size">{what}</th>' for what in ("size", "sent", "can start"))
    everything = (*plan.collectives, *plan.other)
    parts = [
        "<section><h2>What the step moves</h2>",
        f'<p class="lead">{escape(plan.strategy)}, {_count(plan.replicas, "replica")}. '
        "Sent: by the replica that sends most.</p>",
        '<div class="wide"><table class="plan"><tr><th>pack</th><th>operation</th><th>type</th>',
        f"<th>shape</th>{sizes}<th>variables</th></tr>",
    ]
    left = NAMES
    for collective in everything[:COLLECTIVES]:
        cells, used = _collective(collective, left)
        left -= used
        parts.append(cells)
    parts.append("</table></div>")
    if len(everything) > COLLECTIVES:
        parts.append(f"<p>and {len(everything) - COLLECTIVES} more.</p>")
    for lint in plan.lints:
        parts.append(
            f'<p><b class="alarm">{escape(lint.name)}</b>: {escape(lint.reason)}. '
            f"Try: {escape(lint.remedy)}.</p>"
        )
    parts += [f'<p class="lead">{escape(note)}</p>' for note in plan.notes]
    return "".join([*parts, "</section>"])


def _collective(collective: Collective, left: int) -> tuple[str, int]:
    """A row of the plan, and the number of variables in it, at most ``left``."""
    starts = percent(collective.start_share)
    if collective.purpose != "gradients":
        starts = collective.purpose + ("" if collective.in_loop else ", once per call")
    elif collective.full_share not in (None, collective.start_share):
        starts += f"–{percent(collective.full_share)}"
    kind = collective.kind + (f" ({collective.hint})" if collective.hint else "")
    cells = [collective.name[:120], kind, collective.dtype, _shape(collective.shape)]
    sizes = [size_text(collective.bytes), size_text(collective.wire_bytes), starts]
    members = collective.members[:left]
    names = ", ".join(_member(member) for member in members)
    if len(members) < len(collective.members):
        names += f" and {len(collective.members) - len(members)} more"
    if len(members) > 8:
        names = f"<details><summary>{len(collective.members)} tensors</summary>{names}</details>"
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    row += "".join(f'<td class="size">{escape(size)}</td>' for size in sizes)
    return f'<tr>{row}<td class="names"><span class="mono">{names}</span></td></tr>', len(members)


def _member(member: Member) -> str:
    names = " = ".join(name[:120] for name in member.variables[:4]) or "(not a variable)"
    return escape(f"{names} {_shape(member.shape)}")


def _shape(shape: Sequence[int] | None) -> str:
    if shape is None:
        return "[?]"
    return "[" + ", ".join("?" if size < 0 else f"{size}" for size in shape[:8]) + "]"


def _footer(timeline: Timeline) -> str:
    terms = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in _DEFINITIONS)
    clocks = ""
    if timeline.workers > 1:
        error = escape(duration(timeline.clock_error))
        clocks = (
            f"<p>The clocks of two workers are aligned to ±{error}; what differs by less between "
            "workers is not known.</p>"
        )
    return f"<footer>{clocks}<dl>{terms}</dl></footer>"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
