"""What the peers share: their flags, and the lines they exchange with `step_time.py`.

A peer trains in a process of its own and waits on stdin. For each line, a number of steps, it
trains on so many batches and answers with one line of JSON, so that the blocks of several peers can
be interleaved. By hand::

    printf '200\\n500\\n500\\n' | python benchmarks/peers/plain_loop.py --model=dense
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from absl import flags
from lines import answerer

from ctl.errors import UsageError
from ctl.flags import group, run
from ctl.names import check_model_name

with group("What is trained"):
    _MODEL = flags.DEFINE_string("model", "dense", "a model of ctl.models")
    _BATCH = flags.DEFINE_integer("global_batch_size", 64, "examples per step", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 1, "replicas; logical CPU devices where there is no GPU", lower_bound=1
    )
    _JIT = flags.DEFINE_boolean("jit_compile", False, "compile with XLA, as the peer's users would")


def serve(build: Callable[[str, int, int, bool], tuple[Callable[[int], float], dict]]) -> None:
    """Parses the flags, builds the peer and answers until stdin ends.

    ``build(model, global_batch_size, replicas, jit_compile)`` returns ``train`` and what is to be
    said about the peer (its versions, its device). ``train(steps)`` returns the mean loss of these
    steps; it must have waited for the devices.
    """

    def main() -> None:
        check_model_name(_MODEL.value)
        answer = answerer()
        train, about = build(_MODEL.value, _BATCH.value, _REPLICAS.value, _JIT.value)
        answer(**about)
        for line in sys.stdin:
            steps = int(line)
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = train(steps)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            answer(steps=steps, seconds=seconds, cpu_seconds=cpu_seconds, loss=loss)

    run(main, sys.modules["__main__"].__doc__)


def tensorflow_devices(replicas: int) -> list[str]:
    """Devices of the replicas, for a peer on TensorFlow; call it before anything else of it."""
    import tensorflow as tf

    if gpus := tf.config.list_physical_devices("GPU"):
        if len(gpus) < replicas:
            raise UsageError(f"--replicas={replicas}, but TensorFlow sees {len(gpus)} GPUs")
        return [f"/gpu:{i}" for i in range(replicas)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    return [f"/cpu:{i}" for i in range(replicas)]
