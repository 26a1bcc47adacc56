"""What the peers share: their flags, and the lines that they exchange with `step_time.py`.

A peer trains in its own process (one for each worker) and waits on stdin between blocks, so that
the blocks of several peers can be interleaved. Each line is a number of steps; the peer trains so
many and answers with one line of JSON. By hand::

    printf '200\\n500\\n500\\n' | python benchmarks/peers/plain_loop.py --model=dense
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable

from absl import flags
from lines import answerer

from ctl.base.names import check_model_name
from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _MODEL = flags.DEFINE_string("model", "dense", "a model of ctl.jobs.models")
    _BATCH = flags.DEFINE_integer("global_batch_size", 64, "examples per step", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 1, "replicas; logical CPU devices where there is no GPU", lower_bound=1
    )
    _WORKERS = flags.DEFINE_list(
        "workers", "", "host:port of each worker, this process included; empty for one process"
    )
    _INDEX = flags.DEFINE_integer("worker_index", 0, "which of the workers this is", lower_bound=0)
    _JIT = flags.DEFINE_boolean("jit_compile", False, "compile with XLA, as the peer's users would")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a peer has to train.

    Attributes:
        model: a name of ctl.jobs.models.
        global_batch_size: examples per step, of all replicas.
        replicas: of one process.
        workers: ``host:port`` of each worker; empty for a single process.
        worker_index: which of the workers this is.
        jit_compile: compile with XLA, or with `torch.compile`.
    """

    model: str
    global_batch_size: int
    replicas: int
    workers: tuple[str, ...]
    worker_index: int
    jit_compile: bool


def setting() -> Setting:
    """What the flags say."""
    return Setting(
        model=_MODEL.value,
        global_batch_size=_BATCH.value,
        replicas=_REPLICAS.value,
        workers=tuple(_WORKERS.value),
        worker_index=_INDEX.value,
        jit_compile=_JIT.value,
    )


def serve(build: Callable[[Setting], tuple[Callable[[int], float], dict]]) -> None:
    """Parses the flags, builds the peer and answers until stdin ends.

    ``build(setting)`` returns ``train`` and the first answer (versions, device). ``train(steps)``
    waits for the devices and returns the mean loss of these steps.
    """

    def main() -> None:
        check_model_name(_MODEL.value)
        answer = answerer()
        train, about = build(setting())
        answer(**about)
        for line in sys.stdin:
            steps = int(line)
            start, cpu_start = time.perf_counter(), time.process_time()
            loss = train(steps)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            answer(steps=steps, seconds=seconds, cpu_seconds=cpu_seconds, loss=loss)
        os._exit(0)  # threads of a library must not keep the process alive

    run_command(main, sys.modules["__main__"].__doc__)


def refuse_workers(setting: Setting) -> None:
    """Raises `UsageError` with several workers, for a peer of one process."""
    if setting.workers:
        raise UsageError("this peer runs in one process only")
