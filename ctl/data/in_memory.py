"""Examples that fit in memory: a strategy distributes indices, and the step gathers examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.arrays import content_hash, native
from ctl.data.dataset import DatasetInfo, check_batch_size, distribution_options, fingerprint
from ctl.distributed.replicas import is_default
from ctl.errors import UsageError

# Batches of `InMemory` in one element of a strategy's iterator, see `ctl.data.feed`.
_STEPS_PER_ELEMENT = 32

# Elements to prepare ahead of the step. An element of `InMemory` is one slice of int64.
_PREFETCH = 16


class InMemory:
    """Examples that fit in memory; every replica keeps all of them on its device.

    The strategy distributes the *indices* of a global batch, and each replica gathers its share of
    the examples. This moves 8 bytes per example and step instead of an image, and costs one copy of
    the arrays per replica.

    Training is endless. Every epoch is a new permutation, which has each example once, and batches
    straddle epochs so that no example is dropped. Evaluation reads the examples once, in order; the
    last batch may be smaller.
    """

    def __init__(
        self,
        arrays: Any,
        *,
        global_batch_size: int,
        seed: int = 0,
        training: bool = True,
        info: DatasetInfo | None = None,
        description: str = "",
    ):
        """Makes a dataset of ``arrays``.

        Args:
            arrays: a NumPy array or a nest of them with equal leading dimension, e.g. images uint8
                [N, H, W, C] and labels int64 [N]. A batch is a nest of the same structure.
            global_batch_size: examples per batch.
            seed: of the permutations.
            training: whether to shuffle and repeat.
            info: what is known of the data.
            description: one line for the log; made from the above by default.

        Raises:
            UsageError: lengths differ, there are no examples, or fewer than a training batch; or
                an array cannot be a tensor (`ctl.data.arrays`).
        """
        self.info = info or DatasetInfo("arrays")
        self.arrays = native(arrays, self.info.name)
        lengths: set[Any] = {a.shape[0] if a.ndim else None for a in tf.nest.flatten(self.arrays)}
        if len(lengths) != 1 or None in lengths:
            raise UsageError(
                "the arrays of a dataset must have equal leading dimensions, not "
                + ", ".join(str(a.shape) for a in tf.nest.flatten(self.arrays))
            )
        self.num_examples: int = lengths.pop()
        check_batch_size(global_batch_size, self.num_examples, training)
        self.global_batch_size = global_batch_size
        self.steps_per_element = _STEPS_PER_ELEMENT if training else 1
        self.seed = seed
        self.training = training
        size = sum(a.nbytes for a in tf.nest.flatten(self.arrays)) / 2**20
        self.description = (
            description
            or f"{self.info.name}, {self.num_examples} examples, {size:.1f} MiB resident"
        )

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns indices of the global batches from ``start_step`` on, int64 [global_batch_size].

        The cost does not depend on ``start_step``.
        """
        if self.training:
            indices = self._shuffled(start_step).prefetch(_PREFETCH)
        else:
            indices = self._in_order(start_step)
        return indices.with_options(distribution_options())

    def permutation(self, epoch: tf.Tensor) -> tf.Tensor:
        """The indices of all examples, int64 [num_examples], in the order of ``epoch``."""
        # The permutations of index_shuffle are correlated in consecutive epochs.
        return tf.random.experimental.stateless_shuffle(
            tf.range(self.num_examples, dtype=tf.int64),
            seed=tf.stack([tf.constant(self.seed, tf.int64), epoch]),
            alg="philox",
        )

    def _shuffled(self, start_step: int) -> tf.data.Dataset:
        count, batch = self.num_examples, self.global_batch_size

        def batches_ending_in(epoch: tf.Tensor) -> tf.Tensor:
            # Batch k is examples [k * batch, (k + 1) * batch) of the concatenated permutations. It
            # belongs to the epoch of its last example, so it can begin in the epoch before.
            first = tf.maximum(epoch * count // batch, start_step)
            last = (epoch + 1) * count // batch
            begin = (epoch - 1) * count
            two_epochs = tf.concat([self.permutation(epoch - 1), self.permutation(epoch)], axis=0)
            return tf.reshape(two_epochs[first * batch - begin : last * batch - begin], [-1, batch])

        first_epoch = ((start_step + 1) * batch - 1) // count
        return endless(tf.data.Dataset.range(first_epoch, tf.int64.max).map(batches_ending_in))

    def _in_order(self, start_step: int) -> tf.data.Dataset:
        # With `map` and `prefetch`, an element would take a third of the time of a small step.
        count, batch = self.num_examples, self.global_batch_size
        return tf.data.Dataset.range(start_step * batch, count).batch(batch, count % batch == 0)

    def resident(self, strategy: tf.distribute.Strategy) -> Any:
        """Returns a copy of the arrays on the device of every replica, for `on_replica`."""
        packed = tf.nest.map_structure(_pack, self.arrays)
        if is_default(strategy):  # the default strategy has no devices
            return tf.nest.map_structure(tf.convert_to_tensor, packed)
        devices = iter(strategy.extended.worker_devices)

        def copy(_: tf.distribute.experimental.ValueContext) -> Any:
            with tf.device(next(devices)):
                return tf.nest.map_structure(tf.identity, packed)

        return strategy.experimental_distribute_values_from_function(copy)

    def on_replica(self, element: tf.Tensor, resident: Any) -> Any:
        """Returns the examples at indices ``element``, int64 [n]; a nest like ``arrays``."""
        return tf.nest.map_structure(
            lambda array, rows: _unpack(tf.gather(rows, element), array), self.arrays, resident
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns what identifies the examples and their order; reads all examples once."""
        return fingerprint(self, content_hash(self.arrays))


def endless(chunks: tf.data.Dataset) -> tf.data.Dataset:
    """The batches of endless ``chunks``, each int64 [batches, global_batch_size]."""
    return (
        chunks.prefetch(1)  # shuffles the next one during the current one
        .flat_map(tf.data.Dataset.from_tensor_slices)
        .apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    )


# TensorFlow gathers these dtypes on a CPU only, so on a GPU every step would copy all data to the
# host. Rows are therefore kept as int64 words, which both devices gather, and cast back by bits.
_PACKED = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.uint64)


def _pack(array: np.ndarray) -> np.ndarray:
    if array.dtype.type not in _PACKED:
        return array
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    padding = -rows.shape[1] % (8 // array.itemsize)
    if padding:
        rows = np.pad(rows, ((0, 0), (0, padding)))
    return rows.view(np.int64)


def _unpack(words: tf.Tensor, array: np.ndarray) -> tf.Tensor:
    if array.dtype.type not in _PACKED:
        return words
    size = int(np.prod(array.shape[1:]))
    rows = tf.reshape(
        tf.bitcast(words, array.dtype.type), [-1, words.shape[1] * 8 // array.itemsize]
    )
    result = tf.reshape(rows[:, :size], [-1, *array.shape[1:]])
    result.set_shape([words.shape[0], *array.shape[1:]])
    return result
