"""Lints of a plan: findings that are wrong or cost time. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctl.base.units import MIB, size_text
from ctl.phases.plan.plan import Collective, Lint, Plan

# Splitting a pack in two hides at most half of its transfer: it saves bytes / (2·b) seconds at
# bandwidth b, and costs the latency a of one more collective. It pays above 2·a·b bytes: 1.8 MB for
# TensorFlow's gRPC ring over loopback, a = 1.2 ms and b = 0.77 GB/s (benchmarks/all_reduce.py).
WORTH_SPLITTING = 2 * MIB

# glibc maps a buffer above 32 MiB anew at each allocation, so that each of its pages faults.
FAULT_CLIFF = 32 * MIB

_SHOWN = 3  # names in one line


def check(plan: Plan, watched: bool, splits: bool = True) -> tuple[Lint, ...]:
    """All lints of one plan; empty for a sensible step.

    Args:
        plan: the plan to judge.
        watched: whether `ctl.distributed.watch.watchdog` runs in this process.
        splits: whether the backward pass hands over each gradient when it is done.
    """
    everything = (*plan.collectives, *plan.other)
    endless = plan.workers > 1 and not watched
    found = [
        *map(_reduced_twice, (c for c in plan.collectives if c.again)),
        _no_overlap(plan) if splits else None,
        _page_faults(plan),
        _ring_on_logical_cpus(plan),
        _gathered(plan),
        _no_timeout([c for c in everything if c.timeout == 0 and endless]),
        _threads([c for c in everything if c.timeout and c.in_loop]),
        _merged(plan),
    ]
    return tuple(lint for lint in found if lint)


def differing(plans: Mapping[int, Plan]) -> tuple[Lint, ...]:
    """A lint for the first difference between plans; empty if all workers have the same.

    Args:
        plans: worker -> plan.
    """
    first = min(plans)
    facts = {worker: plan.facts() for worker, plan in plans.items()}
    for worker, theirs in sorted(facts.items()):
        for name in sorted({*facts[first], *theirs}):
            ours, other = facts[first].get(name), theirs.get(name)
            if ours != other:
                return (
                    Lint(
                        "plans differ",
                        f"{name} is {ours or 'nothing'} on worker {first}, {other or 'nothing'} on "
                        f"worker {worker}: unrelated tensors would be summed silently",
                        "start all workers with the same code and flags; reduce in an order that "
                        "does not depend on the worker",
                    ),
                )
    return ()


def _is_ring(collective: Collective) -> bool:
    return collective.kind.startswith(("Collective", "Nccl"))


def _on_cpus(collective: Collective) -> bool:
    return all("CPU" in device for device in collective.devices)


def _names(collectives: Sequence[Collective]) -> str:
    shown = [c.name for c in collectives[:_SHOWN]]
    more = len(collectives) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _reduced_twice(pack: Collective) -> Lint:
    return Lint(
        "reduced twice",
        f"the gradients of {pack.name} are summed over the replicas again by "
        f"{', '.join(pack.again[:_SHOWN])}: they are {pack.group_size} times too large",
        "reduce once: Keras's optimizer.apply() reduces by itself, TrainStep.apply() does not",
    )


def _no_overlap(plan: Plan) -> Lint | None:
    if len(plan.collectives) != 1:
        return None
    (pack,) = plan.collectives
    # Logical devices of one CPU share its memory and its cores: there is no transfer to hide.
    if plan.workers == 1 and _on_cpus(pack):
        return None
    size = pack.bytes or 0
    if pack.start_share is None or pack.start_share < 1 or size < WORTH_SPLITTING:
        return None
    return Lint(
        "no overlap",
        f"{pack.name} has all {size_text(size)}, so it starts only after the whole backward pass",
        f"--bytes_per_pack={size // 4}: the first packs move during the backward pass",
    )


def _page_faults(plan: Plan) -> Lint | None:
    packs = [
        c
        for c in plan.collectives
        if plan.workers > 1 and _on_cpus(c) and _is_ring(c) and (c.bytes or 0) > FAULT_CLIFF
    ]
    if not packs:
        return None
    largest = max(c.bytes or 0 for c in packs)
    return Lint(
        "page faults",
        f"{_names(packs)}: {size_text(largest)}; above 32 MiB every buffer of gRPC "
        "is mapped afresh, page by page, which takes up to twice as long "
        "(benchmarks/all_reduce.py measures it)",
        f"--bytes_per_pack={16 * MIB}; a single tensor that is larger stays whole",
    )


def _ring_on_logical_cpus(plan: Plan) -> Lint | None:
    packs = [c for c in plan.collectives if len(c.devices) > 1 and _on_cpus(c) and _is_ring(c)]
    if not packs:
        return None
    return Lint(
        "ring on logical CPUs",
        f"{_names(packs)}: a ring of {packs[0].group_size} devices that share one memory, several "
        "times slower than a sum on one of them (benchmarks/all_reduce.py measures it)",
        "--cross_device_ops=auto, or MirroredStrategy(cross_device_ops=ReductionToOneDevice())",
    )


def _gathered(plan: Plan) -> Lint | None:
    # A step may gather integers, such as codes, or one row of each replica. These are no gradients.
    gathers = [
        c for c in plan.collectives if not c.members and "float" in c.dtype and _has_rows(c.shape)
    ]
    if not gathers:
        return None
    return Lint(
        "sparse gradients gathered",
        f"{_names(gathers)}: the rows of every replica are gathered, so the traffic grows with the "
        "replicas; rows that occur twice are not summed, which is wrong for most optimizers of "
        "Keras",
        "make the gradient dense before it is reduced: ctl.reduce.densify",
    )


def _has_rows(shape: tuple[int, ...] | None) -> bool:
    return shape is None or (len(shape) > 1 and shape[0] != 1)


def _no_timeout(waiting: Sequence[Collective]) -> Lint | None:
    if not waiting:
        return None
    return Lint(
        "no timeout",
        f"{_names(waiting)}: waits forever if a replica is lost",
        "train with ctl.Loop, which starts ctl.distributed.watch.watchdog: --collective_timeout",
    )


def _threads(limited: Sequence[Collective]) -> Lint | None:
    if not limited:
        return None
    seconds = max(c.timeout or 0.0 for c in limited)
    return Lint(
        "a thread for every all-reduce",
        f"{_names(limited)}: TensorFlow's own time limit starts a thread for each call, which "
        f"sleeps for all of the {seconds:g} s; a process with too many threads dies",
        "CommunicationOptions without timeout_seconds; the watchdog of ctl limits the time",
    )


def _merged(plan: Plan) -> Lint | None:
    packs = [c for c in plan.collectives if _is_ring(c)]
    merged = [fused for fused in plan.xla or () if fused.payloads > 1]
    if not merged or len(packs) < 2:
        return None
    return Lint(
        "XLA merged the packs",
        f"compiled as a whole, the step has {merged[0].payloads} all-reduces in one of "
        f"{size_text(merged[0].bytes)}, which waits for the whole backward pass",
        "leave the all-reduce out of what XLA compiles, as TrainStep(jit_compile=True) does",
    )
