"""The all-reduce of the gradients, and the gather for losses that compare examples of all replicas.

A *pack* is a list of tensors that one all-reduce moves. All tensors of a pack have one dtype. Packs
are filled in reverse order of the variables, because the backward pass computes the gradients of
the last layer first. The graph, profiler traces and reports name them ``pack0``, ``pack1``, ...
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from ctl.distributed import local_batch, workers
from ctl.distributed.gathers import gather
from ctl.errors import UsageError

SUM = tf.distribute.ReduceOp.SUM

# Returns rows of a variable, [m, ...], by their places in it, int64 [m].
Read: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

# Name scopes of the all-reduces of a step: gradients and the tensors in their packs; tensors that
# must not share these packs; the number of examples; rows of embedding tables.
GRADIENTS, BESIDE, COUNT, ROWS = "ctl_all_reduce", "ctl_beside", "ctl_count", "ctl_rows"


def make_packs(tensors: Sequence[tf.Tensor], bytes_per_pack: int = 0) -> list[list[int]]:
    """Cuts ``tensors`` into packs.

    Args:
        tensors: dense tensors to reduce, in the order of the variables. A tensor whose shape is
            unknown while tracing counts as 0 bytes.
        bytes_per_pack: maximum bytes per pack. A larger tensor gets a pack of its own. 0 means one
            pack per dtype. Small packs can be reduced before the backward pass ends, but each pack
            costs a collective.

    Returns:
        For each pack, the indices of its tensors, in descending order.
    """
    packs: list[list[int]] = []
    open_packs: dict[tf.DType, tuple[list[int], int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        pack, filled = open_packs.get(tensor.dtype, (None, 0))
        if pack is None or (bytes_per_pack and filled and filled + size > bytes_per_pack):
            pack, filled = [], 0
            packs.append(pack)
        pack.append(index)
        open_packs[tensor.dtype] = (pack, filled + size)
    return packs


def all_reduce(
    tensors: Sequence[tf.Tensor],
    *,
    bytes_per_pack: int = 0,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
    scope: str = GRADIENTS,
) -> list[tf.Tensor]:
    """Sums each tensor over all replicas. Call it in replica context.

    Args:
        tensors: this replica's dense tensors (see `densify`), of the same shapes on every replica.
        bytes_per_pack: see `make_packs`.
        options: timeout and implementation of the collective.
        scope: name scope, which names the packs in reports; by default `GRADIENTS`.

    Returns:
        The sums, in the order of ``tensors``; equal on every replica.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 2:
        tensors = [_unshared(tensor) for tensor in tensors]
    reduced: list[tf.Tensor | None] = [None] * len(tensors)
    for number, pack in enumerate(make_packs(tensors, bytes_per_pack)):
        with tf.name_scope(f"{scope}/pack{number}"):
            sums = context.all_reduce(SUM, [tensors[i] for i in pack], options=options)  # <- here
        for index, total in zip(pack, sums, strict=True):
            reduced[index] = total
    return reduced


def _unshared(tensor: tf.Tensor) -> tf.Tensor:
    """On a CPU, returns ``tensor`` in memory that no other operation reads; copies only if needed.

    On a CPU, `AddN` adds the replicas of a process into the first of their tensors that no other
    operation reads at that moment. The order of three or more terms, and so the last bit of the
    sum, would depend on timing.
    """
    return tf.raw_ops.Snapshot(input=tensor) if "CPU" in tensor.device.upper() else tensor


