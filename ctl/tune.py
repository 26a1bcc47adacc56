"""Tries values of a setting and keeps the fastest: ``--bytes_per_pack=auto``,
``--jit_compile=auto``.

A trial does not affect training: it reads batches of its own and restores every variable on every
replica.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from ctl import workers
from ctl.control.ending import ending_well
from ctl.errors import UsageError
from ctl.marks import Marks
from ctl.observer import NO_OBSERVER
from ctl.reduce import make_packs
from ctl.replicas import shares_variables, synchronizes
from ctl.watch import watchdog

if TYPE_CHECKING:
    from ctl.loop import Loop

# In bytes. A collective takes about a millisecond between machines, mostly latency below this size.
_SMALLEST = 64 << 10
_ROUNDS = 3
_BLOCK_SECONDS = 0.1
_MOST_STEPS = 100  # in a block
# A smaller gain, or one that is missing in a round, is noise. Each pack also adds an operation.
_LEAST_GAIN = 0.03
# What a step raises that XLA cannot compile.
_IMPOSSIBLE = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, UsageError)


def candidates(tensors: Sequence[Any]) -> list[int]:
    """Values of ``bytes_per_pack`` to try: 0 (no limit), then a half, a quarter, an eighth and a
    sixteenth of the size of all ``tensors``, except sizes that give the same packs or are too
    small.

    Args:
        tensors: objects with a ``shape`` and a ``dtype``.
    """
    total = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    found = {0: make_packs(tensors)}
    for parts in (2, 4, 8, 16):
        size = math.ceil(total / parts / 1024) * 1024
        packs = make_packs(tensors, size)
        if size >= _SMALLEST and packs not in found.values():
            found[size] = packs
    return list(found)


def tune_packs(loop: Loop) -> int:
    """Tries pack sizes before ``loop.train`` and sets the fastest as the step's ``bytes_per_pack``.

    All workers must call it; all get the same size, in bytes.
    """
    return _tune(loop, "bytes_per_pack", _best_size)


def tune_jit_compile(loop: Loop) -> bool:
    """Tries both values of ``jit_compile``, as `tune_packs` tries pack sizes.

    On a CPU, XLA may double the speed of small steps and cut that of convolutions to a quarter.
    """
    return _tune(loop, "jit_compile", _best_jit_compile)


def _tune(loop: Loop, name: str, best: Callable[[Loop], Any]) -> Any:
    with ending_well(loop, f"the trial of {name}"):
        loop.begin(loop.global_step)
        setattr(loop.step, name, best(loop))
    loop.scalars.reset()
    return getattr(loop.step, name)


def _best_size(loop: Loop) -> int:
    if loop.strategy.num_replicas_in_sync == 1:
        logging.info("bytes_per_pack: 0, there is one replica and nothing to reduce")
        return 0
    sizes = candidates(loop.step.reduced_specs())
    if len(sizes) == 1:
        logging.info("bytes_per_pack: 0, the gradients are too small to cut")
        return 0
    return _fastest(loop, "bytes_per_pack", sizes)


def _best_jit_compile(loop: Loop) -> bool:
    if shares_variables(loop.strategy):
        logging.info("jit_compile: off, replicas share their variables")
        return False
    if synchronizes(loop.strategy, loop.step.parts.layer):
        logging.info("jit_compile: off, replicas exchange the statistics of BatchNormalization")
        return False
    return _fastest(loop, "jit_compile", [False, True])


def _fastest(loop: Loop, name: str, values: Sequence[Any]) -> Any:
    """The fastest of ``values`` for ``name``; the first if the gain or the data are too small."""
    # Tracing each value takes as long as a first step. The state is held twice meanwhile.
    step, strategy = loop.step, loop.strategy
    first = values[0]
    try:
        with preserved(strategy, [v for values in step.state().values() for v in values]):
            times = _time(loop, name, values)
    except tf.errors.OutOfRangeError:
        logging.warning("%s: %s, the dataset has too few batches to try others", name, first)
        return first
    typical = {value: statistics.median(seconds) for value, seconds in times.items()}
    best = min(typical, key=typical.__getitem__)
    always = all(mine < other for mine, other in zip(times[best], times[first], strict=True))
    if not always or typical[best] > (1 - _LEAST_GAIN) * typical[first]:
        best = first
    tried = ", ".join(f"{value}: {1e3 * seconds:.3g} ms" for value, seconds in typical.items())
    logging.info("%s: %s is kept; tried %s per step", name, best, tried)
    return best


def _time(loop: Loop, name: str, values: Sequence[Any]) -> dict[Any, list[float]]:
    """Seconds per step of each block on the slowest worker, for each value that compiles."""
    step, strategy = loop.step, loop.strategy
    before, observer = getattr(step, name), step.observer
    if isinstance(observer, Marks):
        step.observer = NO_OBSERVER  # the marks belong to the packs of `before`
    nothing = tf.zeros([3])  # the report to the other workers
    feed = loop.steps.open(loop.global_step)

    def block(value: Any, steps: int, traces: bool = False) -> float:
        nonlocal feed
        setattr(step, name, value)
        start = time.perf_counter()
        with watchdog.collective(f"trying {name}={value}", first=traces):
            outcome = loop.steps.run(feed, tf.constant(steps), nothing, step.trace_key)
            outcome.totals()
        feed = feed._replace(position=outcome.position)
        return (time.perf_counter() - start) / steps

    try:
        for value in list(values):
            try:
                block(value, 1, traces=True)
            except _IMPOSSIBLE as error:
                if value == values[0]:
                    raise
                reason = getattr(error, "message", str(error)).strip().partition("\n")[0]
                logging.warning("%s: %s is not possible: %.200s", name, value, reason)
                values = [other for other in values if other != value]
        alone = _slowest(strategy, [min(block(values[0], 2), block(values[0], 2))])[0]
        steps = min(_MOST_STEPS, max(2, int(_BLOCK_SECONDS / alone)))
        rounds = [[block(value, steps) for value in values] for _ in range(_ROUNDS)]
    finally:
        setattr(step, name, before)
        step.observer = observer
    rounds = [_slowest(strategy, seconds) for seconds in rounds]
    return dict(zip(values, map(list, zip(*rounds, strict=True)), strict=True))


def _slowest(strategy: tf.distribute.Strategy, seconds: Sequence[float]) -> list[float]:
    """The maximum over workers of each of ``seconds``; every worker must call it."""
    if not workers.is_multi_worker(strategy):
        return list(seconds)
    texts = workers.all_gather(strategy, json.dumps(seconds).encode(), "a gather")
    return [max(values) for values in zip(*map(json.loads, texts), strict=True)]


@contextlib.contextmanager
def preserved(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Restores ``variables`` on exit, on each replica to its own value."""
    parts = [p for v in variables for p in strategy.experimental_local_results(v)]
    values = [part.read_value() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
