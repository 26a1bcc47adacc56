"""ctl.distributed.cluster.external_watchdog: a process that holds Python's lock ends in time, and
says for whom it waited."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from paths import ROOT
from worker_jobs import last_line, said

from ctl import launch
from ctl.distributed.cluster import external_watchdog

pytestmark = pytest.mark.slow  # starts processes

HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(60)"


@pytest.fixture
def start():
    """Starts a process that executes a line in a `Keeper`, which then prints "on"."""
    processes = []

    def start(
        inside: str,
        timeout: float,
        peers: dict[str, str],
        before: str = "pass",
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> subprocess.Popen:
        program = (
            "import ctypes, os, time\n"
            f"from ctl.distributed.cluster import external_watchdog as held; {before}\n"
            f"with held.Keeper('worker 0: it connects', {peers}, {timeout}, '--flag', "
            f"signals={[*map(int, signals)]}):\n"
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
            start_new_session=True,
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
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    connections[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_process_that_holds_the_lock_ends_and_names_who_does_not_answer(start, frozen):
    """Who is gone may have given up for the same reason, if another is frozen."""
    gone = launch.cluster(1)["worker"][0]
    with server(b"\0\0\0\4\0\0\0\0\0") as well, server(b"") as silent:
        peers = {"worker 1": well, "worker 2": silent if frozen else well, "worker 3": gone}
        process = start(HOLDS_THE_LOCK, 1.0, peers)
        errors = process.communicate(timeout=40)[1]
    assert process.returncode == 5
    begin, _, rest = errors.partition(" for ")
    assert begin == "worker 0: it connects"
    whom = f"2 (at {silent}: timed out)" if frozen else f"3 (at {gone}: Connection refused)"
    assert re.fullmatch(
        rf"\d+ s \(--flag\); gave up; waiting for worker {re.escape(whom)}\n", rest
    ), errors


def test_it_ends_though_nobody_can_read_why(start):
    process = start(HOLDS_THE_LOCK, 1.0, {}, before="os.close(2)")
    assert process.wait(40) == 5


def run_watch(
    monkeypatch,
    peers: dict[str, str],
    patient: bool,
    beats: int = 0,
    stdin: float = 3.0,
    quiet: float = 0.2,
    frozen: float | None = None,
) -> list:
    """Watches as the second process does, with short times, until its stdin ends after ``stdin``
    seconds. Returns its calls of kill."""
    for name, value in (("_TICK", 0.05), ("_QUIET_SECONDS", quiet), ("LINGER_SECONDS", 0.0)):
        monkeypatch.setattr(external_watchdog, name, value)
    task = os.getppid(), "worker 0: it connects", peers, 1.0, frozen, "--flag", patient
    ended: list = []
    monkeypatch.setattr(os, "kill", lambda *call: ended.append(call))
    reader, writer = os.pipe()

    def live() -> None:
        for _ in range(beats):
            time.sleep(0.1)
            os.write(writer, b".")
        done.wait(stdin)
        os.close(writer)

    done = threading.Event()
    thread = threading.Thread(target=live)
    thread.start()
    with open(reader) as source:
        monkeypatch.setattr(sys, "stdin", source)
        external_watchdog.watch(*task)
    done.set()
    thread.join()
    return ended


def test_it_says_for_whom_it_waits(monkeypatch, capfd):
    """And gives no more than the time that it has."""
    gone = launch.cluster(1)["worker"][0]
    began = time.monotonic()
    ended = run_watch(monkeypatch, {"ps 0": gone}, patient=False, stdin=60.0)
    assert ended == [(os.getppid(), 5)]
    assert time.monotonic() - began >= 1.0
    *lines, last = capfd.readouterr().err.splitlines()
    whom = f"waiting for ps 0 (at {gone}: Connection refused)"
    assert len(lines) == 3
    assert all(
        re.fullmatch(rf"worker 0: it connects for \d+ s; {re.escape(whom)}", x) for x in lines
    )
    assert (
        re.fullmatch(r"worker 0: it connects for \d+ s \(--flag\); gave up; (.*)", last)[1] == whom
    )


def test_who_was_gone_first_is_named(monkeypatch, capfd):
    """Not who gave up meanwhile, as this process does."""
    asked = collections.Counter()

    def ask(host, port, timeout):
        asked[port] += 1
        if port == 1 or asked[port] > 2:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(external_watchdog, "ask_grpc", ask)
    peers = {"worker 1": "host:1", "worker 2": "host:2"}
    assert run_watch(monkeypatch, peers, patient=False, stdin=60.0)
    lines = capfd.readouterr().err.splitlines()
    assert asked[2] > 2 and len(lines) == 4
    assert all(x.endswith("waiting for worker 1 (at host:1: Connection refused)") for x in lines)


def test_who_was_gone_shortly_before_the_others_gave_up(monkeypatch, capfd):
    """Before that, all answered."""
    asked = collections.Counter()

    def ask(host, port, timeout):
        asked[port] += 1
        if asked[port] > port:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(external_watchdog, "ask_grpc", ask)
    peers = {"worker 1": "host:2", "worker 2": "host:1"}
    assert run_watch(monkeypatch, peers, patient=False, stdin=60.0, quiet=1.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("gave up; waiting for worker 2 (at host:1: Connection refused)")


def test_who_waits_before_tensorflow_is_not_gone(start):
    """A worker that has not met all others answers, with what is not gRPC."""
    gone = launch.cluster(1)["worker"][0]
    with server(b"welcome all") as early:
        peers = {"worker 1": early, "worker 2": gone}
        process = start(HOLDS_THE_LOCK, 1.0, peers)
        errors = process.communicate(timeout=40)[1]
        assert errors.endswith(f"waiting for worker 2 (at {gone}: Connection refused)\n")
        with external_watchdog.Keeper("", {"worker 1": early}, 60.0, "") as keeper:
            assert keeper.silent() == f"worker 1 (at {early}: what answers is not gRPC)"


def test_who_is_silent_is_told_when_asked(start):
    gone = launch.cluster(1)["worker"][0]
    with server(b"\0\0\0\4\0\0\0\0\0") as well:
        with external_watchdog.Keeper("", {"ps 0": well, "ps 1": gone}, 60.0, "") as keeper:
            assert keeper.silent() == f"ps 1 (at {gone}: Connection refused)"
        with external_watchdog.Keeper("", {"ps 0": well}, 60.0, "") as keeper:
            assert keeper.silent() == ""
            keeper._process.kill()
            assert keeper.silent() == ""


def test_who_trains_may_save_after_a_signal():
    keeper = external_watchdog.Keeper("", {}, 60.0, "", patient=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # as the whole group may get them
        keeper._process.send_signal(number)
    keeper._write(b"?")
    assert keeper._process.stdout.readline() == b"\n"
    keeper.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("inside", [HOLDS_THE_LOCK, ""], ids=["lock", "leaves"])
def test_a_signal_ends_who_connects(start, number, inside):
    """At whatever moment it comes, and although the process has lost its handler."""
    before = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)"
    process = start(f"os.killpg(0, {int(number)}); {inside}", 600.0, {}, before)
    out, errors = process.communicate(timeout=40)
    assert (process.returncode, out) == (42, "")
    assert errors == f"{number.name}: worker 0: it connects; stopped\n"


def test_a_signal_that_does_not_end_it_is_its_own(start):
    process = start("os.killpg(0, 2); time.sleep(0.5)", 600.0, {}, signals=[signal.SIGTERM])
    errors = process.communicate(timeout=40)[1]
    assert process.returncode == -signal.SIGINT and errors.endswith("\nKeyboardInterrupt\n")


def test_a_signal_ends_it_though_nobody_reads_why(start):
    """stderr is a pipe that is full."""
    full = "os.set_blocking(2, False); b = b'x' * 4096\ntry:\n    while True: os.write(2, b)\n"
    full += "except BlockingIOError: os.set_blocking(2, True)\n"
    full += "import signal; signal.signal(15, signal.SIG_IGN)"
    process = start(f"os.killpg(0, 15); {HOLDS_THE_LOCK}", 600.0, {}, f"exec({full!r})")
    assert process.wait(40) == 42


def test_patience_with_a_process_that_is_busy(monkeypatch, capfd):
    """Python's lock may be held for a good reason."""
    with server(b"\0\0\0\4\0\0\0\0\0") as well:
        assert run_watch(monkeypatch, {"ps 0": well}, patient=True) == []
    assert capfd.readouterr().err == ""
    gone = launch.cluster(1)["worker"][0]
    assert run_watch(monkeypatch, {"worker 0": gone}, patient=True) == []  # it is started again
    assert run_watch(monkeypatch, {"ps 0": gone}, True, stdin=60.0) == [(os.getppid(), 5)]


