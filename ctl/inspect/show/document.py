"""An HTML page of one file, which opens offline and can run no script, and its style sheet.

Pages are light, dark or paper. Lateness has one hue, which begins at the colour of the page. The
wait is hatched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence

from ctl.base.curves import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE
from ctl.base.svg import DARK_INK, DARK_PAGE, DARK_SOFT, FONT, LIGHT_INK, LIGHT_SOFT, escape

_BLACK, _WHITE = "#1b1b1b", "#ffffff"

# Fill of a phase and the text on it, the same on light and dark pages.
_PHASES = {
    "input": (PURPLE, _BLACK),
    "forward": (SKY_BLUE, _BLACK),
    "backward": (BLUE, _WHITE),
    "pack": (ORANGE, _BLACK),
    "wait": ("url(#hatch)", _BLACK),
    "transfer": (GREEN, _WHITE),
    "apply": ("#e3d83a", _BLACK),
    "other": ("#a9b1ba", _BLACK),
}
# Fill of a level of lateness and the number on it.
_STRONG = "#d95f0e"
_LIGHT = ("#f0f2f5", "#fde0c5", "#fcb782", "#f5893d", _STRONG, "#a33f05", "#642100")
_ON_LIGHT = (LIGHT_SOFT, "#3b2410", "#3b2410", "#2b1605", _WHITE, _WHITE, _WHITE)
_DARK = ("#1c2229", "#3f2714", "#6b3a12", "#9f5313", "#d9741f", "#f7a35c", "#ffdcb8")
_ON_DARK = (DARK_SOFT, "#e6d3c1", _WHITE, _WHITE, _BLACK, _BLACK, _BLACK)

_LIGHT_COLOURS = (
    f"--page: #fff; --card: #f6f8fa; --ink: {LIGHT_INK}; --soft: {LIGHT_SOFT}; --rule: #d1d9e0; "
    "--grid: #e6eaee; --alarm: #b42318"
)
_DARK_COLOURS = (
    f"--page: {DARK_PAGE}; --card: #151b23; --ink: {DARK_INK}; --soft: #9aa4af; --rule: #3d444d; "
    "--grid: #232a33; --alarm: #ff8a72"
)


def _levels(fills: tuple[str, ...], inks: tuple[str, ...]) -> str:
    pairs = enumerate(zip(fills, inks, strict=True))
    rules = (
        f".h{i} {{ fill: {a} }} .s{i} {{ stroke: {a} }} .n{i} {{ fill: {b} }}"
        for i, (a, b) in pairs
    )
    return " ".join(rules)


def _phases() -> str:
    pairs = _PHASES.items()
    return " ".join(f".p-{k} {{ fill: {a} }} .t-{k} {{ fill: {b} }}" for k, (a, b) in pairs)


STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT_COLOURS} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 {FONT} }}
main {{ max-width: 1104px; margin: 0 auto; padding: 28px 32px 56px }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px }}
h2 {{ font-size: 18px; margin: 40px 0 4px }}
p {{ margin: 4px 0 10px }}
.lead, footer {{ color: var(--soft) }}
.alarm {{ color: var(--alarm) }}
.verdict {{ margin: 18px 0; padding: 14px 18px; background: var(--card);
  border: 1px solid var(--rule); border-left: 5px solid {_STRONG}; border-radius: 6px }}
.verdict p {{ margin: 0 0 4px }} .verdict p:first-child {{ font-size: 17px; font-weight: 600 }}
.figures {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0 12px; padding: 0;
  list-style: none }}
.figures li {{ flex: 1 1 150px; padding: 10px 14px; border: 1px solid var(--rule);
  border-radius: 6px }}
.figures b {{ display: block; font-size: 21px; line-height: 1.3;
  font-variant-numeric: tabular-nums }}
.figures span {{ color: var(--soft); font-size: 13px }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums }}
th, td {{ padding: 4px 8px; border-bottom: 1px solid var(--grid); text-align: right;
  vertical-align: top }}
th {{ color: var(--soft); font-weight: 600; border-bottom-color: var(--rule);
  white-space: nowrap }}
th:first-child, td:first-child, .plan th, .plan td {{ text-align: left }}
td:first-child {{ white-space: nowrap }}
.plan td.size, .plan th.size {{ text-align: right }}
td.names {{ overflow-wrap: anywhere; min-width: 240px }}
tr.strong td {{ font-weight: 600 }}
.mono {{ font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace;
  overflow-wrap: anywhere }}
.defs {{ position: absolute }}
.wide svg, .on-wide svg, .on-narrow svg {{ display: block; width: 100%; height: auto }}
.wide svg {{ min-width: 760px }} .on-narrow {{ display: none; max-width: 560px }}
@media screen and (max-width: 820px) {{
  .on-wide {{ display: none }} .on-narrow {{ display: block }}
}}
text {{ font: 12px {FONT}; fill: var(--soft);
  font-variant-numeric: tabular-nums }}
text.strong {{ font-size: 13px; font-weight: 600; fill: var(--ink) }}
text.small, text.note {{ font-size: 11px }} text.note {{ fill: var(--ink) }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
.grid {{ stroke: var(--grid) }} .frame {{ stroke: var(--soft) }}
.ready {{ stroke: var(--ink); stroke-width: 1.5 }} .exposed {{ fill: var(--ink) }}
.level {{ fill: none; stroke: var(--ink); stroke-width: 2 }}
#hatch rect {{ fill: #f0a37a }} #hatch path {{ stroke: #b8450b; stroke-width: 1.2 }}
text.t-wait {{ stroke: #f7c9b0; stroke-width: 4px; stroke-linejoin: round; paint-order: stroke }}
.s-wait {{ stroke: url(#hatch) }} .s-transfer {{ stroke: {GREEN} }}
.swatch {{ stroke: var(--rule) }}
{_phases()}
{_levels(_LIGHT, _ON_LIGHT)}
.stacked th, .stacked td {{ white-space: normal; overflow-wrap: anywhere }}
.stacked {{ margin-bottom: 14px }}
@media (max-width: 600px) {{
  main {{ padding: 16px 14px 40px }}
  .stacked, .stacked tbody, .stacked tr, .stacked td {{ display: block }}
  .stacked tr:first-child {{ display: none }}
  .stacked td {{ padding: 2px 0; text-align: left; border: 0 }}
  .stacked td:first-child {{ font-weight: 600; white-space: normal }}
  .stacked td:not(:first-child)::before {{ content: attr(data-name) ": "; color: var(--soft) }}
  .stacked tr {{ padding: 6px 0; border-bottom: 1px solid var(--grid) }}
}}
summary {{ cursor: pointer; color: var(--soft) }}
footer {{ margin-top: 44px; padding-top: 12px; border-top: 1px solid var(--rule); font-size: 13px }}
dt {{ font-weight: 600; color: var(--ink) }} dd {{ margin: 0 0 6px }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {_DARK_COLOURS} }}
  {_levels(_DARK, _ON_DARK)}
}}
@media print {{
  body {{ font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact }}
  main {{ max-width: none; padding: 0 }} table {{ font-size: 9px }} th, td {{ padding: 2px 4px }}
  .wide svg {{ min-width: 0 }}
  details::details-content {{ content-visibility: visible; height: auto }}
  section, tr, svg {{ break-inside: avoid }} h2 {{ break-after: avoid }}
}}
"""

