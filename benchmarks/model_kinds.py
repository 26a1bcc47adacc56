"""Is ctl faster than a plain loop, and as small, on small models of many kinds?

    python benchmarks/model_kinds.py
    python benchmarks/model_kinds.py --kinds=lstm,transformer --rounds=11 --json=out.json

Each row has its own process. The blocks of a kind take turns. README.md says what is trained.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from typing import Any

from absl import flags
from processes import Peer, check_names, in_turn, machine, progress, summary, write

from ctl.flags.parsing import group, run_command

KINDS = (
    *("mlp", "mlp_dropout", "recommender", "gnn", "tab_transformer", "transformer"),
    *("lstm", "bilstm", "gru", "text_cnn", "mobilenet_v3"),
)
LOOPS = "ctl", "ctl_off", "plain"

with group("What is trained"):
    _KINDS = flags.DEFINE_list("kinds", list(KINDS), f"any of {', '.join(KINDS)}")
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 9, "blocks of each row", lower_bound=1)
    _SECONDS = flags.DEFINE_float("seconds", 0.4, "of a block of ctl", lower_bound=0)
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def measure(kind: str) -> dict[str, dict[str, Any]]:
    """Of each loop: whether XLA compiles the step, milliseconds per step of each block, the seconds
    until the first step has ended, MiB of the peak memory beyond the imports, and the mean loss of
    the last block."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        peers = {}
        for loop in LOOPS:
            progress(f"{kind}: {loop} begins")
            command = ["kinds_worker.py", f"--kind={kind}", f"--loop={loop}"]
            peer = peers[loop] = stack.enter_context(Peer(f"{kind}, {loop}", command))
            about = peer.answer(_TIMEOUT.value)
            first = about["seconds"] + peer.ask(_TIMEOUT.value, steps=1)["seconds"]
            compiled = about["jit_compile"]
            found[loop] = {"XLA": compiled, "first s": first, "ms": [], "CPU ms": []}
            seconds = peer.ask(_TIMEOUT.value, steps=20)["seconds"]
            if loop == "ctl":
                steps = max(5, int(20 * _SECONDS.value / seconds))
        for number in range(-1, _ROUNDS.value):  # the first one warms up
            for loop in in_turn(LOOPS, max(number, 0)):
                progress(f"{kind}, round {number + 1} of {_ROUNDS.value}: {loop}")
                block = peers[loop].ask(_TIMEOUT.value, steps=steps)
                if number >= 0:
                    found[loop]["ms"].append(block["seconds"] / steps * 1e3)
                    found[loop]["CPU ms"].append(block["cpu_seconds"] / steps * 1e3)
                found[loop] |= {"peak MiB": block["peak_bytes"] / 2**20, "loss": block["loss"]}
    progress("")
    return found


def main() -> None:
    check_names("--kinds", _KINDS.value, KINDS)
    about = machine(os.getloadavg()[0])
    print(*(f"{key}={value}" for key, value in about.items()))
    print(
        f"{'':24}{'XLA':4}{'first s':>8}{'ms':>9}{'CPU ms':>9}{'MiB':>6}{'over plain: ms':>21}",
        end="",
    )
    print(f"{'CPU ms':>19}{'MiB':>7}")
    results = {}
    for kind in _KINDS.value:
        found = results[kind] = measure(kind)
        plain = found["plain"]
        for loop, of in found.items():
            line = f"{kind:16}{loop:8}{'on' if of['XLA'] else '':4}{of['first s']:8.1f}"
            line += "".join(f"{statistics.median(of[key]):9.2f}" for key in ("ms", "CPU ms"))
            line += f"{of['peak MiB']:6.0f}"
            for key in ("ms", "CPU ms"):
                ratios = summary([a / b for a, b in zip(of[key], plain[key], strict=True)])
                line += f"{ratios['median']:7.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})"
            print(f"{line}{of['peak MiB'] / plain['peak MiB']:7.2f}", flush=True)
    write(_JSON.value, {"machine": about, "kinds": results})


if __name__ == "__main__":
    run_command(main, __doc__)
