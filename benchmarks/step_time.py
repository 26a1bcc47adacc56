"""How long does a step take in ctl's loop, in a plain TensorFlow loop, and at the least?

    python benchmarks/step_time.py --model=dense --global_batch_size=64
    python benchmarks/step_time.py --model=convnet --replicas=2 --global_batch_size=128

Every variant trains in a process of its own (`peers/`), in blocks of --steps steps. The blocks of
the variants are interleaved, so that all see the same disturbances of the machine. How the numbers
are derived is in README.md.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from absl import flags
from processes import Peer, machine, progress, started

from ctl.errors import CtlError, UsageError
from ctl.flags import group, run
from ctl.names import check_model_name

# Variant -> its peer and what tells it from the peer's default. A `bound` sees one batch only: it
# has no input pipeline, and does not learn the task.
VARIANTS = {
    "ctl": ["ctl_loop.py"],
    "ctl_xla": ["ctl_loop.py", "--jit_compile"],
    "plain": ["plain_loop.py"],
    "plain_xla": ["plain_loop.py", "--jit_compile"],
    "bound": ["plain_loop.py", "--fixed_batch"],
    "bound_xla": ["plain_loop.py", "--fixed_batch", "--jit_compile"],
}

with group("What is measured"):
    _VARIANTS = flags.DEFINE_list("variants", "ctl,plain,bound,bound_xla", ", ".join(VARIANTS))
    _REFERENCE = flags.DEFINE_string("reference", "plain", "the variant that ratios are over")
    _MODEL = flags.DEFINE_string("model", "dense", "a model of ctl.models")
    _BATCH = flags.DEFINE_integer("global_batch_size", 64, "examples per step", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 1, "replicas; logical CPU devices where there is no GPU", lower_bound=1
    )
with group("How"):
    _PROCESSES = flags.DEFINE_integer(
        "processes", 2, "processes of each variant, one after the other", lower_bound=1
    )
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "rounds of each process", lower_bound=1)
    _BLOCKS = flags.DEFINE_integer("blocks", 2, "blocks of each variant in a round", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 1000, "steps of a block", lower_bound=1)
    _WARM_UP = flags.DEFINE_integer(
        "warm_up", 3, "blocks before the first round, not timed", lower_bound=1
    )
    _TOLERANCE = flags.DEFINE_float(
        "tolerance", 0.2, "largest relative difference of the final losses", lower_bound=0.0
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def train(peer: Peer, steps: int) -> dict[str, Any]:
    """One block: ``{"steps": int, "seconds": float, "cpu_seconds": float, "loss": float}``."""
    peer.say(str(steps))
    return peer.answer(_TIMEOUT.value)


def measure(
    variants: Sequence[str], arguments: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float], dict[str, dict]]:
    """Of each variant: ms per step of every round, wall and CPU; the loss of the last block; what
    it says of itself. A round's time is the median of its blocks."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    cpu: dict[str, list[float]] = {variant: [] for variant in variants}
    losses: dict[str, float] = {}
    about: dict[str, dict] = {}
    for process in range(_PROCESSES.value):
        commands = {variant: [*VARIANTS[variant], *arguments] for variant in variants}
        with started(commands) as peers:
            for peer in peers:
                progress(f"process {process + 1}/{_PROCESSES.value}: {peer.name} warms up")
                about[peer.name] = peer.answer(_TIMEOUT.value)
                for _ in range(_WARM_UP.value):
                    train(peer, _STEPS.value)
            for number in range(_ROUNDS.value):
                shift = number % len(peers)  # nobody always comes first
                for peer in peers[shift:] + peers[:shift]:
                    progress(
                        f"process {process + 1}/{_PROCESSES.value}, "
                        f"round {number + 1}/{_ROUNDS.value}: {peer.name}"
                    )
                    blocks = [train(peer, _STEPS.value) for _ in range(_BLOCKS.value)]
                    for of, key in ((times, "seconds"), (cpu, "cpu_seconds")):
                        of[peer.name].append(
                            statistics.median(1e3 * b[key] / b["steps"] for b in blocks)
                        )
                    losses[peer.name] = blocks[-1]["loss"]
    progress("")
    return times, cpu, losses, about


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raises `CtlError` unless the variants that learn the task ended at the same loss."""
    learned = {v: loss for v, loss in losses.items() if not v.startswith("bound")}
    middle = statistics.median(learned.values())
    for variant, loss in learned.items():
        if not abs(loss - middle) <= tolerance * middle:
            raise CtlError(
                f"{variant} does not learn what the others do: its loss is {loss:.4f}, theirs "
                f"{middle:.4f}; its times mean nothing (see --tolerance)"
            )


def _check() -> None:
    check_model_name(_MODEL.value)
    for name in [*_VARIANTS.value, _REFERENCE.value]:
        if name not in VARIANTS:
            raise UsageError(f"unknown variant {name!r}: the choices are {', '.join(VARIANTS)}")
    if _REFERENCE.value not in _VARIANTS.value:
        raise UsageError(f"--reference={_REFERENCE.value} is not among --variants")


def main() -> None:
    _check()
    arguments = [
        f"--model={_MODEL.value}",
        f"--global_batch_size={_BATCH.value}",
        f"--replicas={_REPLICAS.value}",
    ]
    load = os.getloadavg()[0]
    times, cpu, losses, about = measure(_VARIANTS.value, arguments)
    reference = times[_REFERENCE.value]
    rows = {
        variant: {
            "milliseconds": summary(values),
            "cpu_milliseconds": summary(cpu[variant]),
            "ratio": summary([a / b for a, b in zip(values, reference, strict=True)]),
            "loss": losses[variant],
            "rounds": values,
            **about[variant],
        }
        for variant, values in times.items()
    }
    settings = {
        flag.name: flag.value
        for flag in (_MODEL, _BATCH, _REPLICAS, _REFERENCE, _PROCESSES, _ROUNDS, _BLOCKS, _STEPS)
    }
    about_machine = machine(load)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(
            json.dumps({"settings": settings, "machine": about_machine, "variants": rows}, indent=1)
        )
    print(" ".join(f"{k}={v}" for k, v in (settings | about_machine).items()))
    print(
        f"{'':10}{'ms/step':>9}{'min':>9}{'max':>9}{'ratio':>9}{'min':>7}{'max':>7}"
        f"{'CPU ms':>10}{'loss':>10}"
    )
    for variant, row in rows.items():
        ms, ratio = row["milliseconds"], row["ratio"]
        print(
            f"{variant:10}{ms['median']:9.3f}{ms['min']:9.3f}{ms['max']:9.3f}"
            f"{ratio['median']:9.2f}{ratio['min']:7.2f}{ratio['max']:7.2f}"
            f"{row['cpu_milliseconds']['median']:10.3f}{row['loss']:10.4f}"
        )
    check_losses(losses, _TOLERANCE.value)


if __name__ == "__main__":
    run(main, __doc__)
