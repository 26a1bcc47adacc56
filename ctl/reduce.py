"""The all-reduce of the gradients.

A *pack* is a list of tensors that one all-reduce moves. All tensors of a pack have one dtype. Packs
are filled in reverse order of the variables, because the backward pass computes the gradients of
the last layer first. The graph, profiler traces and reports name them ``pack0``, ``pack1``, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from ctl import share
from ctl.errors import UsageError

SUM = tf.distribute.ReduceOp.SUM


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


@tf.autograph.experimental.do_not_convert
def all_reduce(
    tensors: Sequence[tf.Tensor],
    *,
    bytes_per_pack: int = 0,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[tf.Tensor]:
    """Sums each tensor over all replicas. Call it in replica context.

    Args:
        tensors: this replica's dense tensors (see `densify`), of the same shapes on every replica.
        bytes_per_pack: see `make_packs`.
        options: timeout and implementation of the collective.

    Returns:
        The sums, in the order of ``tensors``; equal on every replica.
    """
    context = tf.distribute.get_replica_context()
    reduced: list[tf.Tensor | None] = [None] * len(tensors)
    for number, pack in enumerate(make_packs(tensors, bytes_per_pack)):
        with tf.name_scope(f"ctl_all_reduce/pack{number}"):
            sums = context.all_reduce(SUM, [tensors[i] for i in pack], options=options)  # <- here
        for index, total in zip(pack, sums, strict=True):
            reduced[index] = total
    return reduced


@tf.autograph.experimental.do_not_convert
def summed_apart(
    gradients: Sequence[tf.Tensor],
    own: Sequence[tf.Tensor],
    loss_scale: tf.Tensor | None,
    sum_gradients: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    sum_own: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Sums gradients with a user's function, and other tensors with ctl's own all-reduce.

    Args:
        gradients: this replica's, times ``loss_scale``.
        own: other tensors to sum.
        loss_scale: float32 scalar, or None.
        sum_gradients: see `ctl.TrainStep.sum_gradients`.
        sum_own: sums a list of tensors over replicas.

    Returns:
        The sums of both. If a gradient of any replica has a NaN or Inf, so have all sums.

    Raises:
        UsageError: ``sum_gradients`` returned tensors of other shapes or another number.
    """
    wide = [share.widened(g) for g in gradients]
    if loss_scale is not None:
        wide = [g / tf.cast(loss_scale, g.dtype) for g in wide]
    broken = tf.reduce_any([tf.reduce_any(~tf.math.is_finite(g)) for g in wide])
    *own, broken = sum_own([*own, tf.where(broken, math.nan, 0.0)])
    sums = sum_gradients(wide)
    given, returned = ([tuple(t.shape) for t in tensors] for tensors in (wide, sums))
    if given != returned:
        raise UsageError(f"sum_gradients() was given shapes {given}, and returned {returned}")
    return [s + tf.cast(broken, s.dtype) for s in sums], own


@tf.autograph.experimental.do_not_convert
def densify(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Converts a gradient to a dense tensor; rows that occur twice are summed.

    Keras 3 optimizers do not sum duplicate rows of `tf.IndexedSlices` (Adam is wrong by 1e-2), and
    gathering slices costs five collectives, while a dense sum needs only its pack. The price is the
    memory and the traffic of the whole table.
    """
    return tf.convert_to_tensor(gradient)
