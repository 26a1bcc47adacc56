"""Windows of steps that never ran, with known truth: any number of workers, one of them late; and
collectives of plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ctl.inspect.measure.timeline import Timeline, join
from ctl.inspect.measure.window import Pack, Window
from ctl.phases.plan.plan import Collective

PHASES = {"input": 0.001, "forward": 0.004, "backward": 0.008, "apply": 0.001}
TRANSFER = 0.003  # of each pack
BARRIER = 0.0003


def windows(
    workers: int = 2,
    replicas: int = 1,
    steps: int = 20,
    packs: int = 1,
    *,
    late: tuple[int, str, float] | None = None,
    every: int = 1,
    in_order: bool = True,
    offsets: dict[int, float] | None = None,
    noise: float = 0.05,
    seed: int = 0,
    barriers: int = 200,
) -> list[Window]:
    """One window of each worker.

    Args:
        late: ``(worker, phase, seconds)``: that phase of that worker takes so much longer.
        every: it does so only in the steps whose number is a multiple of ``every``.
        in_order: whether each pack waits for the one before it.
        offsets: seconds by which clocks of workers are ahead of worker 0's.
        noise: standard deviation of each duration, relative to it.
    """
    random = np.random.default_rng(seed)
    rows = workers * replicas
    worker_of = np.arange(rows) // replicas

    def takes(phase: str, number: int) -> np.ndarray:
        seconds = PHASES[phase] * np.maximum(0.1, 1 + noise * random.normal(size=rows))
        if late and late[1] == phase and number % every == 0:
            seconds = seconds + np.where(worker_of == late[0], late[2], 0.0)
        return seconds

    names = ["input", "forward", "backward"]
    names += [f"{moment}{k}" for k in range(packs) for moment in ("ready", "done")] + ["apply"]
    now = np.full(rows, 1.7e9)
    stamps = np.zeros([rows, steps + 1, len(names)])
    numbers = np.arange(100, 100 + steps + 1)
    for step, number in enumerate(numbers):
        row = {"input": now + takes("input", number)}
        row["forward"] = row["input"] + takes("forward", number)
        backward = takes("backward", number)
        row["backward"] = row["forward"] + backward
        done = np.full(rows, -np.inf)
        for k in range(packs):
            row[f"ready{k}"] = row["forward"] + backward * (k + 1) / packs
            start = np.maximum(row[f"ready{k}"], done if in_order else 0.0).max()
            transfer = TRANSFER * max(0.1, 1 + noise * random.normal())
            done = start + transfer + 2e-5 * random.random(rows)
            row[f"done{k}"] = done
        reduced = np.max([row[f"done{k}"] for k in range(packs)] + [row["backward"]], axis=0)
        now = reduced + takes("apply", number)
        row["apply"] = now
        stamps[:, step] = np.stack([row[name] for name in names], axis=1)
    arrived = (
        now.max()
        + 0.01
        + BARRIER * (2 * np.arange(barriers)[:, None] + random.random([barriers, workers]))
    )
    left = arrived.max(axis=1, keepdims=True) + 5e-5 + 5e-5 * random.random([barriers, workers])
    ahead = np.array([(offsets or {}).get(worker, 0.0) for worker in range(workers)])
    return [
        Window(
            worker=worker,
            workers=workers,
            steps=numbers,
            names=tuple(names),
            stamps=stamps[worker_of == worker] + ahead[worker],
            packs=tuple(Pack(f"pack{k}", 4_000_000 // packs) for k in range(packs)),
            in_order=in_order,
            barriers=np.stack([arrived[:, worker], left[:, worker]], axis=1) + ahead[worker],
            description=f"simulated: {workers} workers with {replicas} replicas",
        )
        for worker in range(workers)
    ]


def timeline(*arguments: Any, **options: Any) -> Timeline:
    """The `windows`, joined."""
    return join(windows(*arguments, **options))


def without_packs() -> Timeline:
    """Of two workers whose step has a `sum_gradients` of its own, which marks do not show."""
    return join([dataclasses.replace(window, packs=()) for window in windows()])


def with_phases(timeline: Timeline, **phases: np.ndarray) -> Timeline:
    """``timeline`` with other seconds of some phases."""
    return dataclasses.replace(timeline, phases={**timeline.phases, **phases})


def profiled(timeline: Timeline) -> Timeline:
    """As if a profile had shown 1 ms of packing before each collective and 0.5 ms after it."""
    packing = np.full_like(timeline.late, 1.5e-3)
    packs = (
        dataclasses.replace(p, begun=p.start + 1e-3, packing=packing, transfer=p.transfer - packing)
        for p in timeline.packs
    )
    return dataclasses.replace(timeline, packs=tuple(packs))


def collective(name: str, size: int | None, share: float | None, **others: Any) -> Collective:
    """A pack of gradients on two replicas, which needs ``share`` of the backward pass."""
    empty = {field.name: () for field in dataclasses.fields(Collective)}
    known = {"name": name, "purpose": "gradients", "kind": "CollectiveReduceV2", "ops": 1}
    known |= {"dtype": "float32", "shape": None, "bytes": size, "group_size": 2, "hint": "ring"}
    known |= {"group_key": 1, "timeout": None, "in_loop": True, "start_share": share}
    known |= {"full_share": share, "share_by": "flops", "wire_bytes": None}
    return Collective(**(empty | known | others))