def densify(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Converts a gradient to a dense tensor; sums duplicate rows.

    Keras 3 optimizers do not sum duplicate rows of `tf.IndexedSlices` (Adam is wrong by 1e-2), and
    gathering slices costs five collectives, while a dense sum needs only its pack. The price is the
    memory and the traffic of the whole table.
    """
    return tf.convert_to_tensor(gradient)


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """A dense gradient itself, or the values of rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """Returns ``function`` of a dense gradient, or of the values of rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices)
    return function(gradient)


def sum_rows(
    gradients: Sequence[tf.IndexedSlices],
    shapes: Sequence[tuple[int, int]],
    *,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[tf.IndexedSlices]:
    """Sums the rows of tables over all replicas. Call it in replica context.

    A replica sends the rows that it has, and no others. Tables of one width and type are one table
    on the way.

    Args:
        gradients: rows of this replica, values [m, d] and indices int64 [m]. A row may be there
            several times, and m may differ between replicas.
        shapes: (n, d) of each table, whole.
        options: timeout and implementation of the collectives.

    Returns:
        Each row once, with the sum of its gradients; equal on every replica.
    """
    context = tf.distribute.get_replica_context()
    groups: dict[tuple[tf.DType, int], list[int]] = {}
    for number, gradient in enumerate(gradients):
        groups.setdefault((gradient.dtype, shapes[number][1]), []).append(number)
    sums: list[tf.IndexedSlices | None] = [None] * len(gradients)
    for group in groups.values():
        first = np.cumsum([0, *(shapes[i][0] for i in group)])
        rows = tf.concat([gradients[i].indices + f for i, f in zip(group, first, strict=False)], 0)
        values = tf.concat([gradients[i].values for i in group], 0)
        if workers.is_multi_worker(context.strategy):  # nothing is sent twice
            rows, values = _summed(rows, values)
        if context.num_replicas_in_sync > 1:
            with tf.name_scope(ROWS):
                rows = _gathered_numbers(rows, int(first[-1]), options)
                values = gather(values, options)  # <- here
        rows, values = _summed(rows, values)
        parts = [rows], [values]
        if len(group) > 1:
            table = tf.searchsorted(first[1:], rows, side="right")
            parts = tuple(tf.dynamic_partition(x, table, len(group)) for x in (rows, values))
        for number, start, its_rows, its_values in zip(group, first, *parts, strict=False):
            sums[number] = tf.IndexedSlices(its_values, its_rows - start)
    return sums


def fetch_rows(numbers: tf.Tensor, read: Read, own: tf.Tensor, count: int) -> tf.Tensor:
    """Returns rows of a table of which each replica holds a part. Call it on all replicas, in
    replica context.

    Every replica gets every row that any of them needs, once. That takes two gathers. An all-to-all
    would move less, but TensorFlow does not order its own: two in one function may wait for each
    other for ever.

    Args:
        numbers: of the rows that this replica needs, int64 [m]. m may differ between replicas.
        read: returns rows that this replica holds, [k, d], by their places in its part, int64 [k].
        own: first and last (exclusive) row of the part, int64 [2]. The parts follow each other.
        count: number of rows of the table.

    Returns:
        [m, d].
    """
    now = _PASS.get(_OUTSIDE)
    with tf.name_scope(ROWS):
        wanted, _ = tf.unique(_gathered_numbers(numbers, count, now.options))
        wanted = tf.sort(wanted)  # as the parts follow each other
        mine = tf.boolean_mask(wanted, (wanted >= own[0]) & (wanted < own[1]))
        rows = gather(read(mine - own[0]), now.options)  # <- here
    return tf.gather(rows, tf.searchsorted(wanted, numbers))


def _gathered_numbers(numbers: tf.Tensor, count: int, options: Any) -> tf.Tensor:
    """The ``numbers`` of all replicas, int64, which are less than ``count``: sent as int32 if they
    fit."""
    sent = tf.cast(numbers, tf.int32 if count <= tf.int32.max else tf.int64)
    return tf.cast(gather(sent, options), tf.int64)


def _summed(rows: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each row once, with the sum of its values."""
    unique, places = tf.unique(rows)
    return unique, tf.math.unsorted_segment_sum(values, places, tf.size(unique))


# Tensors that cross replicas in the forward pass --------------------------------------------------


class _Pass(NamedTuple):
    """What a gather needs to know about its forward pass; see `gather_context`."""

    divisor: int | tf.Tensor = 1
    empty: tf.Tensor | None = None
    options: tf.distribute.experimental.CommunicationOptions | None = None
    in_graph: bool = False


_OUTSIDE = _Pass()
_PASS: contextvars.ContextVar[_Pass] = contextvars.ContextVar("_PASS")


@contextlib.contextmanager
def gather_context(
    divisor: int | tf.Tensor,
    empty: tf.Tensor | None,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
    in_graph: bool = False,
) -> Iterator[None]:
    """Tells `all_gather` about the forward pass inside, in replica context.

    Args:
        divisor: what this replica divides its loss by. A tensor may differ between replicas.
        empty: bool scalar, whether the replica computes with an example of zeros that does not
            count; None if never. See `ctl.local_batch.pad_empty`.
        options: timeout and implementation of the collectives.
        in_graph: whether the pass runs in a loop or under XLA.
    """
    token = _PASS.set(_Pass(divisor, empty, options, in_graph))
    try:
        yield
    finally:
        _PASS.reset(token)


def all_gather(part: tf.Tensor) -> tf.Tensor:
    """Concatenates the ``part`` of every replica, in the order of the replicas. For the loss of a
    step, for instance with the negatives of all replicas (SimCLR).

    The gradient of ``part`` is the sum of its gradients in the losses of all replicas. N replicas
    therefore equal one if each returns the losses of its own examples.

    Args:
        part: dense, [n, ...], float or integer. n may differ between replicas. The example of zeros
            of a replica without examples is left out.

    Returns:
        [sum of all n, ...], equal on all replicas. ``part`` itself if there is one replica.

    Raises:
        UsageError: there are several replicas, and the step accumulates gradients or is compiled by
            XLA. TensorFlow has no collectives between the replicas there.
    """
    context, now = tf.distribute.get_replica_context(), _PASS.get(_OUTSIDE)
    if context.num_replicas_in_sync == 1:
        return part
    first, part = first_row(part), _counted(part)

    @tf.custom_gradient
    def gathered(part: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        def gradient(upstream: Any) -> tf.Tensor:
            wide = local_batch.widened(densify(upstream))
            # The gradient of the undivided loss: replicas divide by different numbers.
            wide *= tf.cast(now.divisor, wide.dtype)
            if now.empty is not None:  # not a product: the example of zeros may give NaN
                wide = tf.where(now.empty, tf.zeros_like(wide), wide)
            (total,) = all_reduce([wide], options=now.options, scope="ctl_gather")
            mine = total[first : first + local_batch.rows(part)] / tf.cast(now.divisor, wide.dtype)
            return tf.cast(mine, part.dtype)

        return gather(part, now.options), gradient

    return gathered(part)


def first_row(part: tf.Tensor) -> tf.Tensor:
    """Returns the index of this replica's first row in ``all_gather(part)``.

    Returns:
        int32 scalar; 0 on a replica without examples, whose loss does not count. Costs a collective
        if the number of rows is unknown while tracing.

    Raises:
        UsageError: as `all_gather`.
    """
    context, now = tf.distribute.get_replica_context(), _PASS.get(_OUTSIDE)
    if context.num_replicas_in_sync == 1:
        return tf.constant(0)
    if now.in_graph:
        raise UsageError(
            "a loss with ctl.reduce.all_gather on several replicas supports neither "
            "--accumulate_steps nor --jit_compile: use one replica, or leave them out"
        )
    replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
    rows = local_batch.rows(_counted(part))
    if isinstance(rows, int):
        return replica * rows
    first = tf.reduce_sum(gather(rows[tf.newaxis], now.options)[:replica])
    return first if now.empty is None else tf.where(now.empty, 0, first)


def _counted(part: tf.Tensor) -> tf.Tensor:
    """Returns ``part``; without its example of zeros if the replica has no examples."""
    empty = _PASS.get(_OUTSIDE).empty
    return part if empty is None else part[: tf.where(empty, 0, local_batch.rows(part))]
