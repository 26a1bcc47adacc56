"""Jobs of several workers: starting them, waiting for them, what they said and what they saved."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from paths import SUPPORT
from zygote import Command, Zygote

from ctl import launch

WORKER = SUPPORT / "multi_worker.py"
BOUND = 900  # seconds for a whole job, many times what it takes


@contextlib.contextmanager
def start_job(
    zygote: Zygote,
    out: Path,
    *options: str,
    workers: int = 2,
    addresses: Sequence[str] | None = None,
    namespaces: Sequence[str] | None = None,
    program: Path = WORKER,
) -> Iterator[list[Command]]:
    """Starts the workers of a job (``run()`` of ``program``) without the launcher, each in a
    network namespace where these are given; ends what is left of them."""
    addresses = addresses or launch.cluster(workers)["worker"]
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(workers):
            task = {"type": "worker", "index": index}
            process = zygote.start(
                program.stem,
                str(out),
                *options,
                path=[program.parent],
                directory=out / f"process-{index}",
                namespace=namespaces[index] if namespaces else None,
                TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": task}),
            )
            stack.callback(_end, zygote, process)
            processes.append(process)
        yield processes


def _end(zygote: Zygote, process: Command) -> None:
    if not zygote.ended(process):
        process.signal(signal.SIGKILL)
        process.wait()


def said(out: Path, index: int) -> str:
    return "".join((out / f"process-{index}" / s).read_text() for s in ("stdout", "stderr"))


def last_line(out: Path, index: int) -> str:
    return (out / f"process-{index}" / "stderr").read_text().strip().splitlines()[-1]


def codes(processes: list[Command]) -> list[int]:
    deadline = time.monotonic() + BOUND
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


def assert_codes(out: Path, processes: list[Command], expected: list[int]) -> None:
    """Waits for the workers of a job; each must end with its code."""
    for index, (code, right) in enumerate(zip(codes(processes), expected, strict=True)):
        assert code == right, f"worker {index} ended with {code}: {said(out, index)[-2000:]}"


def run_job(
    job: Callable, out: Path, *options: str, workers: int = 2, code: int = 0, **more
) -> None:
    """Runs a job (the fixture) to its end; all workers must end with ``code``."""
    with job(out, *options, workers=workers, **more) as processes:
        assert_codes(out, processes, [code] * workers)


def finished(out: Path, workers: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(out / f"worker-{i}.npz")) for i in range(workers)]


def weights(saved: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [value for name, value in saved.items() if name.startswith("arr_")]
