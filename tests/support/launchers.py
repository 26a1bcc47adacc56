"""Launchers of an elastic job on several machines, with processes that only do what a worker would
do when others are lost or stopped."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import answering

# Ends with 0 when there is a file `end`; with 42 when a worker of its attempt has got SIGTERM; with
# 5 when one has died or is frozen. Says its rank, how many there are, and its process.
_WORKER = (
    answering.PROGRAM
    + """
import json, os, pathlib, signal, sys, time
config, top = json.loads(os.environ["TF_CONFIG"]), pathlib.Path(sys.argv[1])
workers, rank = config["cluster"]["worker"], config["task"]["index"]
attempt = top / ("attempt " + " ".join(workers))
attempt.mkdir(exist_ok=True)
tell = lambda what: os.write(int(os.environ["CTL_ELASTIC"]), what)
def state(file):
    try:
        return open(f"/proc/{file.read_text()}/stat").read().rpartition(") ")[2][0]
    except OSError:
        return "Z"
signal.signal(signal.SIGTERM, lambda *_: (attempt / "stop").touch())
(attempt / f"{rank}.new").write_text(str(os.getpid()))
(attempt / f"{rank}.new").rename(attempt / f"{rank}.pid")
while len(files := [*attempt.glob("*.pid")]) < len(workers):
    time.sleep(0.02)
print("rank", rank, "of", len(workers), "is", os.getpid(), flush=True)
tell(b"t")
answer(workers[rank])
while not (top / "end").exists():
    if (attempt / "stop").exists():
        sys.exit(42)
    if {"T", "Z"} & {*map(state, files)}:
        if (attempt / "stop").exists():
            continue
        tell(b"l")
        time.sleep(0.3)
        sys.exit(5)
    time.sleep(0.02)
"""
)


def fake_worker(directory: Path) -> list[str]:
    """The command of such a worker. All of a job have one ``directory``."""
    return [sys.executable, "-c", _WORKER, str(directory)]


class Launcher:
    """A command that runs, of a launcher; it knows the secret of the job."""

    def __init__(self, command: Sequence[str]):
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CTL_JOB_SECRET": "of this test"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def attempts(self) -> list[tuple[int, int, int]]:
        """Of each attempt so far, the rank, the number of workers, and the process."""
        found = re.findall(r"rank (\d+) of (\d+) is (\d+)", self.said)
        return [(int(rank), int(count), int(pid)) for rank, count, pid in found]

    def sizes(self) -> list[int]:
        return [count for _, count, _ in self.attempts()]

    def code(self) -> int:
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.said}") from None
        self._reader.join()
        assert "Traceback" not in self.said, self.said
        return code


def until(what: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@contextlib.contextmanager
def launchers(commands: Sequence[Sequence[str]]) -> Iterator[list[Launcher]]:
    """The launchers, in the order of the ranks, when all workers have started."""
    made, count = [Launcher(command) for command in commands], len(commands)
    try:
        until(lambda: all(one.sizes() == [count] for one in made))
        made.sort(key=lambda one: one.attempts()[0])
        yield made
    except AssertionError as error:
        raise AssertionError("\n\n".join(one.said for one in made)) from error
    finally:
        for one in made:
            one.process.kill()  # whose guard kills the worker
            one.process.wait()