def test_who_is_frozen_is_waited_for_no_longer_than_said(monkeypatch, capfd):
    """But who has not started yet is."""

    def ask(host, port, timeout):
        if port != 1 or time.monotonic() - began < 0.4:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        raise TimeoutError("timed out")

    monkeypatch.setattr(external_watchdog, "ask_grpc", ask)
    for port, last in ((1, "; gave up; waiting for worker 1 (at host:1: timed out)"), (2, None)):
        began = time.monotonic()
        peers = {"worker 1": f"host:{port}"}
        assert run_watch(monkeypatch, peers, False, stdin=60.0, frozen=0.3) == [(os.getppid(), 5)]
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.endswith(
            last or "(--flag); gave up; waiting for worker 1 (at host:2: Connection refused)"
        )


def test_a_beat_begins_anew(monkeypatch, capfd):
    gone = launch.cluster(1)["worker"][0]
    began = time.monotonic()
    assert run_watch(monkeypatch, {"ps 0": gone}, True, 15, 60.0) == [(os.getppid(), 5)]
    assert time.monotonic() - began >= 2.4
    assert capfd.readouterr().err.endswith(
        "gave up; waiting for ps 0 (at " + gone + ": Connection refused)\n"
    )


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


CONNECTS = """
import os, signal
import tensorflow as tf
from ctl.base import signals
from ctl.distributed.cluster import external_watchdog, resolve
from ctl.distributed.strategy import make_multi_worker

FLAG = "--startup_timeout"

def run():
    os.setpgrp()  # as of a launcher
    signals.begin()  # as a command
    me, keeper = resolve(None, None), external_watchdog.Keeper
    if me.index == 1:
        freeze = lambda **_: os.kill(os.getpid(), signal.SIGSTOP)
        tf.distribute.MultiWorkerMirroredStrategy = freeze
    external_watchdog.Keeper = lambda doing, peers, *_, signals, frozen: keeper(
        doing, peers, SECONDS, FLAG, signals=signals
    )
    make_multi_worker(me)
"""


