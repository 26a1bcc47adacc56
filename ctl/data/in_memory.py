"""Examples that fit in memory: indices are distributed, the step gathers the examples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.dataset import DatasetInfo, check_batch_size, distribution_options, fingerprint
from ctl.errors import UsageError
from ctl.replicas import is_default

# Batches of `InMemory` in one element of a strategy's iterator, see `ctl.data.feed`.
_STEPS_PER_ELEMENT = 32

# Elements kept ready ahead of the step. An element of `InMemory` is one slice of int64.
_PREFETCH = 16


class InMemory:
    """Examples that fit in memory; every replica keeps all of them on its device.

    What is distributed are the *indices* of a global batch; the step gathers its share. That moves
    8 bytes per example and step instead of an image, at the cost of one copy of the arrays per
    replica.

    Training: endless; every epoch is a fresh permutation that has each example exactly once,
    batches straddle epoch borders so that no example is dropped. Evaluation: once, in order, with
    the last batch as small as it comes.
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
        """``arrays``: a numpy array or any nest of them with equal leading dimension, e.g. images
        uint8 [N, H, W, C] and labels int64 [N]. ``on_replica`` returns the same nest of batches.

        Raises `UsageError` for unequal lengths, no examples, or a training batch larger than the
        data.
        """
        self.arrays = tf.nest.map_structure(np.asarray, arrays)
        lengths = {a.shape[0] if a.ndim else None for a in tf.nest.flatten(self.arrays)}
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
        self.info = info or DatasetInfo("arrays")
        size = sum(a.nbytes for a in tf.nest.flatten(self.arrays)) / 2**20
        self.description = (
            description
            or f"{self.info.name}, {self.num_examples} examples, {size:.1f} MiB resident"
        )

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Indices of the global batches from ``start_step`` on, int64 [global_batch_size].

        Starting late costs no more than starting at 0: one permutation (two where the first batch
        straddles epochs), wherever that is.
        """
        indices = self._shuffled(start_step) if self.training else self._in_order(start_step)
        return indices.prefetch(_PREFETCH).with_options(distribution_options())

    def _shuffled(self, start_step: int) -> tf.data.Dataset:
        count, batch = self.num_examples, self.global_batch_size

        @tf.autograph.experimental.do_not_convert
        def permutation(epoch: tf.Tensor) -> tf.Tensor:
            # Not index_shuffle: its permutations of consecutive epochs are correlated.
            return tf.random.experimental.stateless_shuffle(
                tf.range(count, dtype=tf.int64),
                seed=tf.stack([tf.constant(self.seed, tf.int64), epoch]),
                alg="philox",
            )

        @tf.autograph.experimental.do_not_convert
        def batches_ending_in(epoch: tf.Tensor) -> tf.Tensor:
            # Batch k is examples [k * batch, (k + 1) * batch) of the permutations laid end to end.
            # It belongs to the epoch of its last example, so it can begin with the previous epoch's
            # tail.
            first = tf.maximum(epoch * count // batch, start_step)
            last = (epoch + 1) * count // batch
            begin = (epoch - 1) * count
            two_epochs = tf.concat([permutation(epoch - 1), permutation(epoch)], axis=0)
            return tf.reshape(two_epochs[first * batch - begin : last * batch - begin], [-1, batch])

        first_epoch = ((start_step + 1) * batch - 1) // count
        return (
            tf.data.Dataset.range(first_epoch, tf.int64.max)
            .map(batches_ending_in)
            .prefetch(1)  # the next epoch is shuffled while this one is trained on
            .flat_map(tf.data.Dataset.from_tensor_slices)
            .apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        )

    def _in_order(self, start_step: int) -> tf.data.Dataset:
        count, batch = self.num_examples, self.global_batch_size

        @tf.autograph.experimental.do_not_convert
        def indices(begin: tf.Tensor) -> tf.Tensor:
            result = tf.range(begin, tf.minimum(begin + batch, count))
            if count % batch == 0:
                result.set_shape([batch])
            return result

        return tf.data.Dataset.range(start_step * batch, count, batch).map(indices)

    def resident(self, strategy: tf.distribute.Strategy) -> Any:
        """One copy of the arrays on the device of every replica, as `on_replica` wants it."""
        packed = tf.nest.map_structure(_pack, self.arrays)
        if is_default(strategy):  # it has no devices
            return tf.nest.map_structure(tf.convert_to_tensor, packed)
        devices = iter(strategy.extended.worker_devices)

        def copy(_: tf.distribute.experimental.ValueContext) -> Any:
            with tf.device(next(devices)):
                return tf.nest.map_structure(tf.identity, packed)

        return strategy.experimental_distribute_values_from_function(copy)

    @tf.autograph.experimental.do_not_convert
    def on_replica(self, element: tf.Tensor, resident: Any) -> Any:
        """The examples at these indices: a nest like ``arrays``, of leading dimension [n]."""
        return tf.nest.map_structure(
            lambda array, rows: _unpack(tf.gather(rows, element), array), self.arrays, resident
        )

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the examples and their order; reads all of them once."""
        content = hashlib.sha256()
        for array in tf.nest.flatten(self.arrays):
            content.update(f"{array.dtype.str}{array.shape}".encode())
            content.update(np.ascontiguousarray(array).data)
        return fingerprint(self, content.hexdigest())


# TensorFlow gathers these on a CPU only: on a GPU, all of the data would be copied to the host at
# every step. Rows are therefore kept as int64 words, which both gather, and looked at as what they
# are after.
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
