"""Turns a `Timeline` into three lines: what bounds the step, why, and what to try next."""

from __future__ import annotations

import numpy as np

from ctl.base.units import size_text
from ctl.inspect.measure.late_worker import late_worker
from ctl.inspect.measure.link import Measured
from ctl.inspect.measure.timeline import PackTimes, Timeline, of_one_step
from ctl.phases.plan.lints import WORTH_SPLITTING

_MS = 1e3
_HIDDEN = 0.2  # communication of which a smaller share is hidden counts as not hidden
_AFTER = "what follows its backward pass"  # bounds a step whose communication is not measured

_REMEDY = {
    # It begins when the step before ends, so time between calls of the loop is in it.
    "input": "Try a faster input there: its files, its disk; or see what that worker does between "
    "calls of the loop: checkpoints, logs, callbacks.",
    "forward": "See what else runs on that machine, and whether its part of the batch is larger.",
    "backward": "See what else runs on that machine, and whether its part of the batch is larger.",
    "apply": "See what else runs on that machine.",
}


def measure_command(timeline: Timeline) -> str:
    """The command that measures the all-reduce of this machine, for comparison."""
    if timeline.workers > 1:
        how = f"--strategy=multi_worker --workers={timeline.workers}"
    else:
        how = f"--replicas={len(timeline.rows)}"
    return f"python benchmarks/all_reduce.py {how} --json=link.json"


def share_of_measured(pack: PackTimes, measured: Measured | None) -> float | None:
    """The bandwidth of a pack relative to the measured one at its size; None if one is unknown.

    Only noise makes it larger than 1: in training, a pack competes with the backward pass.
    """
    if measured is None or not pack.bytes or not np.isfinite(pack.algbw):
        return None
    return pack.algbw * 1e9 / measured.algbw(pack.bytes)


def verdict(timeline: Timeline, measured: Measured | None = None) -> tuple[str, ...]:
    """Three lines: what bounds the step; why; what to try next. Times are those of `of_one_step`.

    A fourth line names a worker that is late in a rhythm, such as in every 4th step.
    """
    step = of_one_step(timeline.step_seconds)
    late = late_worker(timeline)
    if late is None:
        return _bound(timeline, step, measured)
    why = f"{late.phase} takes {late.excess * _MS:.2f} ms longer than on the others."
    remedy = _REMEDY[late.phase]
    waited = f"{late.seconds * _MS:.2f} ms"
    if late.every == 1:
        first = f"The step takes {step * _MS:.2f} ms and waits for worker {late.worker}: {waited}"
        return f"{first}, {late.when}.", f"Its {why}", remedy
    rhythm = f"Worker {late.worker} is late by {waited} {late.when}: its {why} {remedy}"
    return *_bound(timeline, step, measured), rhythm


def _phases(timeline: Timeline) -> dict[str, float]:
    """Seconds of each phase in a step."""
    return {
        name: float(np.nan_to_num(of_one_step(seconds)))
        for name, seconds in timeline.phases.items()
    }


def bounds(timeline: Timeline) -> dict[str, float]:
    """Seconds of a step for what may bound it, the largest first. If the replicas reduce unseen,
    communication and apply are one."""
    parts = _phases(timeline)
    seconds = {
        "compute": parts["forward"] + parts["backward"],
        "input": parts["input"],
        "apply": parts["apply"],
        "communication": float(np.nan_to_num(of_one_step(timeline.exposed))),
        _AFTER: parts["other"] if timeline.reduce_unseen else 0.0,
    }
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def exposed_parts(timeline: Timeline) -> str:
    """How much of the exposed communication waits for a late replica, and how much is transfer and
    packing: in the proportion of their sums over all steps, since medians would not add up."""
    exposed = float(np.nan_to_num(of_one_step(timeline.exposed))) * _MS
    total = float(np.nansum(timeline.exposed))
    wait = exposed * float(np.nansum(timeline.phases["wait"])) / total if total > 0 else 0.0
    return f"{wait:.2f} ms wait for the last replica, {exposed - wait:.2f} ms transfer"


