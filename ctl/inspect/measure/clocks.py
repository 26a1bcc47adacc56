"""Meets all workers at barriers, by which `ctl.inspect.measure.timeline` compares their clocks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ctl.distributed.watch import watchdog
from ctl.distributed.workers import is_multi_worker, naming_lost_peers
from ctl.phases.marks import stamp

# The tightest of so many meetings bounds the offset of a clock. They take 0.2 to 0.4 s on loopback.
BARRIERS = 200

_DOING = "comparing clocks"


def barriers(strategy: tf.distribute.Strategy, count: int = BARRIERS) -> np.ndarray:
    """Meets all workers ``count`` times; every worker must call it.

    Returns:
        float64 [count, 2], seconds since the epoch on this worker's clock: before and after each
        meeting. With one worker, [0, 2].

    Raises:
        PeerError: a worker was lost.
    """
    if not is_multi_worker(strategy):
        return np.zeros([0, 2])

    def meet(token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        arrived = stamp([token])
        with tf.control_dependencies([arrived]):  # the stamp precedes the meeting
            token = tf.identity(token)
        total = tf.distribute.get_replica_context().all_reduce("SUM", token)
        return total, tf.stack([arrived, stamp([total])])

    @tf.function
    def meet_all() -> tf.Tensor:
        stamps = tf.TensorArray(tf.float64, count, element_shape=[2])
        token = strategy.run(lambda: tf.zeros([]))
        for number in tf.range(count):
            token, times = strategy.run(meet, args=(token,))
            stamps = stamps.write(number, strategy.experimental_local_results(times)[0])
        return stamps.stack()

    with naming_lost_peers(strategy, _DOING), watchdog.collective(_DOING, first=True):
        return meet_all().numpy()
