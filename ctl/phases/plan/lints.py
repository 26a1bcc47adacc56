"""Lints of a plan: findings that are wrong or cost time. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctl.base.differences import differences, names_of
from ctl.base.units import MIB, size_text
from ctl.phases.plan.plan import Collective, Lint, Plan

# Splitting a pack in two hides at most half of its transfer: it saves bytes / (2·b) seconds at
# bandwidth b, and costs the latency a of one more collective. It pays above 2·a·b bytes: 1.8 MB for
# TensorFlow's gRPC ring over loopback, a = 1.2 ms and b = 0.77 GB/s (benchmarks/all_reduce.py).
WORTH_SPLITTING = 2 * MIB

# glibc maps a buffer above 32 MiB anew at each allocation, so that each of its pages faults.
FAULT_CLIFF = 32 * MIB

_ROWS = "ctl_rows/"  # in the names of the gathers of `ctl.reduce.sum_rows`, which sums duplicates


def check(plan: Plan, watched: bool, splits: bool = True) -> tuple[Lint, ...]:
    """All lints of one plan; empty for a sensible step. ``watched`` is whether
    `ctl.distributed.watch.watchdog` runs in this process, ``splits`` whether the backward pass
    hands over each gradient when it is done."""
    everything = (*plan.collectives, *plan.other)
    endless = plan.workers > 1 and not watched
    return (
        *map(_reduced_twice, (c for c in plan.collectives if c.again)),
        *(_no_overlap(plan) if splits else ()),
        *_page_faults(plan),
        *_ring_on_logical_cpus(plan),
        *_gathered(plan),
        *_no_timeout([c for c in everything if c.timeout == 0 and endless]),
        *_threads([c for c in everything if c.timeout and c.in_loop]),
        *_merged(plan),
    )


def differing(plans: Sequence[Plan]) -> tuple[Lint, ...]:
    """A lint for the first difference between the plans of workers; empty if all have the same."""
    for name, (first, *others) in differences([plan.facts() for plan in plans]).items():
        worker, other = next((n, one) for n, one in enumerate(others, 1) if one != first)
        return (
            Lint(
                "plans differ",
                f"{name} is {first} on worker 0, {other} on worker {worker}: unrelated tensors "
                "would be summed silently",
                "start all workers with the same code and flags; reduce in an order that does not "
                "depend on the worker",
            ),
        )
    return ()


def _is_ring(collective: Collective) -> bool:
    return collective.kind.startswith(("Collective", "Nccl"))


def _on_cpus(collective: Collective) -> bool:
    return all("CPU" in device for device in collective.devices)


def _names(collectives: Sequence[Collective]) -> str:
    return names_of([c.name for c in collectives])


def _reduced_twice(pack: Collective) -> Lint:
    return Lint(
        "reduced twice",
        f"the gradients of {pack.name} are summed over the replicas again by "
        f"{', '.join(pack.again[:3])}: they are {pack.group_size} times too large",
        "reduce once: Keras's optimizer.apply() reduces by itself, TrainStep.apply() does not",
    )


def _no_overlap(plan: Plan) -> Iterator[Lint]:
    if len(plan.collectives) != 1:
        return
    (pack,) = plan.collectives
    size = pack.bytes or 0
    # Logical devices of one CPU share its memory and its cores: there is no transfer to hide.
    hides = plan.workers > 1 or not _on_cpus(pack)
    if hides and (pack.start_share or 0) >= 1 and size >= WORTH_SPLITTING:
        yield Lint(
            "no overlap",
            f"{pack.name} has all {size_text(size)}, so it starts only after the whole backward "
            "pass",
            f"--bytes_per_pack={size // 4}: the first packs move during the backward pass",
        )


def _page_faults(plan: Plan) -> Iterator[Lint]:
    packs = [
        c
        for c in plan.collectives
        if plan.workers > 1 and _on_cpus(c) and _is_ring(c) and (c.bytes or 0) > FAULT_CLIFF
    ]
    if packs:
        largest = max(c.bytes or 0 for c in packs)
        yield Lint(
            "page faults",
            f"{_names(packs)}: {size_text(largest)}; above 32 MiB every buffer of gRPC "
            "is mapped afresh, page by page, which takes up to twice as long "
            "(benchmarks/all_reduce.py measures it)",
            f"--bytes_per_pack={16 * MIB}; a single tensor that is larger stays whole",
        )


def _ring_on_logical_cpus(plan: Plan) -> Iterator[Lint]:
    packs = [c for c in plan.collectives if len(c.devices) > 1 and _on_cpus(c) and _is_ring(c)]
    if packs:
        yield Lint(
            "ring on logical CPUs",
            f"{_names(packs)}: a ring of {packs[0].group_size} devices that share one memory, "
            "several times slower than a sum on one of them (benchmarks/all_reduce.py measures it)",
            "--cross_device_ops=auto, or MirroredStrategy(cross_device_ops=ReductionToOneDevice())",
        )


def _gathered(plan: Plan) -> Iterator[Lint]:
    # A step may gather integers, such as codes, or one row of each replica. These are no gradients.
    gathers = [
        c
        for c in plan.collectives
        if not c.members and "float" in c.dtype and _has_rows(c.shape) and _ROWS not in c.name
    ]
    if gathers:
        yield Lint(
            "sparse gradients gathered",
            f"{_names(gathers)}: the rows of every replica are gathered, so the traffic grows with "
            "the replicas; rows that occur twice are not summed, which is wrong for most "
            "optimizers of Keras",
            "make the gradient dense before it is reduced: ctl.reduce.densify",
        )


def _has_rows(shape: tuple[int, ...] | None) -> bool:
    return shape is None or (len(shape) > 1 and shape[0] != 1)


def _no_timeout(waiting: Sequence[Collective]) -> Iterator[Lint]:
    if waiting:
        yield Lint(
            "no timeout",
            f"{_names(waiting)}: waits forever if a replica is lost",
            "train with ctl.Loop, which starts ctl.distributed.watch.watchdog: "
            "--collective_timeout",
        )


def _threads(limited: Sequence[Collective]) -> Iterator[Lint]:
    if limited:
        seconds = max(c.timeout or 0.0 for c in limited)
        yield Lint(
            "a thread for every all-reduce",
            f"{_names(limited)}: TensorFlow's own time limit starts a thread for each call, which "
            f"sleeps for all of the {seconds:g} s; a process with too many threads dies",
            "CommunicationOptions without timeout_seconds; the watchdog of ctl limits the time",
        )


def _merged(plan: Plan) -> Iterator[Lint]:
    packs = [c for c in plan.collectives if _is_ring(c)]
    merged = [fused for fused in plan.xla or () if fused.payloads > 1]
    if merged and len(packs) > 1:
        yield Lint(
            "XLA merged the packs",
            f"compiled as a whole, the step has {merged[0].payloads} all-reduces in one of "
            f"{size_text(merged[0].bytes)}, which waits for the whole backward pass",
            "leave the all-reduce out of what XLA compiles, as TrainStep(jit_compile=True) does",
        )
