"""What a training makes of its machine: memory, and the share of the peak that it uses.

Functions for `ctl.control.scalars.Scalars.extras`, which add scalars to a record.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf
from absl import logging

from ctl.distributed import replicas

_SECONDS = 0.3  # that the peak is measured for


def peak_memory(scalars: Mapping[str, float]) -> dict[str, float]:
    """``peak_memory_mib``: the most memory so far, of the GPU that has used most or, without GPUs,
    of this process."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return {"peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    peaks = [tf.config.experimental.get_memory_info(gpu.name[-5:])["peak"] for gpu in gpus]
    return {"peak_memory_mib": max(peaks) / 2**20}


def utilization(
    strategy: tf.distribute.Strategy, flops: Callable[[], float | None]
) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Measures the peak of the devices of ``strategy``, and returns what adds ``mfu``: the FLOPs of
    forward and backward per second, divided by that peak. ``flops`` returns those of an example;
    it adds nothing where they are None, or examples are not known."""
    dtype = keras.mixed_precision.dtype_policy().compute_dtype
    peak = peak_flops(dtype)
    devices = _devices(strategy)
    logging.info(
        "peak: %.4g GFLOP/s (%s matrix product, on each of %d devices)", peak / 1e9, dtype, devices
    )

    def mfu(scalars: Mapping[str, float]) -> dict[str, float]:
        rate, each = scalars.get("examples_per_second"), flops()
        return {"mfu": rate * each / peak / devices} if rate and each else {}

    return mfu


def _devices(strategy: tf.distribute.Strategy) -> int:
    """Devices of the job, where the logical ones of a CPU are one."""
    if replicas.is_default(strategy):  # which has no devices
        return 1
    mine = strategy.extended.worker_devices
    distinct = {d if "GPU" in d.upper() else d.upper().rpartition("CPU")[0] for d in mine}
    return len(distinct) * max(1, strategy.num_replicas_in_sync // max(1, len(mine)))


@functools.cache
def peak_flops(dtype: str = "float32") -> float:
    """The FLOPs per second of products of square matrices on one device, the best of `_SECONDS`.
    Measured once in a process; other work on the machine makes it too low."""
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
        best, end = float("inf"), time.perf_counter() + _SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            multiply(matrix).numpy()
            best = min(best, time.perf_counter() - start)
    return 2 * products * size**3 / best
