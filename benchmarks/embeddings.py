"""What does a step cost whose model has a large embedding table?

    python benchmarks/embeddings.py --optimizers=sgd,adagrad,adam,adamw --kinds=ctl,plain,fit
    python benchmarks/embeddings.py --optimizers=sgd,adam --rows=20000,2000000,20000000 --width=16
    python benchmarks/embeddings.py --model=dlrm --workers=2 --batch=2048 --kinds=ctl,torch

For each optimizer and size of the table, each kind trains in its own processes, and their blocks of
steps are interleaved. A ratio is the median over the rounds of ctl's time over that of the other.
``memory`` is the peak, less that of a table of 1,000 rows, over the bytes of tables and slots.
``wire`` is what the sockets of all workers have sent in a step, over the bytes of what they must
tell each other: the different rows of each share, with their ids.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator
from typing import Any

from absl import flags
from processes import Peer, ask_all, check_names, in_turn, machine, progress, summary, write

from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command
from ctl.launch import THREADS, cluster, threads_of

KINDS = ("ctl", "dense", "plain", "fit", "torch")
SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}  # of each number of a table
FEW_ROWS = 1000

with group("What is trained"):
    _KINDS = flags.DEFINE_list("kinds", "ctl,plain,fit", "who trains: " + ", ".join(KINDS))
    _OPTIMIZERS = flags.DEFINE_list("optimizers", "sgd,adagrad,adam,adamw", "by their Keras names")
    _MODEL = flags.DEFINE_enum(
        "model", "bag", ("bag", "dlrm"), "one table, or the 26 of DLRM for Criteo's Kaggle data"
    )
    _ROWS = flags.DEFINE_list("rows", "2000000", "of the table; of dlrm, the most of each table")
    _WIDTH = flags.DEFINE_integer("width", 64, "of a table", lower_bound=1)
    _BATCH = flags.DEFINE_integer("batch", 256, "examples, of all replicas", lower_bound=1)
    _IDS = flags.DEFINE_integer("ids", 20, "that an example of a bag looks up", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 1, "of one process with ctl, each in a process with torch", lower_bound=1
    )
    _WORKERS = flags.DEFINE_integer("workers", 1, "processes that train together", lower_bound=1)
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "of a block of each kind", lower_bound=1)
    _SECONDS = flags.DEFINE_float("seconds", 2.0, "of a block, about", lower_bound=0.0)
    _TIMEOUT = flags.DEFINE_float("timeout", 600.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def _check(kinds: list[str], optimizers: list[str], rows: list[str]) -> None:
    check_names("--kinds", kinds, KINDS)
    check_names("--optimizers", optimizers, SLOTS)
    if not all(one.isdecimal() and int(one) for one in rows):
        raise UsageError(f"--rows={','.join(rows)}: must be whole numbers of 1 or more")


def _check_replicas(kinds: list[str], replicas: int, workers: int, batch: int) -> None:
    if replicas > 1 and workers > 1:
        raise UsageError("--replicas and --workers: give one of them")
    if batch % max(replicas, workers):
        raise UsageError(f"--batch={batch} is not a multiple of the replicas")
    if max(replicas, workers) > 1 and {"plain", "fit"} & {*kinds}:
        raise UsageError("--kinds: plain and fit train on one replica only")


check_flags(["kinds", "optimizers", "rows"], _check)
check_flags(["kinds", "replicas", "workers", "batch"], _check_replicas)


@contextlib.contextmanager
def started(kind: str, optimizer: str, rows: int) -> Iterator[tuple[list[Peer], dict[str, Any]]]:
    """The processes that train, and the first answer of one of them."""
    settings = [f"--kind={kind}", f"--optimizer={optimizer}", f"--rows={rows}"]
    settings += [f"--{f.name}={f.value}" for f in (_MODEL, _WIDTH, _BATCH, _IDS)]
    count = max(_WORKERS.value, _REPLICAS.value if kind == "torch" else 1)
    tasks, environment = [[f"--replicas={_REPLICAS.value}"]], {}
    if count > 1:
        addresses = ",".join(cluster(count)["worker"])
        tasks = [[f"--workers={addresses}", f"--worker_index={index}"] for index in range(count)]
        environment = {THREADS: os.environ.get(THREADS, threads_of(count))}
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(Peer(kind, ["embeddings_worker.py", *settings, *task], environment))
            for task in tasks
        ]
        yield peers, [peer.answer(_TIMEOUT.value) for peer in peers][0]


def ask(peers: list[Peer], steps: int) -> dict[str, Any]:
    """Trains. ``seconds``: of the slowest process; ``peak_bytes``: of the largest; ``sent_bytes``:
    of all."""
    answers = ask_all(peers, _TIMEOUT.value, steps=steps)
    how = {"seconds": max, "peak_bytes": max, "sent_bytes": sum}
    return {key: of(answer[key] for answer in answers) for key, of in how.items()}


def measure(optimizer: str, rows: int) -> dict[str, Any]:
    """The times of a step by kind, and ctl's ratio to each other kind; memory, and bytes sent."""
    with contextlib.ExitStack() as stack:
        jobs: dict[str, list[Peer]] = {}
        about: dict[str, Any] = {}
        least, few_rows = {}, 0
        for kind in _KINDS.value:
            progress(f"{optimizer}, {rows} rows, {kind}: starting")
            peers, first = stack.enter_context(started(kind, optimizer, rows))
            if missing := first.get("missing"):
                print(f"{kind}: left out, {missing}")
                continue
            jobs[kind], about = peers, first
            if rows > FEW_ROWS:
                with started(kind, optimizer, FEW_ROWS) as (few, first):
                    least[kind] = ask(few, steps=6)["peak_bytes"]
                few_rows = first["table_rows"]
        if not jobs:
            raise UsageError(f"--kinds={','.join(_KINDS.value)}: none of them can train here")
        lengths = {}
        for kind, peers in jobs.items():
            ask(peers, steps=2)  # traces
            lengths[kind] = max(1, int(_SECONDS.value / (ask(peers, steps=4)["seconds"] / 4)))
        times: dict[str, list[float]] = {kind: [] for kind in jobs}
        sent: dict[str, list[float]] = {kind: [] for kind in jobs}
        peaks = {}
        for number in range(_ROUNDS.value):
            progress(f"{optimizer}, {rows} rows: round {number + 1} of {_ROUNDS.value}")
            for kind in in_turn(jobs, number):
                block = ask(jobs[kind], steps=lengths[kind])
                times[kind].append(block["seconds"] / lengths[kind])
                sent[kind].append(block["sent_bytes"] / lengths[kind])
                peaks[kind] = block["peak_bytes"]
        progress("")
    others = [kind for kind in times if kind != "ctl" and "ctl" in times]
    ratios = {k: [a / b for a, b in zip(times["ctl"], times[k], strict=True)] for k in others}
    told = about["rows_of_a_share"] * (_WIDTH.value + 1) * 4 * _WORKERS.value
    held = (about["table_rows"] - few_rows) * _WIDTH.value * 4 * (1 + SLOTS[optimizer])
    copies = {kind: 1 if kind == "torch" else _REPLICAS.value for kind in jobs}
    return {
        "optimizer": optimizer,
        "rows": rows,
        "table_bytes": about["table_rows"] * _WIDTH.value * 4,
        "step_seconds": {kind: summary(of) for kind, of in times.items()},
        "ratios": {kind: summary(of) for kind, of in ratios.items()},
        "peak_bytes": peaks,
        "memory": {k: (peaks[k] - least[k]) / (held * copies[k]) for k in least},
        "wire": {kind: statistics.median(of) / told for kind, of in sent.items()},
    }


