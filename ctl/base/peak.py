"""What this machine can do at most: FLOPs of a matrix product, and bytes that are copied in memory.

Both are the best of some tries. Other work on the machine makes them too low.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

_SECONDS = 0.3  # that a peak is measured for


@functools.cache
def peak_flops(dtype: str = "float32") -> float:
    """The FLOPs per second of products of square matrices on one device, the best of `_SECONDS`.
    Measured once in a process."""
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    size, products = (8192, 8) if on_gpu else (1024, 2)

    @tf.function
    def multiply(matrix: tf.Tensor) -> tf.Tensor:
        result = matrix
        for _ in range(products):
            result = tf.matmul(result, matrix)
        return result[0, 0]

    with tf.device("/gpu:0" if on_gpu else "/cpu:0"):
        matrix = tf.zeros([size, size], dtype)
        multiply(matrix).numpy()
        return 2 * products * size**3 / _fastest(lambda: multiply(matrix).numpy())


def copied_bytes(size: int = 1 << 26) -> float:
    """The bytes per second of a copy of ``size`` bytes in memory, by one thread. A byte that is
    read and written counts once."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return size / _fastest(lambda: np.copyto(target, source))


def _fastest(work: Callable[[], object]) -> float:
    """The least seconds that ``work`` takes, of all calls in `_SECONDS`."""
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
