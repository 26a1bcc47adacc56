"""What is wrong with a plan, or costs time: the only place that judges one. Reads plans only, so it
imports no TensorFlow.
"""

from __future__ import annotations

from ctl.inspect.plan import Collective, Lint, Plan

MIB = 2**20

# Splitting a pack in two hides at most the transfer of one half, bytes/2 over the bandwidth b, and
# costs one more start of a collective, a. It pays above 2·a·b: with a = 1.2 ms and b = 0.77 GB/s of
# TensorFlow's gRPC ring over loopback (benchmarks/all_reduce.py) that is 1.8 MB.
WORTH_SPLITTING = 2 * MIB

# glibc gets buffers above 32 MiB afresh from the system each time, and every page of them faults.
FAULT_CLIFF = 32 * MIB


def check(plan: Plan) -> tuple[Lint, ...]:
    """All lints of one plan; empty for a sensible step."""
    found = [
        *(lint for c in plan.collectives if (lint := _reduced_twice(c))),
        *_no_overlap(plan),
        *(lint for c in plan.collectives if (lint := _page_faults(plan, c))),
        *(lint for c in plan.collectives if (lint := _ring_on_logical_cpus(plan, c))),
        *(lint for c in (*plan.collectives, *plan.other) if (lint := _gathered(c))),
        *(lint for c in (*plan.collectives, *plan.other) if (lint := _no_timeout(c))),
    ]
    return tuple(found)


def _is_ring(collective: Collective) -> bool:
    return collective.kind.startswith(("Collective", "Nccl"))


def _reduced_twice(pack: Collective) -> Lint | None:
    if not pack.again:
        return None
    return Lint(
        "reduced twice",
        f"the gradients of {pack.name} are summed over the replicas again by "
        f"{', '.join(pack.again)}: they are {pack.group_size} times too large",
        "reduce once: Keras's optimizer.apply() reduces by itself, TrainStep.apply() does not",
    )


def _no_overlap(plan: Plan) -> list[Lint]:
    if len(plan.collectives) != 1:
        return []
    (pack,) = plan.collectives
    # Logical devices of one CPU share its memory and its cores: there is no transfer to hide.
    if plan.workers == 1 and all("CPU" in device for device in pack.devices):
        return []
    if pack.start_share is None or pack.start_share < 1 or (pack.bytes or 0) < WORTH_SPLITTING:
        return []
    return [
        Lint(
            "no overlap",
            f"{pack.name} has all {_mib(pack.bytes)} and can start only when all of the backward "
            "pass is done",
            f"--bytes_per_pack={pack.bytes // 4}: the first packs move while the backward pass "
            "goes on",
        )
    ]


def _page_faults(plan: Plan, pack: Collective) -> Lint | None:
    on_cpu = plan.workers > 1 and all("CPU" in device for device in pack.devices)
    if not on_cpu or not _is_ring(pack) or (pack.bytes or 0) <= FAULT_CLIFF:
        return None
    return Lint(
        "page faults",
        f"{pack.name} is {_mib(pack.bytes)}; above 32 MiB every buffer of gRPC is mapped afresh, "
        "page by page, which took 1.9 times as long (benchmarks/all_reduce.py)",
        f"--bytes_per_pack={16 * MIB}",
    )


def _ring_on_logical_cpus(plan: Plan, pack: Collective) -> Lint | None:
    cpus = len(pack.devices) > 1 and all("CPU" in device for device in pack.devices)
    if not cpus or not _is_ring(pack):
        return None
    return Lint(
        "ring on logical CPUs",
        f"{pack.name} goes around a ring of {pack.group_size} devices that share one memory: 3 to "
        "16 times the time of a sum on one of them (benchmarks/all_reduce.py)",
        "--cross_device_ops=auto, or MirroredStrategy(cross_device_ops=ReductionToOneDevice())",
    )


def _gathered(collective: Collective) -> Lint | None:
    if collective.purpose != "gradients" or collective.members:
        return None
    return Lint(
        "sparse gradients gathered",
        f"{collective.name} gathers rows of every replica: what moves grows with the replicas, "
        "and duplicate rows are not summed, which is wrong for most optimizers of Keras",
        "make the gradient dense before it is reduced: ctl.reduce.densify",
    )


def _no_timeout(collective: Collective) -> Lint | None:
    if collective.timeout != 0 or collective.group_size < 2:
        return None
    return Lint(
        "no timeout",
        f"{collective.name} waits for ever for a replica that does not come",
        "TrainStep(options=CommunicationOptions(timeout_seconds=...)): --collective_timeout",
    )


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
