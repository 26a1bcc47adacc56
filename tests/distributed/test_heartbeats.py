"""ctl.distributed.heartbeats: who is missed, who is lost, how all end. In processes without
TensorFlow, because a coordinator ends its process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ctl.launch import cluster

pytestmark = pytest.mark.slow  # starts processes

# A coordinator, its worker or its parameter server: says what it learns.
TASK = """
import sys, time
from absl import logging
from ctl.distributed import heartbeats
from ctl.distributed.cluster import Tasks
from ctl.base.signals import Interrupted
from ctl.errors import CtlError, UsageError

logging.set_verbosity(logging.INFO)
heartbeats._BEAT_SECONDS, heartbeats._LEAVING_SECONDS = 0.1, 0.3
heartbeats._SILENT_SECONDS = float(sys.argv[7])
tasks = Tasks(sys.argv[1], (sys.argv[2],), (sys.argv[3],), sys.argv[4], 0)
doing = sys.argv[5]
try:
    if not tasks.is_coordinator:
        print("up", flush=True)
        raise SystemExit(heartbeats.attend(tasks, float(sys.argv[6])))
    with heartbeats.Heartbeats(tasks, worker_timeout=float(sys.argv[8])) as roll:
        roll.wait_for_all(float(sys.argv[6]))
        print("all", flush=True)
        while doing == "train" and not roll.asked_to_stop:
            roll.check()
            time.sleep(0.01)
        while doing == "blocked":
            time.sleep(0.01)
        if doing == "fail":
            raise UsageError("a wrong flag")
        if doing == "bug":
            time.sleep(0.3)
            raise RuntimeError("connection reset")
        if doing == "export":
            raise Interrupted("SIGTERM: all steps are saved")
        if doing == "ctrl-c":
            raise KeyboardInterrupt
        print("saved", flush=True)
except CtlError as error:
    print(error, flush=True)
    raise SystemExit(error.exit_code)
"""


class Job:
    """Starts tasks with one set of addresses; ends them."""

    def __init__(self):
        jobs = cluster(1, ps=1)
        self.addresses = [jobs["chief"][0], jobs["worker"][0], jobs["ps"][0]]
        self.processes = []

    def start(
        self,
        kind: str,
        doing: str = "train",
        timeout: float = 20,
        silent: float = 20,
        alone: float = 20,
        addresses: list[str] | None = None,
    ) -> subprocess.Popen:
        options = [*(addresses or self.addresses), kind, doing, timeout, silent, alone]
        process = subprocess.Popen(
            [sys.executable, "-c", TASK, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def all(self, doing: str = "train", **options) -> list[subprocess.Popen]:
        started = [self.start(kind, doing, **options) for kind in ("chief", "worker", "ps")]
        assert started[0].stdout.readline() == "all\n"
        return started


@pytest.fixture
def job():
    started = Job()
    limit = threading.Timer(60, started.kill)  # so that no read waits for ever
    limit.start()
    yield started
    limit.cancel()
    started.kill()
    for process in started.processes:
        process.communicate()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, (out + err).strip()


@pytest.mark.parametrize(
    ("doing", "code"),
    [("nothing", 0), ("fail", 2), ("bug", 1), ("export", 42), ("ctrl-c", 130)],
)
def test_all_end_with_the_code_of_the_coordinator(job, doing, code):
    assert [ended(process)[0] for process in job.all(doing)] == [code] * 3


def test_a_lost_parameter_server(job):
    chief, worker, ps = job.all()
    ps.kill()
    assert ended(chief) == (
        5,
        f"lost ps 0 at {job.addresses[2]} (its process has ended); the same command resumes from "
        "the last checkpoint",
    )
    assert ended(worker)[0] == 5


def test_what_a_lost_server_caused_is_told_as_that(job):
    """TensorFlow's own exception comes first."""
    chief, _, ps = job.all("bug")
    ps.kill()
    code, said = ended(chief)
    assert code == 5 and said.startswith("lost ps 0 at")


def test_a_coordinator_that_is_blocked_ends_too(job):
    """The main thread is in a read from a parameter server, which nothing interrupts."""
    chief, worker, ps = job.all("blocked")
    ps.kill()
    assert ended(chief)[0] == ended(worker)[0] == 5


