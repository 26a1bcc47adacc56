"""Windows of runs that never were: what workers would have seen, from durations that are known."""

from __future__ import annotations

import numpy as np

from ctl.inspect.plan import Collective, Member, Plan
from ctl.inspect.window import Pack, Window

PACK_BYTES = 2_500_000


def windows(
    workers: int = 2,
    replicas: int = 1,
    steps: int = 20,
    packs: int = 2,
    late: int | None = None,
    late_seconds: float = 0.02,
    seed: int = 0,
    description: str = "convnet, global batch 128",
) -> list[Window]:
    """The windows of all workers: input 0.6 ms, forward 2 ms, backward 5 ms, packs of 3 ms, apply
    1 ms, all with noise; worker ``late`` needs ``late_seconds`` more for its input in all steps."""
    random = np.random.default_rng(seed)
    names = ["input", "forward", "backward"]
    for pack in range(packs):
        names += [f"ready{pack}", f"done{pack}"]
    names.append("apply")
    rows = workers * replicas
    stamps = np.zeros([rows, steps, len(names)])
    at = np.full(rows, 1.7e9)

    def some(milliseconds: float, shape: int = rows) -> np.ndarray:
        return milliseconds * 1e-3 * random.lognormal(0.0, 0.1, shape)

    for step in range(steps):
        mark = {"input": at + some(0.6)}
        if late is not None:
            mark["input"][late * replicas : (late + 1) * replicas] += late_seconds
        mark["forward"] = mark["input"] + some(2.0)
        mark["backward"] = mark["forward"] + some(5.0)
        before = np.zeros(rows)
        for pack in range(packs):
            share = (pack + 1) / packs
            mark[f"ready{pack}"] = mark["forward"] * (1 - share) + mark["backward"] * share
            start = np.maximum(mark[f"ready{pack}"], before)
            before = mark[f"done{pack}"] = start.max() + some(3.0)
        at = mark["apply"] = np.maximum(before, mark["backward"]) + some(1.0)
        stamps[:, step] = np.stack([mark[name] for name in names], axis=1)
    arrived = 1.7e9 - 1 + 0.01 * np.arange(8.0)
    barriers = np.stack([arrived, arrived + 1e-4], axis=1) if workers > 1 else np.zeros([0, 2])
    return [
        Window(
            worker=worker,
            workers=workers,
            steps=np.arange(100, 100 + steps),
            names=tuple(names),
            stamps=stamps[worker * replicas : (worker + 1) * replicas],
            packs=tuple(Pack(f"pack{pack}", PACK_BYTES) for pack in range(packs)),
            in_order=True,
            barriers=barriers,
            description=description,
        )
        for worker in range(workers)
    ]


def plan(packs: int = 2, replicas: int = 2, variables: int = 4, name: str = "dense/kernel") -> Plan:
    """A plan with that many ``variables`` in each pack, called ``name`` and a number."""
    collectives = [
        Collective(
            name=f"pack{pack}",
            purpose="gradients",
            kind="CollectiveReduceV2",
            ops=1,
            dtype="float32",
            shape=(PACK_BYTES // 4,),
            bytes=PACK_BYTES,
            group_size=replicas,
            group_key=1,
            hint="ring",
            timeout=300.0,
            devices=("CPU:0",),
            in_loop=True,
            after=(f"pack{pack - 1}",) if pack else (),
            members=tuple(
                Member((f"{name}{variables * pack + i}",), (250, PACK_BYTES // 1000), PACK_BYTES)
                for i in range(variables)
            ),
            start_share=(pack + 1) / packs,
            full_share=(pack + 1) / packs,
            share_by="flops",
            wire_bytes=PACK_BYTES,
            sparse=False,
        )
        for pack in range(packs)
    ]
    return Plan("MultiWorkerMirroredStrategy", replicas, replicas, tuple(collectives), ())
