"""The program that sums tensors over all replicas for some seconds, and checks every element.

    python -m ctl.doctor.sums SECONDS COMMUNICATION STARTUP_SECONDS

With ``TF_CONFIG``, it is a worker of a job. Without, it sums over the GPUs of this machine or,
where there is none, over two logical CPUs.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import tensorflow as tf

from ctl import reduce
from ctl.distributed import strategy, workers
from ctl.distributed.cluster.members import resolve
from ctl.distributed.watch import watchdog
from ctl.flags.parsing import exit_codes

_ELEMENTS = 1 << 20  # of float32
_STUCK_SECONDS = 30.0  # for one sum
_DOING = "the all-reduce of the doctor"


def checked_sums(placement: strategy.Placement, seconds: float) -> dict[str, float]:
    """Sums for so many ``seconds``. All workers must call it.

    Returns:
        How many ``sums`` were made of so many ``bytes``, over how many ``replicas``, how many
        elements were ``wrong`` on this worker, and the ``seconds`` of one sum.
    """
    replicas = placement.strategy.num_replicas_in_sync
    # Whole numbers below 2^24, whose sums are exact in float32 in any order.
    pattern = np.arange(_ELEMENTS, dtype=np.float32) % 251
    factors = np.arange(replicas, dtype=np.float32) % 16 + 1

    @tf.function(autograph=False)
    def sum_once(number: tf.Tensor, over: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def on_replica() -> tuple[tf.Tensor, tf.Tensor]:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            part = pattern * tf.gather(factors, replica) + number
            total, ended = reduce.all_reduce([part, tf.identity(over)], options=placement.options)
            right = pattern * factors.sum() + number * replicas
            return tf.math.count_nonzero(total != right), ended

        results = placement.strategy.run(on_replica)
        wrong, ended = map(placement.strategy.experimental_local_results, results)
        return tf.add_n(wrong), ended[0]

    sums, wrong, began = 0, 0, time.perf_counter()
    while True:
        over = float(sums > 1 and time.perf_counter() - began > seconds)
        with (
            workers.naming_lost_peers(placement.strategy, _DOING),
            watchdog.collective(_DOING),
        ):
            errors, ended = sum_once(tf.constant(sums % 1000, tf.float32), tf.constant(over))
            wrong += int(errors)
        if ended > 0:
            break
        sums += 1
        if sums == 1:  # which was traced
            began = time.perf_counter()
    each = (time.perf_counter() - began) / sums
    size = 4 * _ELEMENTS
    return {"sums": sums, "bytes": size, "replicas": replicas, "wrong": wrong, "seconds": each}


def main() -> None:
    """Prints what `checked_sums` returns as a line of JSON."""
    seconds, communication, startup = float(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if "TF_CONFIG" in os.environ:
        placement = strategy.make_multi_worker(
            resolve(),
            communication=communication,
            collective_timeout=_STUCK_SECONDS,
            startup_timeout=startup,
        )
    else:
        gpus = len(tf.config.list_physical_devices("GPU"))
        placement = strategy.make_strategy(
            "mirrored", replicas=gpus or 2, cross_device_ops="nccl" if gpus else "ring"
        )
    found = checked_sums(placement, seconds)
    workers.leave_together(placement.strategy)
    print(json.dumps(found))


if __name__ == "__main__":
    with exit_codes():
        main()
