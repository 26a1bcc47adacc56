"""Two workers in two network namespaces: a link that delays and loses packets, and one that goes
away. Needs root and Linux's ``ip``."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from paths import SUPPORT
from test_multi_worker import assert_equal, one_device
from worker_jobs import codes, last_line, run_job, said

pytestmark = pytest.mark.slow  # starts processes

HOSTS = ["10.77.0.1", "10.77.0.2"]
WORKERS = [f"{host}:2222" for host in HOSTS]
DELAY_MS, LOSS_PERCENT = 5, 2  # of each packet, one way


def run(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, words)], capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two namespaces with nothing but their loopbacks; they go with their devices."""
    names = [f"ctlnet{os.getpid()}-{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                made = run("ip", "netns", "add", name)
            except FileNotFoundError:
                pytest.skip("there is no program `ip`")
            if made.returncode:
                pytest.skip(f"may not make a network namespace: {made.stderr.strip()}")
            stack.callback(run, "ip", "netns", "delete", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names


def connect(namespaces: list[str]) -> None:
    """By a pair of veth devices, called wire in each."""
    first, second = namespaces
    ends = ["wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second]
    made = run("ip", "link", "add", *ends)
    if made.returncode:
        pytest.skip(f"may not make a veth pair: {made.stderr.strip()}")
    for name, host in zip(namespaces, HOSTS, strict=True):
        assert not run("ip", "-n", name, "address", "add", f"{host}/24", "dev", "wire").returncode
        assert not run("ip", "-n", name, "link", "set", "wire", "up").returncode


@contextlib.contextmanager
def bad_link(kind: str, namespaces: list[str]) -> Iterator[None]:
    """``netem``: of the kernel, on a veth pair. ``wire``: a program that does the same."""
    if kind == "netem":
        connect(namespaces)
        for name in namespaces:
            netem = ["delay", f"{DELAY_MS}ms", "loss", f"{LOSS_PERCENT}%"]
            made = run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "netem", *netem)
            if made.returncode:
                pytest.skip(
                    f"this kernel has no netem (the test with wire is the same): {made.stderr}"
                )
        yield
        return
    ends = [word for pair in zip(namespaces, HOSTS, strict=True) for word in pair]
    rates = [str(DELAY_MS / 1000), str(LOSS_PERCENT / 100)]
    process = subprocess.Popen(
        [sys.executable, SUPPORT / "wire.py", *ends, *rates],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout.readline() != "up\n":
            pytest.skip(f"may not make a TUN device: {process.stderr.read()[-300:]}")
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["netem", "wire"])
def test_delay_and_loss_change_no_weights(job, tmp_path, mirrored, namespaces, kind):
    with bad_link(kind, namespaces):
        run_job(job, tmp_path, "seeds=1", addresses=WORKERS, namespaces=namespaces)
    assert_equal(tmp_path, 2, one_device(mirrored))


def test_a_link_that_goes_away(job, tmp_path, namespaces):
    """No packet says so: neither worker is dead, each hears nothing of the other. The chief has
    trained some steps and waits; its peer waits for it."""
    connect(namespaces)
    with job(
        tmp_path, "slow=1", "timeout=15", "loop=1", addresses=WORKERS, namespaces=namespaces
    ) as processes:
        deadline = time.monotonic() + 90
        while "step 10\n" not in said(tmp_path, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        assert not run("ip", "-n", namespaces[1], "link", "set", "wire", "down").returncode
        (tmp_path / "go").touch()
        assert codes(processes) == [5, 5], said(tmp_path, 0)[-2000:]
        assert time.monotonic() - began < 40
    for index in range(2):
        words = rf"worker {index} of 2: .* after step 1\d (timed out|broke off).*worker {1 - index}"
        assert re.search(words, last_line(tmp_path, index)), last_line(tmp_path, index)