# The pattern of the wait: an element before the body of a page.
HATCH = (
    '<svg width="0" height="0" aria-hidden="true" class="defs"><defs><pattern id="hatch" '
    'width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6"/>'
    '<path d="M0 6L6 0M-1 1L1 -1M5 7L7 5"/>'
    "</pattern></defs></svg>"
)


def document(
    title: str, style: str, body: Sequence[str], before: str = "", images: bool = False
) -> str:
    """A page as HTML, which is also well-formed XML.

    Args:
        title: of the page, escaped.
        style: the style sheet. The content security policy of the page allows it and nothing else.
        body: elements, whose text is escaped.
        before: an element before them.
        images: whether there are images, as data in the page.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:" if images else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{before}<main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], strong: Collection[int] = ()
) -> str:
    """A table of texts as HTML. ``strong``: the indices of rows to highlight."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for number, row in enumerate(rows):
        kind = ' class="strong"' if number in strong else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


TABLE_COLUMNS = 7  # the most of a table that must fit a page of 1280 pixels


def stacked_tables(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Tables of texts as HTML that fit the page at any width. Of more than `TABLE_COLUMNS`, the
    others follow in further tables, each with the first column. On a narrow screen, each row is a
    list of names and values."""
    return "".join(
        _stacked([0, *range(first, min(first + TABLE_COLUMNS, len(columns)))], columns, rows)
        for first in range(1, max(2, len(columns)), TABLE_COLUMNS)
    )


def _stacked(
    chosen: Sequence[int], columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> str:
    head = "".join(f"<th>{escape(columns[n])}</th>" for n in chosen)
    lines = []
    for row in rows:
        cells = (f'<td data-name="{escape(columns[n])}">{escape(row[n])}</td>' for n in chosen)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="stacked"><tr>{head}</tr>{"".join(lines)}</table>'
