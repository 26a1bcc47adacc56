"""Which part of the input is the slowest: each is timed alone, on the data of a loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl.data.feed import Block, batch_of, open_feed
from ctl.distributed import workers

if TYPE_CHECKING:
    from ctl.loop import Loop

# Of each part, so many elements are timed; after some seconds, fewer.
_ELEMENTS, _FEW, _SECONDS = 32, 3, 3.0
_CALLS = 8  # a multiple of those that read at the same time
_MS = 1e3

_REMEDY = {
    "reading": "--shuffle_block=16, a disk of this machine, or more workers: each reads its share",
    "decoding": "smaller images in the files, --resident_limit_mib if all fit decoded, more cores, "
    "or more workers: each decodes its share",
    "the tf.data.Dataset": "cache(), map(..., num_parallel_calls=...) and prefetch() in it",
    "the order of examples": "a larger batch, or more --steps_per_loop",
    "handing over": "smaller examples, such as uint8 that the step scales, or a larger batch",
    "augmenting": "fewer or cheaper operations of --augment",
    "gathering": "smaller examples, such as uint8 that the step scales",
}


def input_parts(loop: Loop) -> dict[str, float]:
    """Seconds that each part of the input takes for this worker's share of a batch, alone.

    ``reading`` and ``decoding`` are those of `ctl.data.Streaming`; other datasets have one part for
    both. ``handing over`` is the iterator of the strategy, with the copy to its devices.
    ``augmenting``, or ``gathering`` of the examples of an order, is what a replica makes of its
    share before the step. With several workers, only the parts before the iterator of the
    strategy are timed: the others do not take part.
    """
    dataset: Any = loop.dataset
    strategy = loop.strategy
    several = workers.is_multi_worker(strategy)
    replicas = strategy.num_replicas_in_sync
    width = replicas // (len(workers.cluster_of(strategy).workers) if several else 1)
    parts: dict[str, float] = {}
    if hasattr(dataset, "undecoded"):
        undecoded = dataset.undecoded(0, range(width), replicas)
        _, together = dataset.equal_shares(replicas)
        parts["reading"] = width * _seconds(undecoded, _CALLS * together)
        share = dataset.decoded(_again(undecoded))
        parts["decoding"] = width * _seconds(share, len(os.sched_getaffinity(0)))
    else:
        share = dataset.batches(0)
        name = "the order of examples" if hasattr(dataset, "arrays") else "the tf.data.Dataset"
        parts[name] = _seconds(share)
    if several:
        return parts
    # As the loop iterates over its data, which it reads in blocks where these are small.
    made_before, size = _again(share), getattr(dataset, "steps_per_element", 1)
    how = "shares" if hasattr(dataset, "undecoded") else "batches"
    same: Any = SimpleNamespace(
        **{how: lambda *_: made_before},
        steps_per_element=size,
        global_batch_size=dataset.global_batch_size,
    )
    feed: Any = open_feed(same, strategy, 0)
    parts["handing over"] = _seconds(feed.iterator) / size
    if hasattr(dataset, "operations") or hasattr(dataset, "arrays"):
        block, resident = next(feed.iterator), loop.steps.open(loop.global_step).resident

        def on_replica(block: Any, resident: Any) -> Any:
            return dataset.on_replica(batch_of(Block(block, 0, 1), 0, size), resident)

        @tf.function(autograph=False)
        def make() -> Any:
            return strategy.run(on_replica, args=(block, resident))

        name = "augmenting" if hasattr(dataset, "operations") else "gathering"
        parts[name] = _seconds(iter(make, None))
    return parts


def explain(parts: dict[str, float], step: float) -> tuple[str, str]:
    """Two lines: what each of the `input_parts` takes alone; which is the bound, and what to try.

    ``step``: seconds of a step.
    """
    slowest = max(parts, key=lambda name: parts[name])
    each = ", ".join(f"{name} {seconds * _MS:.2f} ms" for name, seconds in parts.items())
    bound = f"{slowest[0].upper()}{slowest[1:]} is the bound: try {_REMEDY[slowest]}."
    if sum(parts.values()) < step / 2:
        bound = "None of them is slow: they wait for cores that the step uses. Try more cores."
    return f"Timed alone, the parts of the input take for each batch: {each}.", bound


def _again(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The first element of ``dataset``, over and over."""
    element = next(iter(dataset))
    again = tf.data.Dataset.from_tensors(element).repeat()
    return again.with_options(dataset.options())


def _seconds(elements: Iterable[Any], together: int = 1) -> float:
    """The seconds between two elements, of which ``together`` are made at the same time."""
    iterator = iter(elements)
    # The clock starts when the first of those that are made together is there, and stops so.
    for _ in range(1 + together):
        next(iterator)  # starts threads, and traces
    start, count = time.perf_counter(), 0
    least = max(_ELEMENTS, 2 * together)
    while count < _FEW or (count < least and time.perf_counter() < start + _SECONDS):
        for _ in range(together):
            element = next(iterator)
        count += together
    tf.nest.flatten(element, expand_composites=True)[-1].numpy()  # waits for a GPU
    return (time.perf_counter() - start) / count
