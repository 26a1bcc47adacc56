"""The only place that gives a dataset to a strategy and takes its global batches out again.

A strategy's iterator hands every element from thread to thread and from device to device: several
times what a small step takes (`benchmarks/input_pipeline.py`). Where batches are small, as indices
are, its elements are therefore *blocks*: each replica has its part of several global batches at
once, and the step takes one of them after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl import private


class Feed:
    """The global batches of a dataset from one step on.

    Attributes:
        iterator: of the strategy.
        in_blocks: whether its elements are blocks; else each is a global batch.
        position: what `next_block` needs beside it: ``()``, or the block (a nest of tensors [n,
            steps, ...] on each replica) and how many of its steps were taken, int32 scalar.
    """

    def __init__(self, dataset: Any, strategy: tf.distribute.Strategy, start_step: int):
        """``dataset``: see `ctl.data.dataset.Dataset`."""
        batches = dataset.batches(start_step)
        steps = getattr(dataset, "steps_per_element", 1)
        self.in_blocks = steps > 1
        self.position: tuple = ()
        if self.in_blocks:
            options = batches.options()
            batches = batches.batch(steps, drop_remainder=True).map(
                lambda *arguments: tf.nest.map_structure(_swap, element_of(arguments))
            )
            batches = batches.prefetch(2).with_options(options)
        self.iterator = distribute(strategy, batches)
        if self.in_blocks:
            spec = self.iterator.element_spec
            none = tf.nest.map_structure(
                lambda s: tf.zeros(s.shape, s.dtype), spec, expand_composites=True
            )
            self.position = none, tf.constant(steps)


def distribute(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> Iterator:
    """The iterator of the strategy over ``batches``, whose first axis it splits over replicas."""
    with private.devices_without_autotuning():
        return iter(strategy.experimental_distribute_dataset(batches))


def next_block(
    iterator: Iterator, position: tuple, most: tf.Tensor
) -> tuple[Any, tf.Tensor, tf.Tensor, tuple]:
    """What is at hand of the next ``most`` global batches; in a graph, in cross-replica context.

    Returns:
        The block; the number of the first batch to take from it; how many to take; the position
        after them.
    """
    if not position:
        return next(iterator), tf.constant(0), tf.constant(1), position
    block, used = position
    steps = tf.nest.flatten(block, expand_composites=True)[0].shape[1]
    if used == steps:
        block, used = next(iterator), 0
    count = tf.minimum(steps - used, most)
    return block, used, count, (block, used + count)


@tf.autograph.experimental.do_not_convert
def batch_of(block: Any, number: tf.Tensor | int, in_blocks: bool) -> Any:
    """Batch ``number`` of a block, on one replica; ``in_blocks`` of the `Feed`."""
    if not in_blocks:  # an operation of its own: what must wait for the batch waits for that
        return tf.nest.map_structure(tf.identity, block, expand_composites=True)
    return tf.nest.map_structure(lambda t: tf.gather(t, number, axis=1), block)


@tf.autograph.experimental.do_not_convert
def element_of(arguments: tuple) -> Any:
    """The element of a dataset whose ``map`` has called a function with these arguments."""
    return arguments[0] if len(arguments) == 1 else arguments


@tf.autograph.experimental.do_not_convert
def _swap(tensor: tf.Tensor) -> tf.Tensor:
    """[steps, n, ...] to [n, steps, ...]: strategies split the first axis."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
