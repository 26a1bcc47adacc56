"""A replica's share of a global batch: how many examples it has, its micro-batches, and what is
computed where it has none.

TensorFlow splits 9 examples over 4 replicas as 3, 3, 3 and 0. A convolution of 0 examples can abort
the process and BatchNorm makes NaN of them, so a replica without examples computes with one example
of zeros, and its result is dropped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError

# What an operation that has failed while the graph ran says to users, by its name.
_LOSSES, _EMPTY = "ctl_one_loss_for_each_example", "ctl_no_empty_share"
_CHECKS = {
    _LOSSES: (
        "loss() must return one loss for each example of the replica, [n]; the mean over the "
        "examples is taken later, and other axes must be summed or averaged in loss()"
    ),
    _EMPTY: (
        "a batch has left a replica without examples, where a synchronized BatchNormalization "
        "cannot train: give batches of one size, for instance with drop_remainder=True"
    ),
}


@tf.autograph.experimental.do_not_convert
def rows(batch: Any) -> int | tf.Tensor:
    """Examples in ``batch``, the leading dimension of its first dense tensor: a Python integer
    where the type of the batch promises it, else an int32 scalar."""
    leaves = tf.nest.flatten(batch)
    dense = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0]
    if not dense:
        raise UsageError("no tensor of a batch has its examples as the first axis")
    first = dense[0]
    static = first.shape[0] if first.shape.rank else None
    return static or tf.shape(first)[0]


@tf.autograph.experimental.do_not_convert
def unpack(batch: Any) -> tuple[Any, Any, tf.Tensor | None]:
    """``(features, labels[, weights])`` with the missing weights as None; weights [n, 1] as [n]."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise UsageError(
            "a batch must be (features, labels) or (features, labels, weights); for any other form "
            "override loss(), count() and update_metrics()"
        )
    features, labels, *weights = batch
    if not weights or weights[0] is None:
        return features, labels, None
    (weights,) = weights
    if weights.shape.rank == 2 and weights.shape[1] == 1:
        weights = tf.squeeze(weights, axis=1)
    return features, labels, weights


@tf.autograph.experimental.do_not_convert
def micro_batches(batch: Any, parts: int) -> list[tuple[Any, Callable[[tf.Tensor], Any]]]:
    """Cuts ``batch`` into ``parts`` micro-batches whose sizes differ by at most one example; into
    fewer where it has fewer examples, so that none but an only one is empty.

    Returns:
        At most two groups, each of micro-batches of one size: how many there are, and a function
        that gives one by its number. XLA needs one size: a slice whose size depends on the counter
        of a loop is silently wrong there (TensorFlow 2.21).
    """
    count = rows(batch)
    low, high = (min, max) if isinstance(count, int) else (tf.minimum, tf.maximum)
    some = low(count, 1)
    least, longer = count // parts, count % parts
    shorter = low(high(count, 1), parts) - longer
    groups = []
    for number, size, from_end in ((shorter, high(least, some), False), (longer, least + 1, True)):
        if isinstance(number, int) and not number:
            continue
        # XLA compiles a loop that has no iteration, too, and none can take a part of nothing.
        length = high(number, some)
        begin = count - length * size if from_end else 0
        stacks = [_stack(tensor, begin, length, size) for tensor in tf.nest.flatten(batch)]
        groups.append((number, functools.partial(_pick, batch, stacks)))
    return groups


def _pick(batch: Any, stacks: list[Callable[[tf.Tensor], Any]], part: tf.Tensor) -> Any:
    return tf.nest.pack_sequence_as(batch, [stack(part) for stack in stacks])


def _stack(tensor: Any, begin: Any, length: Any, size: Any) -> Callable[[tf.Tensor], Any]:
    """Gives one of ``length`` parts of ``size`` examples of ``tensor``, from ``begin`` on."""
    if not isinstance(tensor, tf.Tensor):  # ragged; XLA takes none
        return lambda part: tensor[begin + part * size : begin + (part + 1) * size]
    shape = tf.concat([[length, size], tf.shape(tensor)[1:]], axis=0)
    stack = tf.reshape(tensor[begin : begin + length * size], shape)
    static = [n if isinstance(n, int) else None for n in (length, size)]
    stack.set_shape([*static, *tensor.shape[1:]])
    return lambda part: stack[part]


