"""A replica's share of a global batch: its number of examples, micro-batches and empty shares.

TensorFlow splits 9 examples over 4 replicas as 3, 3, 3 and 0. With 0 examples, a convolution can
abort the process, and BatchNorm computes NaN. A replica without examples therefore computes with
one example of zeros and drops the result.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from ctl.distributed.cluster import elastic
from ctl.errors import UsageError

# Messages for users, by the name of the check that fails in the graph.
_LOSSES, _EMPTY = "ctl_one_loss_for_each_example", "ctl_no_empty_share"
# TensorFlow's message for a sparse tensor whose share for a replica is empty.
_SPARSE = "Serialized sparse should have at least 1 serialized tensor"
_TENSORS = "ctl_tensors_of_one_length"
_NEGATIVE = "ctl_no_negative_weight"
_YES_OR_NO = "ctl_labels_of_0_and_1"
# The nodes in a message that only wait for the failed node.
_WAITING = re.compile(r"\[\[(?!\{\{node).*?\]\]")
# TensorFlow's message for a label outside of the classes.
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
# TensorFlow's message for an index outside of a table.
_INDEX = re.compile(r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)")
_MESSAGES = {
    _LOSSES: (
        "{} must return one loss per example, [n]: reduce all other axes, and leave the mean over "
        "the examples to ctl"
    ),
    _EMPTY: (
        "a replica got no examples of this batch, so a synchronized BatchNormalization cannot "
        "train: use batches of one size (drop_remainder=True)"
    ),
    _SPARSE: (
        "a replica got no examples of this batch, and TensorFlow cannot give it an empty sparse "
        "tensor: give larger batches, for instance with drop_remainder=True, or dense tensors"
    ),
    _TENSORS: "accumulate_steps cannot split tensors with different numbers of examples",
    _NEGATIVE: (
        "a weight is below 0, so the sum of the weights, which divides the losses, may be 0: "
        "give weights of at least 0, or weighting='examples'"
    ),
    _YES_OR_NO: (
        "class_weight needs labels that are classes, integers [n], or 0 and 1, and one is "
        "another number: give weights of examples instead, as the third part of a batch"
    ),
}


def check_sizes(global_batch_size: int | None, replicas: int, accumulate_steps: int) -> None:
    """Raises `UsageError` if replicas would get unequal shares, or fewer examples than
    ``accumulate_steps``. Checks nothing if ``global_batch_size`` is None. In an elastic job, shares
    may be unequal: its number of workers changes."""
    if not global_batch_size:
        return
    share = global_batch_size // replicas
    if global_batch_size % replicas:
        if not elastic.is_elastic():
            raise UsageError(
                f"the global batch size {global_batch_size} is not divisible by {replicas} replicas"
            )
        most = -(-global_batch_size // replicas)
        logging.info(
            "the replicas share %d examples unequally: %d at most", global_batch_size, most
        )
    if accumulate_steps > share:
        raise UsageError(
            f"accumulate_steps={accumulate_steps}, but a replica has {share} examples: use {share} "
            "or less"
        )


def rows(batch: Any) -> int | tf.Tensor:
    """The number of examples in ``batch``: the leading dimension of its first non-scalar tensor.

    Returns:
        A Python integer if the dimension is known while tracing, else an int32 scalar. The same
        integer on all replicas. So it is a scalar on several replicas in eager mode, where each
        replica knows its own dimension.

    Raises:
        UsageError: all tensors are scalars.
    """
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    unknown = several and tf.executing_eagerly()
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return (not unknown and leaf.shape[0]) or leaf.nrows(tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return (not unknown and leaf.shape[0]) or tf.cast(leaf.dense_shape[0], tf.int32)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank and not unknown else None
            return static or tf.shape(leaf)[0]
    raise UsageError(
        "no tensor of the batch has examples along its first axis: give tensors [n, ...]"
    )


def pair(batch: Any) -> tuple[Any, Any]:
    """Returns ``(features, labels)``. Raises `UsageError` for other forms, and for weights."""
    features, labels, weights = unpack(batch)
    if weights is not None:
        raise UsageError("this step accepts batches (features, labels) only: drop the weights")
    return features, labels


def weights_of(batch: Any) -> Any:
    """The weights that `unpack` returns; None for a batch of another form."""
    return unpack(batch)[2] if has_parts(batch) else None


def has_parts(batch: Any) -> bool:
    """Whether ``batch`` is ``(features, labels)`` or ``(features, labels, weights)``."""
    return isinstance(batch, tuple | list) and len(batch) in (2, 3)


def power_of_two(count: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two up to ``count``, float32 scalar; 1 if that is 0 or not
    finite. Division and multiplication by it are exact."""
    bits = tf.bitcast(tf.cast(count, tf.float32), tf.int32)
    exponent = tf.bitwise.bitwise_and(bits, 0x7F800000)  # of float32, the rest is 0
    power = tf.bitcast(exponent, tf.float32)
    return tf.where(tf.math.is_finite(power) & (power > 0), power, 1.0)


