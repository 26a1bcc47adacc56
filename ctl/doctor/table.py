"""The table of what was found: a line for each check, and below it what to do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ctl.doctor.report import FINE, NOT_FINE, SKIPPED, Finding


class Row(NamedTuple):
    """A finding, and the workers that have made it; none if it is of the whole job."""

    finding: Finding
    workers: tuple[int, ...]


def merged(findings: Mapping[int, Sequence[Finding]]) -> list[Row]:
    """The findings of several workers about their own machines: equal ones in one row."""
    places: dict[Finding, list[int]] = {}
    order: dict[str, None] = {}
    for worker, of_worker in sorted(findings.items()):
        for finding in of_worker:
            order[finding.check] = None
            places.setdefault(finding, []).append(worker)
    rows = [Row(finding, tuple(workers)) for finding, workers in places.items()]
    return sorted(rows, key=lambda row: [*order].index(row.finding.check))


def printed(rows: Sequence[Row], workers: int, columns: int) -> str:
    """The table for ``workers`` in lines of at most so many ``columns``, commands aside."""
    names = max(len(row.finding.check) for row in rows)
    states = max(map(len, (FINE, NOT_FINE, SKIPPED)))
    lines = []
    for finding, who in rows:
        head = f"{finding.check:<{names}}  {_shown(finding.state):<{states}}  "
        seen = finding.seen
        if who and workers > 1 and len(who) < workers:
            seen = f"worker{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {seen}"
        lines += _wrapped(seen, columns, head, " " * len(head))
        if finding.remedy:
            indent = " " * (names + 2)
            lines += _wrapped(finding.remedy, columns, indent, indent)
        if finding.command:
            lines.append(f"    {finding.command}")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """How many rows are fine, not fine and skipped."""
    counts = Counter(row.finding.state for row in rows)
    states = FINE, NOT_FINE, SKIPPED
    return ", ".join(f"{counts[state]} {state}" for state in states if counts[state])


def _shown(state: str) -> str:
    return state.upper() if state == NOT_FINE else state


def _wrapped(text: str, columns: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(rows: Sequence[Row], workers: int) -> dict[str, Any]:
    """What ``--json`` prints; README.md describes it."""
    return {
        "schema": 1,
        "fine": is_fine(rows),
        "workers": workers,
        "checks": [{**vars(finding), "workers": list(who)} for finding, who in rows],
    }


def is_fine(rows: Sequence[Row]) -> bool:
    """Whether no row is `NOT_FINE`."""
    return all(row.finding.state != NOT_FINE for row in rows)
