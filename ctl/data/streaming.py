"""Data larger than memory: reads examples from their files while training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl.data.dataset import check_batch_size, distribution_options, fingerprint
from ctl.data.tfds_source import Source

# Shards read at the same time. The order of the examples depends on it, so it must not depend on
# the machine.
_CYCLE_LENGTH = 8


# Begins the message of the error for a label outside of the classes, see `ctl.data.explained`.
NO_CLASS = "no class of the dataset:"


class Streaming:
    """Examples that are read from their files and decoded in every epoch.

    Training is endless. Every epoch reads the shards in a new order, several at a time, through a
    shuffle buffer of encoded examples, and has each example once. Batches straddle epochs. The
    order is a pure function of (seed, epoch), of the files and of ``shuffle_buffer``. The buffers
    of the next two epochs are filled ahead, so that no step waits for one; three are in memory.
    Evaluation reads the examples once, in the order of the files; the last batch may be smaller.

    Starting at a step reads, but does not decode, the examples before it in its epoch.

    Every worker reads and decodes all global batches, and keeps its part. So the batches do not
    depend on the number of workers, but more workers do not make the input faster.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int,
        seed: int = 0,
        training: bool = True,
        shuffle_buffer: int = 8192,
        description: str = "",
    ):
        """Reads one example of ``source`` as a check.

        Args:
            source: the examples.
            global_batch_size: examples per batch.
            seed: of the order of examples.
            training: whether to shuffle and repeat.
            shuffle_buffer: number of encoded examples in the buffer.
            description: one line for the log.

        Raises:
            UsageError: the files are damaged, or there are fewer examples than a training batch.
        """
        self.num_examples = source.num_examples
        check_batch_size(global_batch_size, self.num_examples, training)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.training = training
        self.shuffle_buffer = shuffle_buffer
        self.info = source.info
        self.description = description or f"{self.num_examples} examples, streamed"
        self._source = source
        source.read(1)  # reports errors of all examples here, not at the first step

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns the batches from ``start_step`` on.

        An element is (images uint8 [global_batch_size, H, W, C], labels int64 [global_batch_size]).
        """
        first = start_step * self.global_batch_size
        records = self._shuffled(first) if self.training else self._source.records().skip(first)
        batches = records.map(
            self._decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        ).batch(self.global_batch_size, drop_remainder=self.training)
        if self.training:
            cardinality = tf.data.INFINITE_CARDINALITY
        else:
            cardinality = -(-max(0, self.num_examples - first) // self.global_batch_size)
        return (
            batches.apply(tf.data.experimental.assert_cardinality(cardinality))
            .prefetch(tf.data.AUTOTUNE)
            .with_options(distribution_options())
        )

    @tf.autograph.experimental.do_not_convert
    def _decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = self._source.decode(record)
        classes = self.info.num_classes
        if not classes:
            return image, label
        # XLA would turn such a label into a loss of NaN.
        known = tf.logical_and(label >= 0, label < classes)
        with tf.control_dependencies([tf.debugging.Assert(known, [NO_CLASS, label, classes])]):
            return image, tf.identity(label)

    def _shuffled(self, first: int) -> tf.data.Dataset:
        first_epoch, begin = divmod(first, self.num_examples)
        cycle_length = min(_CYCLE_LENGTH, self._source.num_shards)

        def read(epoch: tf.Tensor) -> tf.data.Dataset:
            seed = tf.stack([tf.constant(self.seed, tf.int64), epoch])
            shards = tf.random.experimental.stateless_shuffle(
                tf.range(self._source.num_shards, dtype=tf.int64), seed=seed, alg="philox"
            )
            # `shuffle` mixes its seed with the global one, unless this graph has a seed of its own.
            tf.compat.v1.set_random_seed(1)
            buffer_seed = tf.random.stateless_uniform(
                (), seed=seed, minval=None, maxval=None, dtype=tf.int64, alg="philox"
            )
            return (
                self._source.records(shards, cycle_length)
                .shuffle(self.shuffle_buffer, seed=buffer_seed, reshuffle_each_iteration=False)
                .skip(tf.where(epoch == first_epoch, tf.constant(begin, tf.int64), 0))
            )

        # One epoch at a time, but with a parallel call, so that the next one is read ahead.
        return tf.data.Dataset.range(first_epoch, tf.int64.max).interleave(
            read, cycle_length=1, num_parallel_calls=1, deterministic=True
        )

    def resident(self, strategy: tf.distribute.Strategy) -> tuple[()]:
        """See `Dataset.resident`."""
        return ()

    def on_replica(self, element: Any, resident: tuple[()]) -> Any:
        """See `Dataset.on_replica`."""
        return element

    def fingerprint(self) -> dict[str, Any]:
        """Returns what identifies the files and the order; reads no example."""
        return {
            **fingerprint(self, self._source.content_hash()),
            "shuffle_buffer": self.shuffle_buffer,
        }