def _bound(timeline: Timeline, step: float, measured: Measured | None) -> tuple[str, str, str]:
    parts, of = _phases(timeline), bounds(timeline)
    bound = next(iter(of))
    kind = " exposed" if bound == "communication" else ""
    first = (
        f"The step takes {step * _MS:.2f} ms and is bound by {bound}: "
        f"{of[bound] * _MS:.2f} ms{kind}, {of[bound] / max(step, 1e-9):.0%}."
    )
    if bound == "communication":
        return (first, *_communication(timeline, measured, parts))
    exposed = f"{of['communication'] * _MS:.2f} ms of communication are exposed"
    exposed += f" ({exposed_parts(timeline)})"
    if len(timeline.rows) == 1:
        exposed = "one replica has nothing to reduce"
    elif timeline.reduce_unseen:
        exposed = "communication is not measured, because the step sums gradients by itself"
    if bound == "compute":
        split = (
            f"forward {parts['forward'] * _MS:.2f} ms, backward {parts['backward'] * _MS:.2f} ms"
        )
        if np.isnan(timeline.phases["forward"]).all():
            split = "forward and backward cannot be told apart here"
        if np.isnan(timeline.marks["backward"]).all():
            why = f"XLA compiled the whole step as one program; {exposed}."
            return first, why, "Try a larger batch; --jit_compile=off shows the phases separately."
        why = f"{split}; {exposed}."
        return first, why, "Try --jit_compile=auto, --precision=mixed_bfloat16 or a larger batch."
    if bound == "input":
        why = f"Between two steps the replicas wait for their batch; {exposed}."
        return first, why, "Try data that stay resident, a larger batch, or more --steps_per_loop."
    if bound == _AFTER:
        why = f"It reduces, clips and updates the variables; {exposed}."
        return first, why, "See what it moves: `python -m ctl.inspect plan` with the same flags."
    why = f"Clipping and the update of the variables; {exposed}."
    return first, why, "Try a larger batch (fewer updates), or an optimizer with less state."


def _communication(
    timeline: Timeline, measured: Measured | None, parts: dict[str, float]
) -> tuple[str, str]:
    total = of_one_step(timeline.hidden + timeline.exposed)
    hidden = of_one_step(timeline.hidden) / max(total, 1e-9)
    if parts["wait"] > parts["transfer"] + parts["pack"]:
        waiting = f"{parts['wait'] * _MS:.2f} ms are spent waiting for the last replica"
        if timeline.workers == 1:
            why = f"{waiting}: replicas on one CPU share its cores and compute in turn."
        else:
            why = f"{waiting}, and no phase of one worker explains it in most steps."
        return (
            why,
            "Run fewer other jobs on these cores, or try a larger batch: more work per all-reduce.",
        )
    slowest = max(timeline.packs, key=lambda pack: float(np.median(pack.seconds)))
    share = share_of_measured(slowest, measured)
    why = (
        f"{slowest.name} moves {size_text(slowest.bytes)} at a busbw of {slowest.busbw:.3g} GB/s"
        + (f", {share:.0%} of what was measured here" if share is not None else "")
        + f"; {hidden:.0%} of the communication is hidden behind the backward pass."
    )
    size = timeline.bytes
    if measured and slowest.bytes and measured.seconds(slowest.bytes) < 2 * measured.seconds(1):
        return why, "Its latency dominates, not its bytes: try --accumulate_steps or fewer packs."
    # Where the forward pass is not known, XLA or micro-batches give all gradients at once.
    gradual = not np.isnan(timeline.phases["forward"]).all()
    splits = timeline.workers > 1 and gradual and size >= WORTH_SPLITTING
    if hidden < _HIDDEN and len(timeline.packs) == 1 and splits:
        return (
            why,
            f"Try --bytes_per_pack={size // 4}: packs start before the backward pass ends.",
        )
    if measured is None:
        return (
            why,
            f"Compare with the machine: {measure_command(timeline)}, then --bandwidth=link.json.",
        )
    return why, "Try fewer bytes (--precision, a smaller model), or --accumulate_steps."