def main() -> None:
    load = os.getloadavg()[0]
    sizes = list(map(int, _ROWS.value))
    found = [measure(optimizer, rows) for optimizer in _OPTIMIZERS.value for rows in sizes]
    flag = (_MODEL, _WIDTH, _BATCH, _IDS, _REPLICAS, _WORKERS, _ROUNDS, _SECONDS)
    settings = {f.name: f.value for f in flag}
    about = machine(load)
    write(_JSON.value, {"settings": settings, "machine": about, "results": found})
    print(" ".join(f"{k}={v}" for k, v in (settings | about).items()))
    with_wire = _WORKERS.value > 1 and _MODEL.value == "bag"  # else it has dense gradients, too
    head = f"{'optimizer':<10}{'rows':>10}  {'kind':<6}{'step ms':>9}{'ctl over it':>24}"
    print(f"{head}{'peak MiB':>10}{'memory':>8}{'wire' if with_wire else '':>6}")
    for one in found:
        for kind, step in one["step_seconds"].items():
            ratio = one["ratios"].get(kind)
            text = "{median:.3f} ({min:.3f} to {max:.3f})".format(**ratio) if ratio else ""
            print(
                f"{one['optimizer']:<10}{one['rows']:>10}  {kind:<6}{step['median'] * 1e3:9.2f}"
                f"{text:>24}{one['peak_bytes'][kind] / 2**20:10.0f}"
                f"{one['memory'].get(kind, math.nan):8.2f}"
                + (f"{one['wire'][kind]:6.2f}" if with_wire else "")
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
