"""Prints a plan on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ctl.base.units import size_text
from ctl.phases.plan.plan import Collective, Member, Plan, lines_of

_MOST_MEMBERS = 4  # shown for each pack; the rest is counted


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints the plan, its notes and lints, and its fingerprint; by default on standard output."""
    console = console or Console(highlight=False)
    workers = f" on {plan.workers} workers" if plan.workers > 1 else ""
    console.print(f"{escape(plan.strategy)}: {plan.replicas} replicas{workers}", style="bold")
    if plan.replicas == 1:
        console.print("One replica: nothing is reduced.")
    if plan.collectives:
        console.print(_table("gradients", plan.collectives))
    if plan.other:
        console.print(_table("everything else", plan.other))
    for fused in plan.xla or ():
        console.print(
            f"XLA: {escape(fused.name)}: {fused.payloads} all-reduces in one, "
            f"{size_text(fused.bytes)}"
        )
    for line in lines_of(plan.tables):
        console.print(escape(line), soft_wrap=True)
    for note in plan.notes:
        console.print(escape(note))
    for lint in plan.lints:
        console.print(f"[yellow]{escape(lint.name)}[/]: {escape(lint.reason)}")
        console.print(f"    try {escape(lint.remedy)}")
    if not plan.lints:
        console.print("no lints")
    console.print(f"fingerprint {plan.fingerprint}")


def _table(title: str, collectives: tuple[Collective, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("what", "operation", "type", "payload", "sent", "backward", "after"):
        numbers = name in ("payload", "sent", "backward")
        table.add_column(
            name,
            justify="right" if numbers else "left",
            no_wrap=numbers or name == "type",
            overflow="fold",
        )
    for c in collectives:
        table.add_row(
            escape(c.name if c.purpose == "gradients" else f"{c.purpose}: {_last(c.name)}"),
            escape(c.kind + (f" x{c.ops}" if c.ops > 1 else "") + (f" {c.hint}" if c.hint else "")),
            c.dtype,
            size_text(c.bytes),
            size_text(c.wire_bytes),
            _share(c),
            escape(", ".join(dict.fromkeys(map(_last, c.after)))),
            style="bold" if c.purpose == "gradients" else "",
        )
        for member in c.members[:_MOST_MEMBERS] if c.purpose == "gradients" else ():
            table.add_row(f"  {_member(member)}", "", "", size_text(member.bytes), "", "", "")
        if c.purpose == "gradients" and len(c.members) > _MOST_MEMBERS:
            table.add_row(f"  and {len(c.members) - _MOST_MEMBERS} more", *[""] * 6)
    return table


def _last(name: str) -> str:
    """The end of a scope, which tells the operations of a layer apart."""
    return "/".join(name.split("/")[-2:])


def _share(c: Collective) -> str:
    """The share of the backward pass that must be done first."""
    if c.start_share is None:
        return "" if c.in_loop else "once per call"
    if c.start_share == c.full_share:
        return f"{c.start_share:.0%}"
    return f"{c.start_share:.0%} to {c.full_share:.0%}"


def _member(member: Member) -> str:
    if member.variables:
        return escape(", ".join(member.variables))
    if member.shape == ():
        return "a number beside the gradients"
    shape = f" {list(member.shape)}" if member.shape else ""
    return escape(f"a tensor{shape}")
