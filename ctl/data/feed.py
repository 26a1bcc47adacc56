"""Distributes a dataset over replicas, and yields its global batches.

A strategy's iterator passes every element between threads and devices, which takes several times as
long as a small step (`benchmarks/input_pipeline.py`). Where batches are small, such as indices, its
elements are therefore *blocks*: each replica receives its part of several global batches at once,
and the step takes them one by one.

The iterators of `OneDeviceStrategy`, `MirroredStrategy` and `MultiWorkerMirroredStrategy` prefetch
one element to each device: a GPU has its next batch before the step ends. So no dataset needs
``prefetch_to_device``. On CPU devices, which share the host's memory, nothing is copied. Without a
strategy, the step copies its batch itself.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.base import tf_internals
from ctl.data.callbacks import end_before_python
from ctl.data.dataset import Dataset


class Position(NamedTuple):
    """The position of the next batch: a block, and how many of its batches were used."""

    block: Any  # a nest of tensors [n, batches, ...] on each replica
    used: tf.Tensor  # int32 scalar


class Waited(NamedTuple):
    """The position of the next batch where elements are single batches: that of the iterator."""

    seconds: Any  # for which the iterator was waited for, float64 scalar


class Feed(NamedTuple):
    """The source of the batches for the next steps."""

    iterator: Any  # of the strategy
    resident: Any  # see `Dataset.resident`
    position: Position | Waited = Waited(np.float64(0.0))
    batches_per_block: int = 1


class Block(NamedTuple):
    """Batches that are read: those from ``first`` (inclusive) to ``end`` (exclusive)."""

    batches: Any  # a nest of tensors on each replica: one batch, or as in `Position`
    first: tf.Tensor  # int32 scalars
    end: tf.Tensor


def open_feed(
    dataset: Dataset, strategy: tf.distribute.Strategy, start_step: int, resident: Any = ()
) -> Feed:
    """Returns a feed of the global batches of ``dataset`` from ``start_step`` on.

    ``resident``: the result of `Dataset.resident`.
    """
    size = getattr(dataset, "steps_per_element", 1)
    # Blocks need equal shares: the shape of the first position, of no block, is that of all.
    if size == 1 or (dataset.global_batch_size or 0) % strategy.num_replicas_in_sync:
        return Feed(open_batches(dataset, strategy, start_step), resident)
    batches = dataset.batches(start_step)
    options = batches.options()
    batches = batches.batch(size, drop_remainder=True).map(
        lambda *arguments: tf.nest.map_structure(_swap, element_of(arguments))
    )
    iterator = distribute(strategy, batches.prefetch(2).with_options(options))
    used_up = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype),
        iterator.element_spec,
        expand_composites=True,
    )
    return Feed(iterator, resident, Position(used_up, tf.constant(size)), size)


def open_batches(
    dataset: Dataset, strategy: tf.distribute.Strategy, start_step: int = 0, *, again: bool = False
) -> Any:
    """Returns the iterator of the strategy over the global batches of ``dataset`` from
    ``start_step`` on, split over replicas; with ``again``, over and over."""
    if not hasattr(dataset, "shares"):
        batches = dataset.batches(start_step)
        return distribute(strategy, batches.repeat() if again else batches)

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        all_replicas = context.num_replicas_in_sync
        width = all_replicas // context.num_input_pipelines
        first = context.input_pipeline_id * width
        shares = dataset.shares(start_step, range(first, first + width), all_replicas)
        return shares.repeat() if again else shares

    # `experimental_distribute_dataset` would let every worker make whole global batches, and then
    # drop what belongs to the others.
    with tf_internals.devices_without_autotuning():
        return end_before_python(iter(strategy.distribute_datasets_from_function(of_worker)))


def distribute(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> Any:
    """Returns the iterator of the strategy over ``batches``, split over replicas by first axis."""
    with tf_internals.devices_without_autotuning():
        return iter(strategy.experimental_distribute_dataset(batches))


def next_block(
    feed: Feed, position: Position | Waited, steps: tf.Tensor
) -> tuple[Block, Position | Waited]:
    """Returns at most ``steps`` global batches, and the position after them.

    For use in a graph, in cross-replica context. ``steps`` is an int32 scalar.
    """
    if isinstance(position, Waited):
        with tf.control_dependencies([steps]):  # in a loop, of this turn
            asked = tf.timestamp()
        with tf.control_dependencies([asked]):
            # `next` would raise StopIteration at the end without graphs; this, OutOfRangeError.
            batch = feed.iterator.get_next()
        with waiting_for(batch):
            seconds = position.seconds + (tf.timestamp() - asked)
        return Block(batch, tf.constant(0), tf.constant(1)), Waited(seconds)
    block, used = tf.cond(
        tf.equal(position.used, feed.batches_per_block),
        lambda: (feed.iterator.get_next(), tf.constant(0)),
        lambda: tuple(position),
    )
    end = tf.minimum(used + steps, feed.batches_per_block)
    return Block(block, used, end), Position(block, end)


def batch_of(block: Block, number: tf.Tensor | int, batches_per_block: int) -> Any:
    """Returns batch ``number`` of a block, on one replica."""
    if batches_per_block == 1:  # operations that need the batch depend on this identity
        return tf.nest.map_structure(tf.identity, block.batches, expand_composites=True)
    return tf.nest.map_structure(lambda t: tf.gather(t, number, axis=1), block.batches)


def waiting_for(batch: Any) -> contextlib.AbstractContextManager[None]:
    """A context, in a graph, whose operations wait for ``batch``.

    The step that finds the data at their end must change nothing. Much of what changes state does
    not depend on the batch: the seeds of Dropout, or the count of a metric of a static batch size.
    """
    return tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True))


def element_of(arguments: tuple) -> Any:
    """Returns the element for which ``map`` of a dataset calls a function with ``arguments``."""
    return arguments[0] if len(arguments) == 1 else arguments


def _swap(tensor: tf.Tensor) -> tf.Tensor:
    """[steps, n, ...] to [n, steps, ...]: strategies split the first axis."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
