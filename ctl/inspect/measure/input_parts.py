"""Which part of the input is the slowest: each is timed alone, on the data of a loop."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl import workers
from ctl.data.feed import distribute

if TYPE_CHECKING:
    from ctl.loop import Loop

# Of each part, so many elements are timed; after some seconds, fewer.
_ELEMENTS, _FEW, _SECONDS = 32, 3, 3.0
_AHEAD = 8  # calls: more than those that read at the same time
_MS = 1e3

_REMEDY = {
    "reading": "--shuffle_block=16, a disk of this machine, or more workers: each reads its share",
    "decoding": "smaller images in the files, --resident_limit_mib if all fit decoded, more cores, "
    "or more workers: each decodes its share",
    "the tf.data.Dataset": "cache(), map(..., num_parallel_calls=...) and prefetch() in it",
    "the order of examples": "a larger batch, or more --steps_per_loop",
    "handing over": "smaller examples, such as uint8 that the step scales, or a larger batch",
    "augmenting": "fewer or cheaper operations of --augment",
}


def input_parts(loop: Loop) -> dict[str, float]:
    """Seconds that each part of the input takes for this worker's share of a batch, alone.

    ``reading`` and ``decoding`` are those of `ctl.data.Streaming`; other datasets have one part for
    both. ``handing over`` is the iterator of the strategy, with the copy to its devices.
    ``augmenting`` is what a replica makes of its share before the step. With several workers, only
    the parts before the iterator of the strategy are timed: the others do not take part.
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
        parts["reading"] = width * _seconds(undecoded, together)
        share = dataset.decoded(_again(undecoded))
        parts["decoding"] = width * _seconds(share)
    else:
        share = dataset.batches(0)
        name = "the order of examples" if hasattr(dataset, "arrays") else "the tf.data.Dataset"
        parts[name] = _seconds(share)
    if several:
        return parts
    share = _again(share)
    if hasattr(dataset, "undecoded"):
        handed = iter(strategy.distribute_datasets_from_function(lambda _: share))
    else:
        handed = distribute(strategy, share)
    parts["handing over"] = _seconds(handed)
    if hasattr(dataset, "operations"):
        element, resident = next(handed), loop.steps.open(loop.global_step).resident

        @tf.function(autograph=False)
        def augment() -> Any:
            return strategy.run(dataset.on_replica, args=(element, resident))

        parts["augmenting"] = _seconds(iter(augment, None))
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
    return f"Alone, the parts of the input take for a batch: {each}.", bound


def _again(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The first element of ``dataset``, over and over."""
    element = next(iter(dataset))
    again = tf.data.Dataset.from_tensors(element).repeat()
    return again.with_options(dataset.options())


def _seconds(elements: Iterable[Any], together: int = 1) -> float:
    """The seconds between two elements, of which ``together`` are made at once."""
    iterator = iter(elements)
    for _ in range(1 if together == 1 else _AHEAD * together):
        next(iterator)  # starts threads, and traces
    start, count = time.perf_counter(), 0
    while count < _FEW or (count < _ELEMENTS and time.perf_counter() < start + _SECONDS):
        for _ in range(together):
            element = next(iterator)
        count += together
    tf.nest.flatten(element, expand_composites=True)[-1].numpy()  # waits for a GPU
    return (time.perf_counter() - start) / count