@tf.autograph.experimental.do_not_convert
def filled(batch: Any) -> tuple[Any, tf.Tensor | None]:
    """What to compute with: ``batch``, or one example of zeros where it has no examples.

    Returns:
        The batch; whether it stands for none, a bool scalar, or None where that cannot be.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1 or isinstance(rows(batch), int):
        return batch, None  # one replica has all of a batch, and each has a part of a full one
    empty = tf.equal(rows(batch), 0)
    leaves = tf.nest.flatten(batch)
    dense = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    dense = iter(tf.cond(empty, lambda: [_zeros_of_one(t) for t in dense], lambda: dense))
    leaves = [
        next(dense) if isinstance(leaf, tf.Tensor) else _one_more_row(leaf, empty)
        for leaf in leaves
    ]
    return tf.nest.pack_sequence_as(batch, leaves), empty


@tf.autograph.experimental.do_not_convert
def dropped(empty: tf.Tensor | None, sums: Any, outputs: Any) -> tuple[Any, Any]:
    """What was computed with a `filled` batch, of which nothing is left where it stands for none.

    Args:
        empty: what `filled` returned.
        sums: a nest of tensors and None; zeros then.
        outputs: a nest of tensors or None; those whose first axis is the examples [n] have n = 0.
    """
    if empty is None:
        return sums, outputs
    leaves = [leaf for leaf in tf.nest.flatten(sums) if leaf is not None]
    # Not a product: what zeros give may be NaN. And nothing is copied.
    kept = iter(tf.cond(empty, lambda: [tf.zeros_like(leaf) for leaf in leaves], lambda: leaves))
    sums = tf.nest.map_structure(lambda leaf: None if leaf is None else next(kept), sums)

    def cut(output: Any) -> Any:
        if output is None or not output.shape.rank or output.shape[0] is not None:
            return output
        return output[: tf.where(empty, 0, tf.shape(output)[0])]

    return sums, tf.nest.map_structure(cut, outputs)


def _zeros_of_one(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.shape.rank == 0:
        return tensor
    inner = tensor.shape[1:]
    if not inner.is_fully_defined():
        inner = tf.maximum(tf.shape(tensor)[1:], 1)
    return tf.zeros(tf.concat([[1], inner], axis=0), tensor.dtype)


def _one_more_row(value: tf.RaggedTensor | tf.SparseTensor, empty: tf.Tensor) -> Any:
    """``value``, and where it is ``empty`` an example without elements."""
    more = tf.cast(empty, tf.int32)
    if isinstance(value, tf.RaggedTensor):
        splits = tf.concat([value.row_splits, value.row_splits[:more]], axis=0)
        return tf.RaggedTensor.from_row_splits(value.values, splits, validate=False)
    shape = value.dense_shape + tf.one_hot(0, value.shape.rank, tf.cast(more, tf.int64), 0)
    return tf.SparseTensor(value.indices, value.values, shape)


@tf.autograph.experimental.do_not_convert
def one_for_each_example(losses: tf.Tensor, count: int | tf.Tensor | None) -> tf.Tensor:
    """``losses``, which must be float [n].

    Args:
        losses: what a step's ``loss()`` returned.
        count: n; None for any.

    Raises:
        UsageError: they have another shape. See `refusals` for a number of losses that is not
            known while tracing.
    """
    losses = tf.convert_to_tensor(losses)
    wanted = [count if isinstance(count, int) else None]
    if losses.shape.rank != 1 or not losses.shape.is_compatible_with(wanted):
        raise UsageError(f"{_CHECKS[_LOSSES]}; it has returned shape {losses.shape}")
    if count is None or losses.shape[0] is not None and isinstance(count, int):
        return losses
    with tf.name_scope(_LOSSES):
        tf.debugging.Assert(tf.equal(tf.shape(losses)[0], count), [_LOSSES])
        return tf.reshape(
            losses, [count]
        )  # XLA leaves the assertion out, TensorFlow's optimizer this


@tf.autograph.experimental.do_not_convert
def refuse_empty(empty: tf.Tensor) -> None:
    """Ends the graph while it runs, see `refusals`, where a replica is ``empty``."""
    with tf.name_scope(_EMPTY):
        tf.debugging.Assert(tf.logical_not(empty), [_EMPTY])


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Inside, a graph that an operation of this module ends raises a `UsageError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for name, message in _CHECKS.items():
            if name in error.message:
                raise UsageError(message) from error
        raise
