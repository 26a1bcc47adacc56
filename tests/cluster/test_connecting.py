"""ctl.cluster.connecting: a process that holds Python's lock ends in time, and says for whom it
waited."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from paths import ROOT

from ctl import launch
from ctl.cluster import connecting

pytestmark = pytest.mark.slow  # starts processes

HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(60)"


@pytest.fixture
def start():
    """Starts a process that executes a line in `connecting.limited`, which then prints "on"."""
    processes = []

    def start(inside: str, timeout: float, peers: dict[str, str]) -> subprocess.Popen:
        program = (
            "import ctypes, time; from ctl.cluster import connecting\n"
            f"with connecting.limited('worker 0', {peers}, {timeout}):\n"
            f"    print('inside', flush=True); {inside}\n"
            "print('on', flush=True)\n"
            "time.sleep(60)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "inside\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def server(answer: bytes):
    """Yields the address of a server that answers each connection with ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])
                    held[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def test_a_process_that_holds_the_lock_ends_and_names_who_does_not_answer(start):
    gone = launch.cluster(1)["worker"][0]
    with server(b"\0\0\0\4\0\0\0\0\0") as well, server(b"") as frozen:
        peers = {"worker 1": well, "worker 2": frozen, "worker 3": gone}
        process = start(HOLDS_THE_LOCK, 1.0, peers)
        errors = process.communicate(timeout=40)[1]
    assert process.returncode == 5
    assert errors == (
        "worker 0: TensorFlow has not connected the job after 1 s (--startup_timeout); waiting for "
        f"worker 2 (at {frozen}: timed out), worker 3 (at {gone}: Connection refused)\n"
    )


def test_it_says_for_whom_it_waits(monkeypatch, capfd):
    """And gives no more than the time that it has."""
    monkeypatch.setattr(connecting, "_QUIET_SECONDS", 0.2)
    monkeypatch.setattr(connecting, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(connecting, "_LINGER_SECONDS", 0.0)
    ended = []
    monkeypatch.setattr(os, "kill", lambda *call: ended.append(call))
    reader, writer = os.pipe()
    gone = launch.cluster(1)["worker"][0]
    monkeypatch.setattr(sys, "argv", ["", "worker 0", "1.0", f'{{"ps 0": "{gone}"}}'])
    with open(reader) as stdin, open(writer, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        began = time.monotonic()
        connecting.main()
    assert time.monotonic() - began >= 1.0
    assert ended == [(os.getppid(), 5)]
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines[:-1]] == [
        f"worker 0: TensorFlow connects the job since {seconds} s" for seconds in (0, 0, 1)
    ]
    assert all(f"ps 0 (at {gone}: Connection refused)" in line for line in lines)


def test_who_is_connected_in_time_goes_on(start):
    process = start("pass", 1.0, {})
    assert process.stdout.readline() == "on\n"
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTRAP)  # means again what it meant before
    assert process.wait(20) == -signal.SIGTRAP


def test_nothing_is_left_of_who_dies_meanwhile(start):
    """stderr ends when the last process that has it open ends."""
    process = start(HOLDS_THE_LOCK, 600.0, {})
    process.kill()
    assert process.communicate(timeout=40)[1] == ""


def test_a_worker_that_freezes_while_tensorflow_connects():
    """The chief's server runs, and waits for a worker that came to the rendezvous."""
    program = """
import os, signal, sys
import tensorflow as tf
from ctl.cluster import Cluster, connecting
from ctl.strategy import make_multi_worker
if sys.argv[1] == "1":
    tf.distribute.MultiWorkerMirroredStrategy = lambda **_: os.kill(os.getpid(), signal.SIGSTOP)
addresses = tuple(sys.argv[2].split(","))
limited = connecting.limited
connecting.limited = lambda me, peers, timeout: limited(me, peers, 3.0)
make_multi_worker(Cluster(addresses, int(sys.argv[1]), "a test"))
"""
    addresses = launch.cluster(2)["worker"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(index), ",".join(addresses)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        errors = processes[0].communicate(timeout=120)[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == 5, errors
    last = errors.splitlines()[-1]
    assert last.startswith("worker 0: TensorFlow has not connected the job after 3 s"), errors
    assert f"waiting for worker 1 (at {addresses[1]}: " in last
