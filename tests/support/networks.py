"""Networks of two machines: namespaces of Linux, and links between them. Needs root and ``ip``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from paths import SUPPORT

HOSTS = ["10.77.0.1", "10.77.0.2"]
WORKERS = [f"{host}:2222" for host in HOSTS]


def run(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, words)], capture_output=True, text=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
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
def bad_link(
    kind: str, namespaces: list[str], delay_ms: float, loss_percent: float
) -> Iterator[None]:
    """Each packet is late, one way, and some are lost.

    ``netem``: of the kernel, on a veth pair. ``wire``: a program that does the same."""
    if kind == "netem":
        connect(namespaces)
        for name in namespaces:
            netem = ["delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
            made = run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "netem", *netem)
            if made.returncode:
                pytest.skip(
                    f"this kernel has no netem (the test with wire is the same): {made.stderr}"
                )
        yield
        return
    ends = [word for pair in zip(namespaces, HOSTS, strict=True) for word in pair]
    rates = [str(delay_ms / 1000), str(loss_percent / 100)]
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
