"""How long does an all-reduce take? nccl-tests for `tf.distribute`, through `ctl.reduce`.

    python benchmarks/all_reduce.py --replicas=2
    python benchmarks/all_reduce.py --strategy=multi_worker --workers=2 --json=link.json
    python benchmarks/all_reduce.py --replicas=4 --max_bytes=1048576 --dtype=bfloat16

Every operation has its own processes (`peers/`). All operations take a size in turn, so that all
see the same disturbances of the machine. README.md says how the numbers are derived. --json writes,
in seconds, bytes and bytes per second::

    {"schema": 1, "strategy": "multi_worker", "operation": "ring", "replicas": 2,
     "points": [{"bytes": 1024, "seconds": 1e-3, "p99": 2e-3, "call": 4e-4, "algbw": 1e6,
                 "busbw": 1e6, "wrong": 0, "iterations": 100}, ...],
     "operations": {"ring": {"points": [...], "fits": {...}}, "copy": ..., "tcp": ..., ...},
     "bytes_per_pack": {...}, "settings": {...}, "machine": {...}}

The ``points`` at the top are those of ``operation``: the default of `ctl.train`, or the first of
--operations. `ctl.inspect.measure.link.read` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from jobs import Effort, Job, held_out, recommend
from processes import Peer, check_names, in_turn, machine, progress, tasks, write

from ctl import launch
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command
from ctl.inspect.measure.link import SCHEMA, AlphaBeta, PiecewiseLinear, Point

MIB = 1 << 20

# By preference of `ctl.train`: its default is the first that works.
OPERATIONS = {
    "mirrored": ["nccl", "reduction_to_one_device", "hierarchical_copy", "ring"],
    "multi_worker": ["nccl", "ring"],
}
# What an all-reduce is compared with. The limits have no replicas, hence no bus bandwidth.
LIMITS = ["copy", "tcp"]
BESIDE = [*LIMITS, "gloo"]

with group("What is measured"):
    _STRATEGY = flags.DEFINE_enum(
        "strategy", "mirrored", list(OPERATIONS), "devices of one process, or several workers"
    )
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 2, "of mirrored; logical CPU devices where there is no GPU", lower_bound=2
    )
    _WORKERS = flags.DEFINE_integer(
        "workers", 2, "of multi_worker: real processes on loopback", lower_bound=2
    )
    _OPERATIONS = flags.DEFINE_list(
        "operations", None, "cross-device operations (default: all that work on the device)"
    )
    _BESIDE = flags.DEFINE_list(
        "beside", BESIDE, "what is measured beside them, in the same run; gloo needs PyTorch"
    )
    _DTYPE = flags.DEFINE_enum(
        "dtype", "float32", ["float32", "float64", "bfloat16", "float16", "int32"], "of the tensor"
    )
    _MIN = flags.DEFINE_integer("min_bytes", 1024, "smallest size", lower_bound=8)
    _MAX = flags.DEFINE_integer("max_bytes", 256 * MIB, "largest size", lower_bound=8)
    _FACTOR = flags.DEFINE_integer("factor", 2, "from one size to the next", lower_bound=2)
with group("How"):
    _ITERATIONS = flags.DEFINE_integer("iterations", 200, "of each size, at most", lower_bound=1)
    _SECONDS = flags.DEFINE_float(
        "seconds", 0.5, "for each size and operation; at least 5 iterations are run", lower_bound=0
    )
    _WARM_UP = flags.DEFINE_integer(
        "warm_up", 3, "iterations of each size that are not counted", lower_bound=1
    )
    _CHECK = flags.DEFINE_boolean("check", True, "compare every element of every result")
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_SMOOTH = 16 * MIB  # a line fits up to here; larger sizes meet other limits of a machine


def commands(name: str) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of each process of an operation."""
    several = _WORKERS.value if _STRATEGY.value == "multi_worker" else _REPLICAS.value
    if name in LIMITS:
        return [(["limits.py", name], {})]
    if name == "gloo":
        host, port = launch.cluster(1)["worker"][0].split(":")
        shared = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(several)}
        script = ["gloo_worker.py", _DTYPE.value]
        return [(script, shared | {"RANK": str(rank)}) for rank in range(several)]
    script = [
        "all_reduce_worker.py",
        f"--strategy={_STRATEGY.value}",
        f"--operation={name}",
        f"--dtype={_DTYPE.value}",
        f"--check={_CHECK.value}",
    ]
    if _STRATEGY.value == "mirrored":
        return [([*script, f"--replicas={_REPLICAS.value}"], {})]
    return [(script, environment) for environment in tasks(launch.cluster(several)["worker"])]


