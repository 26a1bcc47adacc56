"""ctl.distributed.cluster.forkserver: a worker of it is what a new process of the command is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

from ctl.distributed.cluster import elastic
from ctl.distributed.cluster.forkserver import Fork, ForkServer
from ctl.errors import Preempted

MODEL = """
import os, signal, sys, time

import keras

def make(shape, classes):
    print("argv", sys.argv)
    print("environment", sorted(os.environ.items()))
    print("group", os.getpgid(0) == os.getsid(0) == os.getpid(), "input", os.isatty(0))
    print("path", sys.path)
    print("descriptors", sorted(os.listdir("/proc/self/fd"), key=int)[:3], flush=True)
    {}
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])
"""


def command(directory: Path, does: str = "os._exit(7)") -> list[str]:
    (directory / "mymodel.py").write_text(MODEL.format(does))
    trains = [sys.executable, "-m", "ctl.train", "--strategy=multi_worker", "--noexport"]
    trains += ["--dataset=synthetic", "--num_examples=64", "--train_steps=2", "--notensorboard"]
    return [*trains, "--model=mymodel.py:make", f"--model_dir={directory / 'run'}"]


def never() -> bool:
    return False


def environ(**more: str) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone = {"worker": [f"127.0.0.1:{free.getsockname()[1]}"]}
    config = json.dumps({"cluster": alone, "task": {"type": "worker", "index": 0}})
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": config, **more}


def code_of(worker: Fork) -> int | None:
    wait_until(lambda: worker.poll() is not None, timeout=60)
    return worker.poll()


def start(server: ForkServer, **more: str) -> tuple[Fork | None, int, int]:
    """A worker, and what it writes to its output and to its errors."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    if worker := server.start(environ(**more), to_out, to_err):
        worker.begin()
    os.close(to_out)
    os.close(to_err)
    return worker, out, err


def read(descriptor: int) -> str:
    with open(descriptor) as lines:
        return lines.read()


def is_there(pid: int) -> bool:
    """Whether the process runs; none is a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server, and where it is. A worker reads the file of its model, which a test may change."""
    directory = tmp_path_factory.mktemp("shared")
    with contextlib.chdir(directory), ForkServer(command(directory), never) as server:
        yield server, directory


@pytest.mark.slow
def test_a_worker_is_what_a_process_of_the_command_is(shared):
    server, here = shared
    own, alone = environ(OF_THIS_WORKER="yes"), command(here)
    worker, out, err = start(server, **own)
    said, told = read(out), read(err)
    assert code_of(worker) == worker.poll() == 7, told
    assert "OF_THIS_WORKER" in said and "group True input False" in said
    plain = {"stdin": subprocess.DEVNULL, "start_new_session": True, "capture_output": True}
    alone = subprocess.run(alone, cwd=here, env=own, text=True, timeout=60, **plain)
    assert said == alone.stdout
    # The lines begin with the time and the number of the process.
    messages = [line.partition("] ")[2] for line in told.splitlines()]
    assert messages == [line.partition("] ")[2] for line in alone.stderr.splitlines()]


@pytest.mark.slow
def test_a_worker_finds_its_pipe_to_the_launcher(shared):
    server, here = shared
    command(here, f'os.write(int(os.environ["{elastic.VARIABLE}"]), b"t"); sys.exit()')
    read_end, write_end = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    worker = server.start(environ(**{elastic.VARIABLE: str(write_end)}), null, null, write_end)
    os.close(write_end)
    worker.begin()
    assert os.read(read_end, 10) == b"t" and code_of(worker) == 0


@pytest.mark.slow
def test_a_signal_before_a_worker_handles_it_waits_until_then(shared):
    read_end, write_end = os.pipe()
    worker = shared[0].start(environ(), write_end, write_end)
    os.close(write_end)
    os.killpg(worker.pid, signal.SIGTERM)
    worker.begin()
    assert read(read_end).startswith("SIGTERM: stopped before the training; run the same ")
    assert code_of(worker) == 42


@pytest.mark.slow
def test_without_a_server_there_is_no_worker(here):
    """The launcher then starts the command itself."""
    server = ForkServer(command(here, "time.sleep(1000)"), never)
    (worker, *_), (other, *_) = start(server), start(server)
    os.killpg(other.pid, signal.SIGKILL)
    assert code_of(other) == -signal.SIGKILL
    os.kill(server._process.pid, signal.SIGKILL)
    assert start(server)[0] is None and start(server)[0] is None
    assert worker.poll() is None  # it goes on
    os.killpg(worker.pid, signal.SIGKILL)
    assert code_of(worker) == -signal.SIGKILL


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_the_import(here):
    asked: list[None] = []
    server = ForkServer(command(here), lambda: asked.append(None) or len(asked) >= 3)
    with pytest.raises(Preempted, match="before the workers had started"):
        start(server)


@pytest.mark.slow
def test_the_server_ends_with_its_launcher_and_a_worker_that_has_not_begun(here):
    launcher = (
        "import os, sys, time; from ctl.distributed.cluster.forkserver import ForkServer; "
        "server = ForkServer(sys.argv[1:], list); null = os.open(os.devnull, os.O_WRONLY); "
        "worker, waits = [server.start(os.environ, null, null) for _ in range(2)]; "
        "worker.begin(); print(worker.pid, waits.pid, server._process.pid, flush=True); "
        "time.sleep(1000)"
    )
    words = [sys.executable, "-c", launcher, *command(here, "time.sleep(1000)")]
    with subprocess.Popen(words, env=environ(), stdout=subprocess.PIPE, text=True) as process:
        worker, *others = map(int, process.stdout.readline().split())
        process.kill()
    deadline = time.monotonic() + 30
    while any(map(is_there, others)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [is_there(pid) for pid in (worker, *others)] == [True, False, False]
    os.killpg(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    "words",
    [
        ["true"],
        [sys.executable, "train.py"],
        [sys.executable, "-m", "ctl.train", "--strategy=mirrored"],
        [sys.executable, "-m", "mytraining", "--strategy=multi_worker"],
        ["/nonexistent/python", "-m", "ctl.train", "--strategy=multi_worker"],
    ],
)
def test_other_commands_have_no_server(words):
    with ForkServer(words, never) as server:
        assert server.start({}, 1, 2) is None
