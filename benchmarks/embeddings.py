"""What does a step cost whose model has a large embedding table?

    python benchmarks/embeddings.py --optimizers=sgd,adagrad,adam,adamw --kinds=ctl,plain,fit
    python benchmarks/embeddings.py --optimizers=sgd,adam --rows=20000,2000000,20000000 --width=16

For each optimizer and size of the table, each kind trains in its own process, and their blocks of
steps are interleaved. A ratio is the median over the rounds of ctl's time over that of the other.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from absl import flags
from processes import Peer, check_names, in_turn, machine, progress, summary, write

from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command

KINDS = ("ctl", "dense", "plain", "fit", "torch")
OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")

with group("What is trained"):
    _KINDS = flags.DEFINE_list("kinds", "ctl,plain,fit", "who trains: " + ", ".join(KINDS))
    _OPTIMIZERS = flags.DEFINE_list("optimizers", "sgd,adagrad,adam,adamw", "by their Keras names")
    _ROWS = flags.DEFINE_list("rows", "2000000", "of the table")
    _WIDTH = flags.DEFINE_integer("width", 64, "of the table", lower_bound=1)
    _BATCH = flags.DEFINE_integer("batch", 256, "examples", lower_bound=1)
    _IDS = flags.DEFINE_integer("ids", 20, "that an example looks up", lower_bound=1)
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "of a block of each kind", lower_bound=1)
    _SECONDS = flags.DEFINE_float("seconds", 2.0, "of a block, about", lower_bound=0.0)
    _TIMEOUT = flags.DEFINE_float("timeout", 600.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def _check(kinds: list[str], optimizers: list[str], rows: list[str]) -> None:
    check_names("--kinds", kinds, KINDS)
    check_names("--optimizers", optimizers, OPTIMIZERS)
    if not all(one.isdecimal() and int(one) for one in rows):
        raise UsageError(f"--rows={','.join(rows)}: must be whole numbers of 1 or more")


check_flags(["kinds", "optimizers", "rows"], _check)


def measure(optimizer: str, rows: int) -> dict[str, Any]:
    """The times of a step by kind, ctl's ratio to each other kind, and the peak of the memory."""
    settings = [f"--optimizer={optimizer}", f"--rows={rows}", f"--width={_WIDTH.value}"]
    settings += [f"--batch={_BATCH.value}", f"--ids={_IDS.value}"]
    with contextlib.ExitStack() as stack:
        peers = {}
        for kind in _KINDS.value:
            progress(f"{optimizer}, {rows} rows, {kind}: starting")
            command = ["embeddings_worker.py", f"--kind={kind}", *settings]
            peer = stack.enter_context(Peer(kind, command))
            if missing := peer.answer(_TIMEOUT.value).get("missing"):
                print(f"{kind}: left out, {missing}")
            else:
                peers[kind] = peer
        lengths = {}
        for kind, peer in peers.items():
            peer.ask(_TIMEOUT.value, steps=2)  # traces
            seconds = peer.ask(_TIMEOUT.value, steps=4)["seconds"] / 4
            lengths[kind] = max(1, int(_SECONDS.value / seconds))
        times: dict[str, list[float]] = {kind: [] for kind in peers}
        peaks = {}
        for number in range(_ROUNDS.value):
            progress(f"{optimizer}, {rows} rows: round {number + 1} of {_ROUNDS.value}")
            for kind in in_turn(peers, number):
                block = peers[kind].ask(_TIMEOUT.value, steps=lengths[kind])
                times[kind].append(block["seconds"] / lengths[kind])
                peaks[kind] = block["peak_bytes"]
        progress("")
    others = [kind for kind in times if kind != "ctl" and "ctl" in times]
    ratios = {k: [a / b for a, b in zip(times["ctl"], times[k], strict=True)] for k in others}
    return {
        "optimizer": optimizer,
        "rows": rows,
        "table_bytes": rows * _WIDTH.value * 4,
        "step_seconds": {kind: summary(of) for kind, of in times.items()},
        "ratios": {kind: summary(of) for kind, of in ratios.items()},
        "peak_bytes": peaks,
    }


def main() -> None:
    load = os.getloadavg()[0]
    sizes = list(map(int, _ROWS.value))
    found = [measure(optimizer, rows) for optimizer in _OPTIMIZERS.value for rows in sizes]
    settings = {f.name: f.value for f in (_WIDTH, _BATCH, _IDS, _ROUNDS, _SECONDS)}
    about = machine(load)
    write(_JSON.value, {"settings": settings, "machine": about, "results": found})
    print(" ".join(f"{k}={v}" for k, v in (settings | about).items()))
    head = f"{'optimizer':<10}{'rows':>10}  {'kind':<6}{'step ms':>9}"
    print(f"{head}{'ctl over it':>24}{'peak MiB':>10}")
    for one in found:
        for kind, step in one["step_seconds"].items():
            ratio = one["ratios"].get(kind)
            text = "{median:.3f} ({min:.3f} to {max:.3f})".format(**ratio) if ratio else ""
            print(
                f"{one['optimizer']:<10}{one['rows']:>10}  {kind:<6}{step['median'] * 1e3:9.2f}"
                f"{text:>24}{one['peak_bytes'][kind] / 2**20:10.0f}"
            )
    for optimizer in _OPTIMIZERS.value if len(sizes) > 1 and "ctl" in _KINDS.value else ():
        mine = [one for one in found if one["optimizer"] == optimizer]
        first, last = (one["step_seconds"]["ctl"]["median"] for one in (mine[0], mine[-1]))
        print(
            f"{optimizer}: from {sizes[0]} to {sizes[-1]} rows, a step takes {last / first:.2f} "
            "times as long"
        )


if __name__ == "__main__":
    run_command(main, __doc__)
