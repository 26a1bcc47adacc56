"""The only place that knows the colours of the page, for light, dark and paper.

Phases have the colours of Okabe and Ito (2008), told apart with any colour vision; the wait is
hatched as well. Lateness has one hue, from the colour of the page to the far end.
"""

from __future__ import annotations

# Fill of a phase and the text on it, the same on light and dark pages.
_PHASES = {
    "input": ("#cc79a7", "#1b1b1b"),
    "forward": ("#56b4e9", "#1b1b1b"),
    "backward": ("#0072b2", "#ffffff"),
    "pack": ("#e69f00", "#1b1b1b"),
    "wait": ("url(#hatch)", "#1b1b1b"),
    "transfer": ("#009e73", "#ffffff"),
    "apply": ("#e3d83a", "#1b1b1b"),
    "other": ("#a9b1ba", "#1b1b1b"),
}
# Fill of a level of lateness and the number on it.
_LIGHT = ("#f0f2f5", "#fde0c5", "#fcb782", "#f5893d", "#d95f0e", "#a33f05", "#642100")
_LIGHT_INK = ("#59636e", "#3b2410", "#3b2410", "#2b1605", "#ffffff", "#ffffff", "#ffffff")
_DARK = ("#1c2229", "#3f2714", "#6b3a12", "#9f5313", "#d9741f", "#f7a35c", "#ffdcb8")
_DARK_INK = ("#9198a1", "#e6d3c1", "#ffffff", "#ffffff", "#1b1b1b", "#1b1b1b", "#1b1b1b")

_LIGHT_INKS = (
    "--page: #fff; --card: #f6f8fa; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; "
    "--grid: #e6eaee; --alarm: #b42318"
)
_DARK_INKS = (
    "--page: #0d1117; --card: #151b23; --ink: #f0f6fc; --soft: #9aa4af; --rule: #3d444d; "
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
:root {{ color-scheme: light dark; {_LIGHT_INKS} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif }}
main {{ max-width: 1104px; margin: 0 auto; padding: 28px 32px 56px }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px }}
h2 {{ font-size: 18px; margin: 40px 0 4px }}
p {{ margin: 4px 0 10px }}
.lead, footer {{ color: var(--soft) }}
.alarm {{ color: var(--alarm) }}
.verdict {{ margin: 18px 0; padding: 14px 18px; background: var(--card);
  border: 1px solid var(--rule); border-left: 5px solid #d95f0e; border-radius: 6px }}
.verdict p {{ margin: 0 0 4px }} .verdict p:first-child {{ font-size: 17px; font-weight: 600 }}
.figures {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 0; padding: 0; list-style: none }}
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
.plan td.size, .plan th.size {{ text-align: right }} td.names {{ overflow-wrap: anywhere }}
tr.strong td {{ font-weight: 600 }}
.mono {{ font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace;
  overflow-wrap: anywhere }}
.defs {{ position: absolute }}
.wide svg {{ display: block; width: 100%; min-width: 760px; height: auto }}
text {{ font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums }}
text.strong {{ font-size: 13px; font-weight: 600; fill: var(--ink) }}
text.small, text.note {{ font-size: 11px }} text.note {{ fill: var(--ink) }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
.grid {{ stroke: var(--grid) }} .frame {{ stroke: var(--soft) }}
.ready {{ stroke: var(--ink); stroke-width: 1.5 }} .exposed {{ fill: var(--ink) }}
.level {{ fill: none; stroke: var(--ink); stroke-width: 2 }}
#hatch rect {{ fill: #f0a37a }} #hatch path {{ stroke: #b8450b; stroke-width: 1.2 }}
text.t-wait {{ stroke: #f7c9b0; stroke-width: 4px; stroke-linejoin: round; paint-order: stroke }}
.s-wait {{ stroke: url(#hatch) }} .s-transfer {{ stroke: #009e73 }}
.swatch {{ stroke: var(--rule) }}
{_phases()}
{_levels(_LIGHT, _LIGHT_INK)}
summary {{ cursor: pointer; color: var(--soft) }}
footer {{ margin-top: 44px; padding-top: 12px; border-top: 1px solid var(--rule); font-size: 13px }}
dt {{ font-weight: 600; color: var(--ink) }} dd {{ margin: 0 0 6px }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {_DARK_INKS} }}
  {_levels(_DARK, _DARK_INK)}
}}
@media print {{
  body {{ font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact }}
  main {{ max-width: none; padding: 0 }} table {{ font-size: 9px }} th, td {{ padding: 2px 4px }}
  .wide svg {{ min-width: 0 }}
  details::details-content {{ content-visibility: visible; height: auto }}
  section, tr, svg {{ break-inside: avoid }} h2 {{ break-after: avoid }}
}}
"""
