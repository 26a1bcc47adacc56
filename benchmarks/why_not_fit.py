"""What does Keras `fit` do on several replicas, and is it still what README.md says?

    python benchmarks/why_not_fit.py
    python benchmarks/why_not_fit.py --claims=clipping,uneven --json=claims.json

Each claim is two small programs, one in Keras and one in ctl (`peers/claims.py`). Both train the
same weight, whose right value is known by hand. They run at the same time, each in its own process:
two replicas on logical CPUs, or two workers on loopback. A claim that no longer holds is marked and
must leave README.md; the exit code is still 0. The exit code is 1 when ctl does not do what
README.md says.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags
from processes import PEERS, Peer, check_names, machine, progress, tasks, write

from ctl.errors import CtlError
from ctl.flags.parsing import group, run_command
from ctl.launch import cluster

sys.path.append(str(PEERS))

from claims import CLAIMS, Claim  # noqa: E402

_SIDES = ("keras", "ctl")

with group("What is shown"):
    _CLAIMS = flags.DEFINE_list("claims", list(CLAIMS), "what Keras is said to do")
with group("How"):
    _PATIENCE = flags.DEFINE_float(
        "patience", 40.0, "seconds of silence after which a process counts as hung", lower_bound=0.0
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 180.0, "seconds for any other answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def ask(name: str, claim: Claim) -> dict[str, Any]:
    """Runs both sides of ``claim`` at the same time and returns a row of the table: ``claim``,
    ``versions``, what each side answered, and whether the claim is ``still_true``."""
    with contextlib.ExitStack() as stack:
        firsts = {}
        for side in _SIDES:
            peers = [stack.enter_context(peer) for peer in _start(name, side, claim)]
            firsts[side] = peers[0]
        versions = [first.answer(_TIMEOUT.value)["versions"] for first in firsts.values()][0]
        row = {"claim": claim.says, "versions": versions}
        for side in reversed(_SIDES):  # ctl first: Keras may be silent
            row[side] = _seen(firsts[side], claim.silent, may_be_silent=side == "keras")
    return row | {"still_true": row["keras"]["as_said"]}


def _start(name: str, side: str, claim: Claim) -> list[Peer]:
    command, title = ["claims.py", name, side], f"{name}, {side}"
    if claim.workers == 1:
        return [Peer(title, command)]
    started = tasks(cluster(claim.workers)["worker"])[: claim.started]
    return [Peer(title, command, task) for task in started]


def _seen(peer: Peer, silent: bool, may_be_silent: bool) -> dict[str, Any]:
    seconds = _PATIENCE.value if silent else _TIMEOUT.value
    try:
        return peer.answer(seconds)
    except CtlError as error:
        if not silent or "no answer" not in str(error):
            return {"seen": str(error), "as_said": False}
        return {"seen": f"nothing for {seconds:g} s, then killed", "as_said": may_be_silent}


def show(rows: dict[str, dict[str, Any]]) -> None:
    widths = (28, 34, 30, 5)
    lines: list[Sequence[str]] = [("README.md", "Keras", "ctl", "true?")]
    for row in rows.values():
        wrong = "" if row["ctl"]["as_said"] else "WRONG: "
        verdict = "yes" if row["still_true"] else "NO"
        ctl = wrong + row["ctl"]["seen"]
        lines.append((row["claim"].replace("`", ""), row["keras"]["seen"], ctl, verdict))
    for cells in lines:
        wrapped = [
            textwrap.wrap(textwrap.shorten(cell, 150, placeholder=" …"), width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        for number in range(max(map(len, wrapped))):
            parts = (cell[number] if number < len(cell) else "" for cell in wrapped)
            print("  ".join(p.ljust(w) for p, w in zip(parts, widths, strict=True)).rstrip())
        print()


def main() -> None:
    check_names("unknown claim", _CLAIMS.value, CLAIMS)
    load = os.getloadavg()[0]
    rows = {}
    for number, name in enumerate(_CLAIMS.value, 1):
        progress(f"{number}/{len(_CLAIMS.value)}: {name}")
        rows[name] = ask(name, CLAIMS[name])
    progress("")
    versions = next(iter(rows.values()))["versions"]
    print("  ".join(f"{name} {version}" for name, version in versions.items()), end="\n\n")
    show(rows)
    refuted = [name for name, row in rows.items() if not row["still_true"]]
    if refuted:
        print(f"NO LONGER TRUE, remove from README.md: {', '.join(refuted)}")
    write(_JSON.value, {"claims": rows, "machine": machine(load)})
    wrong = [name for name, row in rows.items() if not row["ctl"]["as_said"]]
    if wrong:
        raise CtlError(f"ctl does not do what README.md says: {', '.join(wrong)}")


if __name__ == "__main__":
    run_command(main, __doc__)
