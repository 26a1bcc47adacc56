"""Tries sizes of packs on a few steps and keeps the fastest: ``--bytes_per_pack=auto``.

Nothing else of a training sees the trial: it has batches of its own, and every variable on every
replica is put back as it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from ctl import watchdog, workers
from ctl.global_batches import devices_without_autotuning
from ctl.reduce import make_packs

if TYPE_CHECKING:
    from ctl.loop import Loop

# One collective costs about a millisecond between machines; below this it moves next to nothing.
_SMALLEST = 64 << 10
_ROUNDS = 3
_BLOCK_SECONDS = 0.1
_MOST_STEPS = 100  # of a block
# A gain that is smaller is noise. Packs have a price too: each is an operation more.
_LEAST_GAIN = 0.03


def candidates(tensors: Sequence[Any]) -> list[int]:
    """Values of ``bytes_per_pack`` that cut ``tensors``, which have a shape and a dtype, into
    different packs: one pack (0), then halves, quarters, down to sixteenths of all."""
    total = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    found = {0: make_packs(tensors)}
    for parts in (2, 4, 8, 16):
        size = math.ceil(total / parts / 1024) * 1024
        packs = make_packs(tensors, size)
        if size >= _SMALLEST and packs not in found.values():
            found[size] = packs
    return list(found)


def tune_packs(loop: Loop) -> int:
    """Tries sizes of packs before ``loop.train``, keeps the fastest and returns it, the same on all
    workers; all must call it. Nothing else of the training changes."""
    with loop._ending_well("the trial of packs"):
        loop._start(loop.global_step)
        loop.cut(fastest(loop))
    loop._reset_window()
    return loop.step.bytes_per_pack


def fastest(loop: Loop) -> int:
    """The ``bytes_per_pack`` with which the steps of ``loop`` take the least time, the same on all
    workers; all must call it.

    Each candidate is traced, which takes as long as the first step of a training, then steps of all
    are timed in turn. While it runs, the state of the training is held twice.
    """
    step, strategy = loop.step, loop.strategy
    if strategy.num_replicas_in_sync == 1:
        logging.info("bytes_per_pack: 0, there is one replica and nothing to reduce")
        return 0
    sizes = candidates(step.reduced_specs())
    if len(sizes) == 1:
        logging.info("bytes_per_pack: 0, the gradients are too small to cut")
        return 0
    try:
        with preserved(strategy, [v for values in step.state().values() for v in values]):
            times = _time(loop, sizes)
    except tf.errors.OutOfRangeError:
        logging.warning("bytes_per_pack: 0, the dataset has too few batches to try others")
        return 0
    typical = {size: statistics.median(seconds) for size, seconds in times.items()}
    best = min(sizes, key=typical.get)
    if typical[best] > (1 - _LEAST_GAIN) * typical[0]:
        best = 0
    tried = ", ".join(f"{size}: {1e3 * typical[size]:.3g} ms" for size in sizes)
    logging.info("bytes_per_pack: %d is kept; tried %s per step", best, tried)
    return best


def _time(loop: Loop, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Seconds per step of each block, for each of ``sizes``: those of the slowest worker."""
    step, strategy = loop.step, loop.strategy
    before = step.bytes_per_pack, step.marks
    step.marks = None  # they are those of other packs
    nothing = tf.zeros([2])  # to report to the other workers
    batches = loop.dataset.batches(loop.global_step)
    with devices_without_autotuning():
        iterator = iter(strategy.experimental_distribute_dataset(batches))

    def block(size: int, steps: int, traces: bool = False) -> float:
        step.bytes_per_pack = size
        start = time.perf_counter()
        with watchdog.collective(f"trying bytes_per_pack={size}", first=traces):
            loop.run_steps(iterator, steps, nothing)[0].numpy()
        return (time.perf_counter() - start) / steps

    try:
        for size in sizes:
            block(size, 1, traces=True)
        alone = _slowest(strategy, [min(block(0, 2), block(0, 2))])[0]
        steps = min(_MOST_STEPS, max(2, int(_BLOCK_SECONDS / alone)))
        rounds = [[block(size, steps) for size in sizes] for _ in range(_ROUNDS)]
    finally:
        step.bytes_per_pack, step.marks = before
    rounds = [_slowest(strategy, seconds) for seconds in rounds]
    return dict(zip(sizes, map(list, zip(*rounds, strict=True)), strict=True))


def _slowest(strategy: tf.distribute.Strategy, seconds: Sequence[float]) -> list[float]:
    """Of each of ``seconds`` the most that any worker has; every worker must call it."""
    if not workers.is_multi_worker(strategy):
        return list(seconds)
    texts = workers.all_gather(strategy, json.dumps(seconds).encode(), "a gather")
    return [max(values) for values in zip(*map(json.loads, texts), strict=True)]


@contextlib.contextmanager
def preserved(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Afterwards ``variables`` are what they were before, each replica's own value included."""
    parts = [p for v in variables for p in strategy.experimental_local_results(v)]
    values = [part.read_value() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