@contextlib.contextmanager
def started(names: Sequence[str], asked_for: bool) -> Iterator[list[Job]]:
    """Starts those of ``names`` that work on this device, and ends all processes on exit.

    An operation that does not work is printed. If the user has ``asked_for`` operations by name, it
    is a `UsageError`, unless it is one of `BESIDE`.
    """
    effort = Effort(_ITERATIONS.value, _SECONDS.value, _WARM_UP.value, _TIMEOUT.value)
    with contextlib.ExitStack() as stack:
        jobs = []
        for name in names:
            progress(f"starting {name}")
            peers = [stack.enter_context(Peer(name, *how)) for how in commands(name)]
            about = [peer.answer(_TIMEOUT.value) for peer in peers][0]
            if "unavailable" not in about:
                has_bus = name not in LIMITS
                jobs.append(Job(name, peers, about["replicas"], about["device"], effort, has_bus))
            elif asked_for and name not in BESIDE:
                raise UsageError(f"{name}: {about['unavailable']}")
            else:
                progress("")
                print(f"left out {name}: {about['unavailable']}")
        progress("")
        yield jobs


def sizes() -> list[int]:
    """Bytes, from --min_bytes to at most --max_bytes."""
    found = [_MIN.value]
    while found[-1] * _FACTOR.value <= _MAX.value:
        found.append(found[-1] * _FACTOR.value)
    return found


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fits latency (seconds) and bandwidth (bytes per second), and finds the errors of this fit and
    of straight lines on sizes that were left out."""
    found = {}
    for name, limit in (("up to 16 MiB", _SMOOTH), ("all sizes", max(_SMOOTH, _MAX.value))):
        points = [Point(row["bytes"], row["seconds"]) for row in rows if row["bytes"] <= limit]
        if len(points) < 4 or (name == "all sizes" and _MAX.value <= _SMOOTH):
            continue
        line = AlphaBeta.fit(points)
        found[name] = {"alpha": line.alpha, "beta": line.beta} | {
            kind: dataclasses.asdict(held_out(fit, points))
            for kind, fit in (("alpha_beta", AlphaBeta.fit), ("piecewise", PiecewiseLinear))
        }
    return found


def try_packs(job: Job) -> dict[str, Any]:
    """Compares the pack size that ``job`` recommends with a single pack, on 64 gradients of
    --max_bytes in all. ``recommended`` is 0, a single pack, where packs take more than 1.1 times as
    long."""
    pack, size, tensors = recommend(job.rows), _MAX.value, 64
    tried: dict[str, Any] = {"candidate": pack, "size": size}
    for name, limit in (("one_pack", 0), ("packs", max(pack, size // tensors))):
        progress(f"{job.name}: {name}")
        request = {"tensors": tensors, "bytes_per_pack": limit}
        tried[name] = job.measure(size, **request)["seconds"]
    progress("")
    pays = tried["packs"] <= 1.1 * tried["one_pack"] and pack < size
    return tried | {"recommended": pack if pays else 0}


def print_table(job: Job) -> None:
    print(f"\n{job.name}: {job.device}")
    print(
        f"{'size':>12}{'count':>12} {'type':<9}{'time':>10}{'p99':>10}{'algbw':>9}{'busbw':>9}"
        f"{'call':>9}{'wrong':>7}\n{'(B)':>12}{'':>22}{'(us)':>10}{'(us)':>10}{'(GB/s)':>9}"
        f"{'(GB/s)':>9}{'(us)':>9}"
    )
    for row in job.rows:
        bus = f"{row['busbw'] / 1e9:9.3f}" if "busbw" in row else f"{'':9}"
        wrong = row["wrong"] if _CHECK.value and job.name not in LIMITS else "N/A"
        print(
            f"{row['bytes']:12}{count(row['bytes']):12} {_DTYPE.value:<9}"
            f"{row['seconds'] * 1e6:10.1f}{row['p99'] * 1e6:10.1f}{row['algbw'] / 1e9:9.3f}{bus}"
            f"{row['call'] * 1e6:9.1f}{wrong:>7}"
        )
    for name, fit in fits(job.rows).items():
        line, pieces = fit["alpha_beta"], fit["piecewise"]
        print(
            f"  {name}: {fit['alpha'] * 1e6:.0f} us + bytes / {fit['beta'] / 1e9:.2f} GB/s, "
            f"held-out error {line['mean']:.0%} (worst {line['worst']:+.0%} at "
            f"{shown(line['worst_bytes'])}); straight lines between sizes {pieces['mean']:.0%} "
            f"(worst {pieces['worst']:+.0%} at {shown(pieces['worst_bytes'])})"
        )


def print_summary(jobs: Sequence[Job]) -> None:
    """Prints GB/s, a column for each job: busbw, or the bytes that a limit copies or sends."""
    print("\nGB/s (busbw; copy and tcp: bytes moved)")
    print(f"{'size':>12}" + "".join(f"{job.name[:18]:>19}" for job in jobs))
    for rows in zip(*(job.rows for job in jobs), strict=True):
        cells = "".join(f"{row.get('busbw', row['algbw']) / 1e9:19.3f}" for row in rows)
        print(f"{shown(rows[0]['bytes']):>12}{cells}")


def print_recommendation(job: Job, tried: dict[str, Any]) -> None:
    size, ratio = tried["size"], tried["one_pack"] / tried["packs"]
    print(
        f"\nrecommended for {job.name}: --bytes_per_pack={tried['recommended']}\n"
        f"  {shown(tried['candidate'])} is the smallest size within 10 % of the best bandwidth. "
        f"{shown(size)} of gradients took {tried['one_pack'] * 1e3:.2f} ms as one pack and "
        f"{tried['packs'] * 1e3:.2f} ms in packs of it ({ratio:.2f} times as fast).\n"
        "  Only a training shows what packs hide behind the backward pass: "
        "ctl.train --bytes_per_pack=auto."
    )


def shown(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def count(size: int) -> int:
    """Elements of --dtype in ``size`` bytes."""
    return size // {"float64": 8, "bfloat16": 2, "float16": 2}.get(_DTYPE.value, 4)


def _check_sizes(min_bytes: int, max_bytes: int) -> None:
    if max_bytes < min_bytes:
        raise UsageError(f"--max_bytes={max_bytes} is below --min_bytes={min_bytes}")


def _check_names(operations: list[str] | None, beside: list[str], strategy: str) -> None:
    for names, known in ((operations or [], OPERATIONS[strategy]), (beside, BESIDE)):
        check_names("unknown operation", names, known)


check_flags(["min_bytes", "max_bytes"], _check_sizes)
check_flags(["operations", "beside", "strategy"], _check_names)


def main() -> None:
    load = os.getloadavg()[0]
    names = _OPERATIONS.value or OPERATIONS[_STRATEGY.value]
    with started([*names, *_BESIDE.value], bool(_OPERATIONS.value)) as jobs:
        for number, size in enumerate(sizes()):
            for job in in_turn(jobs, number):
                progress(f"{shown(size)} of {shown(_MAX.value)}: {job.name}")
                job.rows.append(job.measure(size))
        progress("")
        first = jobs[0]
        tried = try_packs(first)
    settings = {
        flag.name: flag.value
        for flag in (_STRATEGY, _DTYPE, _CHECK, _ITERATIONS, _SECONDS, _WARM_UP)
    }
    about = machine(load)
    content = {
        "schema": SCHEMA,
        "strategy": _STRATEGY.value,
        "operation": first.name,
        "replicas": first.replicas,
        "points": first.rows,
        "operations": {
            job.name: {"device": job.device, "points": job.rows, "fits": fits(job.rows)}
            for job in jobs
        },
        "bytes_per_pack": tried,
        "settings": settings,
        "machine": about,
    }
    write(_JSON.value, content)
    print(" ".join(f"{k}={v}" for k, v in (settings | about).items()))
    for job in jobs:
        print_table(job)
    print_summary(jobs)
    print_recommendation(first, tried)


if __name__ == "__main__":
    run_command(main, __doc__)
