"""The all-reduce: the only place that calls a collective on gradients.

A *pack* is the list of tensors that one all-reduce moves. Packs are cut by dtype and by size, in
reverse order of the variables, because the backward pass has the last layer's gradient first. Their
names (``pack0``, ``pack1``, ...) are the same in the graph, in a profiler's trace and in every
report.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

SUM = tf.distribute.ReduceOp.SUM


def make_packs(tensors: Sequence[tf.Tensor], bytes_per_pack: int = 0) -> list[list[int]]:
    """Cuts ``tensors`` into packs.

    Args:
        tensors: what is to be reduced, dense, in the order of the variables.
        bytes_per_pack: most bytes in one pack; 0 means one pack for each dtype. A tensor that is
            larger has a pack of its own. Small packs can start before the backward pass has ended;
            each costs a collective.

    Returns:
        For each pack, indices into ``tensors``, last first. A tensor whose shape is not known while
        tracing counts as 0 bytes.
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
    """Sums each tensor over all replicas; call it in replica context.

    Args:
        tensors: this replica's values, dense (see `densify`); the same shapes on every replica.
        bytes_per_pack: see `make_packs`.
        options: timeout and implementation of the collective.

    Returns:
        The sums, in the order of ``tensors``, equal on every replica.
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
def densify(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """A dense tensor of the same value: rows that occur twice are summed.

    Keras 3 optimizers do not sum duplicate rows of `tf.IndexedSlices` (Adam is wrong by 1e-2), and
    gathering slices costs five collectives where the dense sum costs none beyond its pack. The
    price is the memory and the bytes of the whole table.
    """
    return tf.convert_to_tensor(gradient)
