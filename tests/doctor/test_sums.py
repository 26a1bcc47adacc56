"""The all-reduce of the doctor: real jobs, sums that are wrong, and a worker that is lost in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tensorflow as tf
from waiting import wait_until

from ctl import launch
from ctl.distributed import strategy
from ctl.distributed.cluster.external_watchdog import ask_grpc
from ctl.doctor import all_reduce, sums
from ctl.doctor.checks import Job
from ctl.doctor.report import FINE, NOT_FINE, Finding


def test_wrong_sums_are_counted(mirrored, monkeypatch):
    """One bit of one element of one sum."""
    placement = strategy.Placement(mirrored(2), None, "")
    found = sums.checked_sums(placement, 0.2)
    assert found["wrong"] == 0 and found["sums"] > 1 and found["replicas"] == 2
    assert judged(found).state == FINE
    right = sums.reduce.all_reduce

    def broken(tensors, **options):
        total, over = right(tensors, **options)
        return [tf.tensor_scatter_nd_add(total, [[12345]], [2.0**-4]), over]

    monkeypatch.setattr(sums.reduce, "all_reduce", broken)
    found = sums.checked_sums(placement, 0.2)
    assert found["wrong"] == 2 * (found["sums"] + 1)  # on both replicas, the last sum included
    assert judged(found).state == NOT_FINE
    assert judged(found).seen == f"{found['wrong']} elements of {found['sums']} sums are wrong"


def judged(found: dict) -> Finding:
    return all_reduce.check_all_reduce(Job([""], {}), {0: all_reduce.Sums(**found)})[0]


@pytest.fixture
def workers() -> list[str]:
    return launch.cluster(2)["worker"]


@contextlib.contextmanager
def job(out: Path, workers: Sequence[str], *flags: str):
    """Two doctors of this machine, as `ctl.launch` starts them."""
    processes = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_NUM_INTRAOP_THREADS": "1"}
        command = [sys.executable, "-m", "ctl.doctor", "--json", *flags]
        with open(out / f"out-{index}", "wb") as output, open(out / f"err-{index}", "wb") as errors:
            processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=errors))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rows(out: Path, worker: int) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for row in json.loads((out / f"out-{worker}").read_text())["checks"]:
        found.setdefault(row["check"], []).append(row)
    return found


def runs_tensorflow(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        ask_grpc(host, int(port), 1.0)
        return True
    return False


def sums_program_of(process: subprocess.Popen) -> int | None:
    """The process of `ctl.doctor.sums` that a doctor has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            if b"ctl.doctor.sums" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


@pytest.mark.slow
@pytest.mark.sample
def test_two_workers(tmp_path, workers):
    with job(
        tmp_path, workers, "--all_reduce_seconds=1", f"--model_dir={tmp_path}/run"
    ) as processes:
        assert [process.wait(240) for process in processes] == [0, 0]
    for worker in range(2):
        found = rows(tmp_path, worker)
        ((nccl,), sums) = found.pop("nccl"), found["all_reduce"]
        assert {row["state"] for rows in found.values() for row in rows} == {"fine"}
        assert {"tensorflow", "memory", "matmul"} < found.keys()  # fine if they were measured
        versions = {part.split()[0] for part in found["versions"][0]["seen"].split(", ")}
        assert versions == {"ctl", "python", "tensorflow", "keras", "numpy"}
        assert nccl["state"] == "skipped" and nccl["seen"] == "no GPU"
        assert ["over 2 replicas are right" in row["seen"] for row in sums] == [True]


@pytest.mark.slow
def test_a_worker_that_is_lost_while_it_sums(tmp_path, workers):
    with job(tmp_path, workers, "--all_reduce_seconds=60") as processes:
        wait_until(lambda: sums_program_of(processes[1]), 120)
        wait_until(lambda: all(map(runs_tensorflow, workers)), 120)
        time.sleep(0.5)  # mostly, they sum by now
        os.kill(sums_program_of(processes[1]), signal.SIGKILL)
        assert [process.wait(240) for process in processes] == [2, 2]
    for worker in range(2):
        first, second = rows(tmp_path, worker)["all_reduce"]
        assert first["seen"].startswith("worker 0: ") and "worker 1" in first["seen"]
        assert second["seen"] == "worker 1: died of SIGKILL"