def test_no_worker_left(job):
    chief, worker, ps = job.all(alone=0.5)
    worker.kill()
    code, said = ended(chief)
    assert code == 5
    assert f"(--worker_timeout): worker 0 at {job.addresses[1]} (its process has ended)" in said
    assert ended(ps)[0] == 5


def test_a_worker_comes_back(job):
    chief, worker, ps = job.all()
    worker.kill()
    job.start("worker")
    line = ""
    while "is back" not in line:
        line = chief.stderr.readline()
        assert line, "it never came back"
    ps.send_signal(signal.SIGTERM)
    assert ended(chief)[0] == 0


@pytest.mark.parametrize("frozen", [1, 2])
def test_a_frozen_server(job, frozen):
    tasks = job.all(silent=2)
    tasks[frozen].send_signal(signal.SIGSTOP)
    code, said = ended(tasks[0])
    assert code == 5
    assert said.splitlines()[-1].endswith("has been silent for 2 s")
    assert ended(tasks[3 - frozen])[0] == 5


def test_a_coordinator_that_dies_or_freezes(job):
    chief, worker, ps = job.all(silent=2)
    chief.send_signal(signal.SIGSTOP)
    where = f"the coordinator at {job.addresses[0]}"
    assert ended(worker) == (5, f"up\nworker 0: {where} has been silent for 2 s")
    chief.kill()
    assert ended(ps)[0] == 5


def test_sigterm(job):
    """To a worker: it leaves, a little later. To a parameter server: first all is saved."""
    chief, worker, ps = job.all()
    worker.send_signal(signal.SIGTERM)
    assert ended(worker) == (42, "up\nworker 0: left after SIGTERM")
    job.start("worker")
    ps.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    ps.send_signal(signal.SIGTERM)  # impatience changes nothing
    code, said = ended(chief)
    assert code == 0 and "saved" in said.splitlines()
    assert ended(ps)[0] == 0


def test_who_does_not_come_is_named(job):
    chief, ps = job.start("chief", timeout=1), job.start("ps")
    code, said = ended(chief)
    assert code == 5
    missing = f"worker 0 at {job.addresses[1]} (not connected yet)"
    assert said.endswith(f"(--startup_timeout) waiting for {missing}")
    assert ended(ps)[0] == 5


def test_a_coordinator_that_does_not_come(job):
    code, said = ended(job.start("worker", timeout=1))
    assert code == 5
    where = f"the coordinator at {job.addresses[0]} (Connection refused)"
    assert said.endswith(f"worker 0: gave up after 1 s (--startup_timeout) waiting for {where}")


def test_another_list_of_tasks(job):
    others = [*job.addresses[:2], "127.0.0.1:1"]
    worker = job.start("worker", addresses=others)
    assert worker.stdout.readline() == "up\n"
    chief = job.start("chief", timeout=4)
    where = f"the coordinator at {job.addresses[0]}"
    assert ended(worker) == (
        2,
        f"{where} has another list of addresses: give all tasks the same list",
    )
    code, said = ended(chief)
    assert code == 5
    assert f"worker 0 at {job.addresses[1]} (has another TF_CONFIG)" in said


def test_strangers_are_ignored(job):
    chief, worker = job.start("chief"), job.start("worker")
    assert worker.stdout.readline() == "up\n"
    host, port = job.addresses[0].split(":")
    greetings = [b"\xff\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b"end 0\nleave\n"]
    for greeting in [*greetings, b"x worker 0\n", b"x ps 0\n"]:
        while True:
            try:
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(greeting)
                break
            except OSError:
                assert chief.poll() is None
    ps = job.start("ps")
    assert chief.stdout.readline() == "all\n"
    ps.send_signal(signal.SIGTERM)
    assert ended(chief)[0] == 0


def test_a_port_in_use(job):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(job.addresses[0].split(":")[1])))
        taken.listen()
        code, said = ended(job.start("chief"))
    assert code == 5
    assert said.startswith(f"the coordinator cannot listen on {job.addresses[0]}: ")
