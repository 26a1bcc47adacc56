"""Seeds that are a function of the run, the step, the replica and the micro-batch."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator

import tensorflow as tf


class Seeds:
    """Makes the seeds of a step from ``run``, the same on all workers."""

    def __init__(self, run: int):
        self.run = run
        self._tracing = threading.local()  # each replica is traced in a separate thread

    @contextlib.contextmanager
    def inside(self, place: tf.Tensor) -> Iterator[None]:
        """While inside, `make` uses ``place``, a result of `place`. A function that TensorFlow
        traces once for several callers must get it as an argument."""
        self._tracing.place = place
        try:
            yield
        finally:
            del self._tracing.place

    @staticmethod
    def place(micro_batch: int | tf.Tensor) -> tf.Tensor:
        """Returns the number of this replica and ``micro_batch``, int32 [2]."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.stack([replica, micro_batch])

    def make(self, salt: int | str, step: tf.Tensor, per_replica: bool) -> tf.Tensor:
        """See `ctl.TrainStep.seed`. ``step`` is int64."""
        salt = zlib.crc32(salt.encode()) if isinstance(salt, str) else salt
        numbers = [salt, step]
        if per_replica:
            numbers += tf.unstack(getattr(self._tracing, "place", self.place(0)))
        seed = tf.constant([self.run, 0], tf.int64)
        for number in numbers:
            # One algorithm, so that the seed does not depend on the device.
            number = tf.cast(number, tf.int64)
            seed = tf.random.experimental.stateless_fold_in(seed, number, alg="philox")
        return tf.cast(seed, tf.int32)
