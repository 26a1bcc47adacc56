"""What a training makes of its machine: memory, and the share of the peak that it uses.

Functions for `ctl.control.scalars.Scalars.extras`, which add scalars to a record.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf
from absl import logging

from ctl.base.peak import peak_flops


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
    if strategy.num_replicas_in_sync == 1:
        return 1
    mine = strategy.extended.worker_devices
    distinct = {d if "GPU" in d.upper() else d.upper().rpartition("CPU")[0] for d in mine}
    return len(distinct) * max(1, strategy.num_replicas_in_sync // max(1, len(mine)))