def test_a_worker_that_freezes_while_tensorflow_connects(job, tmp_path):
    """The chief's server runs, and waits for a worker that came to the rendezvous."""
    program, addresses = tmp_path / "connects.py", launch.cluster(2)["worker"]
    program.write_text(CONNECTS.replace("SECONDS", "3.0"))
    with job(tmp_path, addresses=addresses, program=program) as (chief, _):
        assert chief.wait(120) == 5, said(tmp_path, 0)
    begin = (
        r"worker 0: TensorFlow has been connecting to the job for \d+ s \(--startup_timeout\); "
        r"gave up; waiting"
    )
    line = last_line(tmp_path, 0)
    assert re.match(rf"{begin} for worker 1 \(at {addresses[1]}: ", line), line


def test_a_signal_while_tensorflow_connects(job, tmp_path):
    """TensorFlow has taken SIGTERM, or is about to, and holds Python's lock."""
    program, addresses = tmp_path / "connects.py", launch.cluster(2)["worker"]
    program.write_text(CONNECTS.replace("SECONDS", "600.0"))
    with job(tmp_path, addresses=addresses, program=program) as (chief, _):
        host, port = addresses[0].split(":")
        listens, deadline = False, time.monotonic() + 60.0
        while not listens and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                external_watchdog.ask_grpc(host, int(port), 1.0)
                listens = True
            time.sleep(0.05)
        os.killpg(chief.pid, signal.SIGTERM)
        assert chief.wait(60) == 42, said(tmp_path, 0)
    assert last_line(tmp_path, 0).startswith("SIGTERM: ")
