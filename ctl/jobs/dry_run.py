"""What `ctl.train --dry_run` says of a run. Writes no file."""

from __future__ import annotations

import math
import resource
import textwrap
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ctl.base import console, stores
from ctl.checkpoint import manifest
from ctl.jobs.build import Prepared, make_loop, prepare

if TYPE_CHECKING:
    from absl.flags import FlagValues

    from ctl.loop import Loop

_LAYOUT: dict[str, Any] = {"width": console.COLUMNS, "break_on_hyphens": False}
_LAYOUT |= {"subsequent_indent": " " * 14, "break_long_words": False}
_STEPS = 10  # before the time is taken, and then for it


def main(flags: FlagValues) -> None:
    """Builds what ``flags`` describe, trains some steps in memory and prints what it saw.

    Raises:
        UsageError: as a training would.
        CheckpointError: the checkpoints do not fit.
    """
    console.log_to_terminal()
    console.load_tensorflow()

    from ctl.checkpoint.manager import CheckpointManager

    prepared, model_dir = prepare(flags), stores.local(flags.model_dir)
    checkpoints = None
    if manifest.paths(model_dir / "checkpoints"):
        fingerprint = prepared.train.fingerprint()
        checkpoints = CheckpointManager(
            model_dir / "checkpoints",
            fingerprint=fingerprint,
            read_only=True,
        )
    loop = make_loop(prepared, checkpoints)
    saved = loop.restore() if checkpoints else None
    first = loop.global_step
    plan = _plan(loop)
    seconds = _seconds_per_step(loop, first)
    where = f"resumes at step {first} from {saved.path}" if saved else f"begins in {model_dir}"
    lines = _lines(prepared, loop, plan, first, seconds)
    print("\n".join(["", f"dry run: {where}", *(textwrap.fill(line, **_LAYOUT) for line in lines)]))
    print("nothing was written")


def _lines(prepared: Prepared, loop: Loop, plan: str, first: int, seconds: float) -> Iterable[str]:
    step, model = loop.step, loop.step.model
    trained = sum(_size(v) for v in model.trainable_variables)
    weights = sum(_size(v) for v in model.variables)
    slots = sum(_size(v) for group in step.updater.groups for v in group.optimizer.variables)
    slots += sum(_size(v) for v in step.updater.ema)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    left = max(0, prepared.total_steps - first)
    yield f"  data        {prepared.train.description}"
    yield f"  evaluation  {prepared.evaluation.description}"
    yield (
        f"  model       {model.name}: {model.count_params():,} parameters; "
        f"{len(model.trainable_variables)} of {len(model.weights)} weights train"
    )
    yield f"  all-reduce  {plan}"
    yield (
        f"  memory      on each replica: weights {_mib(weights)}, gradients {_mib(trained)}, "
        f"optimizer and averages {_mib(slots)}; this process has used {_mib(peak)}"
    )
    yield f"  length      {left} steps of {prepared.total_steps} are left"
    epoch = prepared.steps_per_epoch
    each = f", an epoch of {epoch:g} steps about {_time(epoch * seconds)}" if epoch else ""
    yield (
        f"  time        a step takes about {_time(seconds)}{each}; what is left "
        f"{_time(left * seconds)}, without evaluations and checkpoints"
    )


def _plan(loop: Loop) -> str:
    """The all-reduces of a step, in a line."""
    plan = loop.plan()
    if plan.replicas == 1:
        return "one replica: nothing is reduced"
    packs = [f"{c.name} {c.dtype} {_mib(c.bytes or 0)} ({c.kind})" for c in plan.collectives]
    others = [c for c in plan.other if c.in_loop]
    if others:
        size = _mib(sum(c.bytes or 0 for c in others))
        packs.append(f"{len(others)} other{'s' if len(others) > 1 else ''} {size}")
    return f"{plan.replicas} replicas, each step: {', '.join(packs)}"


def _seconds_per_step(loop: Loop, first: int) -> float:
    """The time of a step after the first calls, which compile it."""
    loop.stopped = False
    for last in (1, _STEPS):
        loop.train(first + last, total=first + 3 * _STEPS, progress=False)
    start = time.perf_counter()
    loop.train(first + 2 * _STEPS, total=first + 3 * _STEPS, progress=False)
    return (time.perf_counter() - start) / _STEPS


def _size(variable: Any) -> int:
    """Bytes of a variable of Keras or TensorFlow."""
    import tensorflow as tf

    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"
