"""How does the cost of training grow with the number of variables, and does memory grow?

    python benchmarks/model_size.py --variables=10,100,1000,2000
    python benchmarks/model_size.py --replicas=2 --long_steps=10000
    python benchmarks/model_size.py --plain

The same matrix is cut into more and more variables and trained, each time in a new process.
README.md says how the numbers are derived.
"""

from __future__ import annotations

import math
import os
import statistics
from typing import Any

from absl import flags
from processes import Peer, machine, progress, write

from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command

with group("What is trained"):
    _VARIABLES = flags.DEFINE_list(
        "variables", "10,30,100,300,1000,2000", "numbers of variables, of the same bytes in all"
    )
    _ROWS = flags.DEFINE_integer("rows", 1000, "of the matrix, and columns", lower_bound=1)
    _BATCH = flags.DEFINE_integer("batch", 8, "examples of a replica", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer("replicas", 1, "replicas of one process", lower_bound=1)
    _JIT = flags.DEFINE_boolean("jit_compile", False, "compile the step with XLA")
    _PLAIN = flags.DEFINE_boolean("plain", False, "a plain loop of one replica, without ctl")
with group("How"):
    _BLOCKS = flags.DEFINE_integer("blocks", 5, "blocks of each network", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 20, "of a block", lower_bound=1)
    _LONG = flags.DEFINE_integer(
        "long_steps", 10_000, "of the smallest network, to see whether memory grows", lower_bound=1
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 1200.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def _check_variables(variables: list[str]) -> None:
    if not all(v.isdecimal() and int(v) >= 1 for v in variables):
        raise UsageError(f"--variables={','.join(variables)}: must be whole numbers of 1 or more")


check_flags(["variables"], _check_variables)


def _check_plain(plain: bool, replicas: int, jit_compile: bool) -> None:
    if plain and (replicas > 1 or jit_compile):
        raise UsageError("--plain needs one replica and no --jit_compile")


check_flags(["plain", "replicas", "jit_compile"], _check_plain)


def train(peer: Peer, what: str, steps: int) -> dict[str, Any]:
    """Trains ``steps`` steps of ``what``, "step" or "own"; see `peers/variables_worker.py`."""
    return peer.ask(_TIMEOUT.value, what=what, steps=steps)


def measure(variables: int, long_steps: int) -> dict[str, Any]:
    """A row of the table for ``variables`` variables. If ``long_steps`` is not 0, it has
    ``grown_bytes``: how much the resident memory grew over so many more steps."""
    command = ["variables_worker.py", f"--variables={variables}", f"--rows={_ROWS.value}"]
    command += [f"--batch={_BATCH.value}", f"--replicas={_REPLICAS.value}"]
    command += [f"--{f.name}" for f in (_JIT, _PLAIN) if f.value]
    with Peer(f"{variables} variables", command) as peer:
        progress(f"{peer.name}: starting")
        about = peer.answer(_TIMEOUT.value)
        first = train(peer, "step", 1)
        seconds: dict[str, list[float]] = {"step": [], "own": []}
        for what in seconds:
            train(peer, what, _STEPS.value)
        progress(f"{peer.name}: training")
        for _ in range(_BLOCKS.value):
            for what, of in seconds.items():
                block = train(peer, what, _STEPS.value)
                of.append(block["seconds"] / _STEPS.value)
        beyond = [step - own for step, own in zip(*seconds.values(), strict=True)]
        row = {
            "variables": variables,
            "gradient_bytes": about["gradient_bytes"],
            "first_seconds": first["seconds"],
            "step_seconds": statistics.median(seconds["step"]),
            "own_seconds": statistics.median(seconds["own"]),
            "beyond_seconds": statistics.median(beyond),
            "peak_bytes": block["peak_bytes"],
        }
        if long_steps:
            progress(f"{peer.name}: {long_steps} steps")
            before = train(peer, "step", 100)["resident_bytes"]
            after = train(peer, "step", long_steps)["resident_bytes"]
            row |= {"resident_bytes": before, "grown_bytes": after - before}
        progress("")
        return row


def growth(rows: list[dict[str, Any]], key: str) -> list[float]:
    """The power of the number of variables with which ``key`` grows from each row to the next: 1
    means in proportion, 2 quadratic."""
    return [
        math.log(b[key] / a[key]) / math.log(b["variables"] / a["variables"])
        for a, b in zip(rows, rows[1:], strict=False)
    ]


def main() -> None:
    load = os.getloadavg()[0]
    counts = sorted(set(map(int, _VARIABLES.value)))
    rows = [measure(n, _LONG.value if n == counts[0] else 0) for n in counts]
    powers = {key: growth(rows, key) for key in ("first_seconds", "step_seconds")}
    settings = {
        f.name: f.value for f in (_ROWS, _BATCH, _REPLICAS, _JIT, _PLAIN, _BLOCKS, _STEPS, _LONG)
    }
    about = machine(load)
    content = {"settings": settings, "machine": about, "rows": rows, "powers": powers}
    write(_JSON.value, content)
    print(" ".join(f"{k}={v}" for k, v in (settings | about).items()))
    print(
        f"{'variables':>9}{'first s':>10}{'power':>7}{'step ms':>10}{'power':>7}{'own ms':>10}"
        f"{'beyond ms':>11}{'ratio':>7}{'peak MiB':>10}"
    )
    steps = zip([None, *powers["first_seconds"]], [None, *powers["step_seconds"]], strict=True)
    for row, (first, step) in zip(rows, steps, strict=True):
        ratio = row["beyond_seconds"] / rows[0]["beyond_seconds"]
        print(
            f"{row['variables']:9}{row['first_seconds']:10.2f}{_power(first)}"
            f"{row['step_seconds'] * 1e3:10.3f}{_power(step)}{row['own_seconds'] * 1e3:10.3f}"
            f"{row['beyond_seconds'] * 1e3:11.3f}{ratio:7.1f}{row['peak_bytes'] / 2**20:10.0f}"
        )
    grown, before = rows[0]["grown_bytes"], rows[0]["resident_bytes"]
    print(
        f"memory after {_LONG.value} more steps of {counts[0]} variables: "
        f"{grown / 2**20:+.1f} MiB, {1 + grown / before:.3f} of that after 100"
    )


def _power(value: float | None) -> str:
    return f"{'':7}" if value is None else f"{value:7.2f}"


if __name__ == "__main__":
    run_command(main, __doc__)
