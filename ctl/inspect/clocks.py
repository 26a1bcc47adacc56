"""The only place that meets other workers to compare clocks; what is made of it is in
`ctl.inspect.timeline`."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ctl.inspect.marks import stamp
from ctl.workers import SUM, is_multi_worker

# The bounds of the offset are as tight as the best of so many meetings: +-0.4 to 0.5 ms on loopback,
# in 0.2 to 0.35 s.
BARRIERS = 200


def barriers(
    strategy: tf.distribute.Strategy, count: int = BARRIERS, timeout: float = 300.0
) -> np.ndarray:
    """Meets all workers ``count`` times; every worker must call it.

    Returns:
        float64 [count, 2], seconds on this worker's clock: before and after each meeting. None,
        [0, 2], where there is one worker.

    Raises:
        tf.errors.DeadlineExceededError: a worker did not come for ``timeout`` seconds.
    """
    if not is_multi_worker(strategy):
        return np.zeros([0, 2])
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout)

    def meet(token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        arrived = stamp([token])
        with tf.control_dependencies([arrived]):  # never stamped after the meeting has begun
            token = tf.identity(token)
        total = tf.distribute.get_replica_context().all_reduce(SUM, token, options=options)
        return total, tf.stack([arrived, stamp([total])])

    @tf.function
    def meet_all() -> tf.Tensor:
        stamps = tf.TensorArray(tf.float64, count, element_shape=[2])
        token = strategy.run(lambda: tf.zeros([]))
        for number in tf.range(count):
            token, times = strategy.run(meet, args=(token,))
            stamps = stamps.write(number, strategy.experimental_local_results(times)[0])
        return stamps.stack()

    return meet_all().numpy()
