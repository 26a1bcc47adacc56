"""The page of `gpu.py`: one file that opens offline. All text on it is escaped."""

from __future__ import annotations

from typing import Any

from ctl.base.svg import escape
from ctl.inspect.show.document import STYLE, document


def make_page(about: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """The page as HTML: the verdicts, and below them what each line has printed.

    Args:
        about: ``devices`` and ``note``, for people; ``machine``, facts by name.
        rows: for each line, ``question``, ``ok`` (None: it was not run), ``found``, lines for
            people, and perhaps ``seconds``, ``command`` and ``output``.
    """
    title = f"ctl on {about['devices']}"
    failed = [name for name, row in rows.items() if row["ok"] is False]
    verdict = f"{len(failed)} of {len(rows)} lines failed: {', '.join(failed)}"
    facts = "  ".join(f"{key}={value}" for key, value in about["machine"].items())
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(facts)}</p>',
        f'<div class="verdict"><p>{escape(verdict if failed else "Every line ran.")}</p>'
        f"<p>{escape(about['note'])}</p></div>",
        '<div class="wide"><table class="plan"><tr><th>line</th><th>question</th><th>result</th>'
        '<th class="size">seconds</th></tr>',
    ]
    for name, row in rows.items():
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
        cells = f'<td><a href="#{name}">{name}</a></td><td>{escape(row["question"])}</td>'
        body.append(f'<tr>{cells}<td>{_word(row)}</td><td class="size">{seconds}</td></tr>')
    body.append("</table></div>")
    for name, row in rows.items():
        body.append(f'<section id="{name}"><h2>{escape(row["question"])}</h2>')
        if "command" in row:
            body.append(f'<p class="lead mono">python benchmarks/{escape(row["command"])}</p>')
        kind = ' class="alarm"' if row["ok"] is False else ""
        body += [f"<p{kind}>{escape(line)}</p>" for line in row["found"]]
        if row.get("output"):
            body.append(f'<div class="wide"><pre>{escape(row["output"])}</pre></div>')
        body.append("</section>")
    return document(escape(title), f"{STYLE}pre {{ font-size: 12px; margin: 0 }}", body)


def _word(row: dict[str, Any]) -> str:
    if row["ok"] is None:
        return "not run"
    return "passed" if row["ok"] else '<b class="alarm">failed</b>'