def or_one(total: tf.Tensor) -> tf.Tensor:
    """Returns ``total`` as a divisor: 1 where it is 0, so that 0 / 0 gives 0. NaN stays NaN."""
    return tf.where(tf.equal(total, 0.0), 1.0, total)


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """``tensor`` in float32, if its type is narrower: sums of float16 overflow early."""
    return tf.cast(tensor, wide(tensor.dtype))


def wide(dtype: tf.DType) -> tf.DType:
    """float32, or ``dtype`` if that is wider."""
    return tf.float32 if dtype.size < 4 else dtype


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Returns ``(features, labels, weights)`` of a batch.

    Missing weights are None. Weights [n, 1] become [n]. Raises `UsageError` for any other batch
    than ``(features, labels)`` and ``(features, labels, weights)``, and for integer weights, which
    are usually something else, such as indices.
    """
    if not has_parts(batch):
        raise UsageError(
            "a batch must be (features, labels) or (features, labels, weights); for any other form "
            "override loss(), and update_metrics() for metrics"
        )
    features, labels, *rest = batch
    weights = rest[0] if rest else None
    if isinstance(weights, tf.Tensor) and weights.dtype.is_integer:
        raise UsageError(
            f"the weights (third part) of a batch have dtype {weights.dtype.name}: convert them to "
            "float32; if they are not weights, override loss(), count() and update_metrics()"
        )
    if isinstance(weights, tf.Tensor) and weights.shape.rank == 2 and weights.shape[1] == 1:
        weights = tf.squeeze(weights, axis=1)
    return features, labels, weights


# Micro-batches ------------------------------------------------------------------------------------


def micro_batches(batch: Any, parts: int) -> list[tuple[Any, Callable[[tf.Tensor], Any]]]:
    """Cuts ``batch`` into ``parts`` micro-batches whose sizes differ by at most one example.

    A batch of fewer examples gives fewer micro-batches. A micro-batch is empty only if ``batch`` is
    empty.

    Returns:
        One or two groups ``(number, micro_batch)``. All micro-batches of a group have one size, and
        ``micro_batch(index)`` returns one of them. Loop over each group separately: XLA silently
        computes wrong values for a slice whose size depends on a loop counter (TensorFlow 2.21).

    Raises:
        UsageError: the tensors have different numbers of examples, or one of them is sparse.
    """
    leaves = tf.nest.flatten(batch)
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        raise UsageError("accumulate_steps cannot split sparse tensors: give dense or ragged ones")
    static = {leaf.shape[0] for leaf in leaves if leaf is not None and leaf.shape.rank} - {None}
    if len(static) > 1:
        raise UsageError(f"{_MESSAGES[_TENSORS]}: {', '.join(map(str, sorted(static)))}")
    count = static.pop() if static else rows(batch)
    leaves = [leaf if _has_no_rows(leaf) else _of_length(leaf, count, _TENSORS) for leaf in leaves]
    low, high = (min, max) if isinstance(count, int) else (tf.minimum, tf.maximum)
    least, longer = count // parts, count % parts
    shorter = low(high(count, 1), parts) - longer
    # XLA also compiles the body of a loop that does not run, so part 0 must exist.
    some = low(count, 1)
    groups: list[tuple[Any, Callable[[tf.Tensor], Any]]] = []
    for number, size, from_end in ((shorter, high(least, some), False), (longer, least + 1, True)):
        if isinstance(number, int) and not number:
            continue
        length = high(number, some)
        begin = count - length * size if from_end else 0
        stacks = [_stack(leaf, begin, length, size) for leaf in leaves]
        groups.append((number, functools.partial(_pick, batch, stacks)))
    return groups


def _pick(batch: Any, stacks: list[Callable[[tf.Tensor], Any]], part: tf.Tensor) -> Any:
    return tf.nest.pack_sequence_as(batch, [stack(part) for stack in stacks])


def _has_no_rows(leaf: Any) -> bool:
    return leaf is None or leaf.shape.rank == 0


def _stack(tensor: Any, begin: Any, length: Any, size: Any) -> Callable[[tf.Tensor], Any]:
    """Returns a function of ``part``: the ``size`` examples at ``begin + part * size``."""
    if _has_no_rows(tensor):
        return lambda part: tensor
    if isinstance(tensor, tf.RaggedTensor):  # XLA does not support these
        return lambda part: tensor[begin + part * size : begin + (part + 1) * size]
    shape = tf.concat([[length, size], tf.shape(tensor)[1:]], axis=0)
    stack = tf.reshape(tensor[begin : begin + length * size], shape)
    static = [n if isinstance(n, int) else None for n in (length, size)]
    stack.set_shape(tf.TensorShape(static).concatenate(tensor.shape[1:]))
    return lambda part: stack[part]


# Empty shares -------------------------------------------------------------------------------------


def pad_empty(batch: Any) -> tuple[Any, tf.Tensor | None]:
    """Replaces a batch without examples by one example of zeros. Returns the batch to compute, and
    ``empty``, a bool scalar that is true for the example of zeros; None if every replica must have
    examples."""
    # A single replica gets the whole batch. A batch of static size has examples for every replica.
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return batch, None
    count = rows(batch)
    if isinstance(count, int):
        return batch, None
    empty = tf.equal(count, 0)
    leaves = tf.nest.flatten(batch)
    dense = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    zeros = tf.cond(empty, lambda: [_zeros_of_one(t) for t in dense], lambda: dense)
    for tensor, new in zip(dense, zeros, strict=True):
        if tensor.shape.rank:
            new.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    computed = iter(zeros)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Tensor):
            leaves[index] = next(computed)
        elif isinstance(leaf, tf.RaggedTensor):  # an example without elements
            splits = [leaf.row_splits, leaf.row_splits[: tf.cast(empty, tf.int32)]]
            leaves[index] = tf.RaggedTensor.from_row_splits(
                leaf.values, tf.concat(splits, axis=0), validate=False
            )
    return tf.nest.pack_sequence_as(batch, leaves), empty


def _zeros_of_one(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.shape.rank == 0:
        return tensor
    inner = tf.maximum(tf.shape(tensor)[1:], 1)
    return tf.zeros(tf.concat([[1], inner], axis=0), tensor.dtype)


def mask_empty(empty: tf.Tensor | None, sums: Any, outputs: Any) -> tuple[Any, Any]:
    """Removes the example of zeros from the results of a `pad_empty` batch.

    Args:
        empty: as returned by `pad_empty`.
        sums: a nest of tensors, rows and None, each a sum over all examples.
        outputs: a nest of tensors, usually one row per example, [n, ...]; or None.

    Returns:
        ``sums`` and ``outputs``. If ``empty``, outputs whose n is unknown while tracing have n = 0,
        and all other tensors are zeros.
    """
    if empty is None:
        return sums, outputs

    def of_examples(output: Any) -> bool:
        if not isinstance(output, tf.Tensor | tf.RaggedTensor) or not output.shape.rank:
            return False
        # In eager mode, it is the one of the example of zeros where it matters.
        return output.shape[0] == 1 if tf.executing_eagerly() else output.shape[0] is None

    def rest(output: Any) -> Any:
        return output[: tf.where(empty, 0, rows(output))] if of_examples(output) else output

    all_sums = tf.nest.flatten(sums, expand_composites=True)
    outputs = tf.nest.map_structure(rest, outputs)
    aggregates = [output for output in tf.nest.flatten(outputs) if not of_examples(output)]
    tensors = [leaf for leaf in (*all_sums, *aggregates) if isinstance(leaf, tf.Tensor)]
    # Not a product: the example of zeros may give NaN, and 0 * NaN is NaN. `cond` copies nothing.
    kept = tf.cond(empty, lambda: [tf.zeros_like(t) for t in tensors], lambda: tensors)
    kept = dict(zip(map(id, tensors), kept, strict=True))
    sums = tf.nest.pack_sequence_as(
        sums, [kept.get(id(leaf), leaf) for leaf in all_sums], expand_composites=True
    )
    return sums, tf.nest.map_structure(lambda leaf: kept.get(id(leaf), leaf), outputs)


# Checks -------------------------------------------------------------------------------------------


def one_for_each_example(losses: Any, count: Any = None, source: str = "loss()") -> tf.Tensor:
    """Returns ``losses`` after a check that their shape is [n].

    Args:
        losses: as returned by ``source``.
        count: n, a Python integer or an int32 scalar; None allows any n.
        source: name of the function for the message.

    Raises:
        UsageError: the shape is not [n]. If n is known only when the graph runs, the graph fails
            instead, see `translate_graph_checks`.
    """
    if not isinstance(losses, tf.RaggedTensor | tf.SparseTensor):
        losses = tf.convert_to_tensor(losses)
    wanted = [count if isinstance(count, int) else None]
    if losses.shape.rank != 1 or not losses.shape.is_compatible_with(wanted):
        raise UsageError(f"{_MESSAGES[_LOSSES].format(source)}; it returned shape {losses.shape}")
    return losses if count is None else _of_length(losses, count, _LOSSES)


def check_weights_used(losses: tf.Tensor, batch: Any, step: str) -> None:
    """Refuses ``losses``, as returned by ``loss(batch)`` of a class named ``step``, that do not
    depend on the weights of ``batch``. Checks nothing in eager mode.

    Raises:
        UsageError: the graph has no path from the weights to ``losses``.
    """
    if tf.executing_eagerly() or not isinstance(weights_of(batch), tf.Tensor):
        return
    seen, left = set(), [losses]
    while left:
        tensor = left.pop()
        if tensor.name == batch[2].name:
            return
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            left += tensor.op.inputs
    raise UsageError(
        f"loss() of {step} does not use the weights of its batch: multiply its losses by batch[2], "
        "or override count()"
    )


def _of_length(tensor: Any, count: int | tf.Tensor, name: str) -> Any:
    """Returns ``tensor`` after the check ``name`` that its first axis has ``count`` entries."""
    if isinstance(count, int) and tensor.shape[0] is not None:
        return tensor
    with tf.name_scope(name):
        # Both are needed: XLA removes the assertion, TensorFlow's graph optimizer the reshape.
        tf.debugging.Assert(tf.equal(rows(tensor), count), [name])
        if isinstance(tensor, tf.RaggedTensor):
            return tensor
        return tf.reshape(tensor, tf.concat([[count], tf.shape(tensor)[1:]], axis=0))


def refuse_empty(empty: tf.Tensor) -> None:
    """Makes the running graph fail if ``empty`` (a bool scalar) is true, see
    `translate_graph_checks`."""
    _refuse_if(empty, _EMPTY)


def refuse_negative_weights(negative: tf.Tensor) -> None:
    """As `refuse_empty`, if ``negative`` is true."""
    _refuse_if(negative, _NEGATIVE)


def refuse_other_than_0_and_1(other: tf.Tensor) -> None:
    """As `refuse_empty`, if ``other`` is true: labels have other values."""
    _refuse_if(other, _YES_OR_NO)


def _refuse_if(condition: tf.Tensor, name: str) -> None:
    with tf.name_scope(name):
        tf.debugging.Assert(tf.logical_not(condition), [name])


@contextlib.contextmanager
def translate_graph_checks(place_of: Callable[[int], str] | None = None) -> Iterator[None]:
    """Turns the failure of a check of this module in a running graph into a `UsageError`.
    ``place_of`` says where in the data an index is."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        text = _WAITING.sub("", error.message)
        for name, message in _MESSAGES.items():
            if name in text:
                raise UsageError(message.format("loss()")) from error
        if label := _LABEL.search(text):
            value, classes = label[1], int(label[2])
            raise UsageError(
                f"label {value} is out of range: the model has {classes} outputs, so labels must "
                f"be 0 to {classes - 1}"
            ) from error
        if index := _INDEX.search(text):
            value, size = int(index[1]), int(index[2])
            place = place_of(value) if place_of else ""
            raise UsageError(
                f"index {value}{place} is outside of a table of {size} rows, such as that of an "
                f"Embedding: indices must be 0 to {size - 1}"
            ) from error
        raise
