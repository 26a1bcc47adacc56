"""Starts the processes of a job on this machine: free ports, ``TF_CONFIG``, output, restarts.

The job is one unit: when a process fails the others are ended, and the whole job is started again,
on new ports, to resume from its last checkpoint. No process outlives the launcher, not even when
that is killed: a guard process notices and ends the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from absl import flags

from ctl.errors import DivergedError, PeerError, Preempted, UsageError
from ctl.flags import group
from ctl.flags import run as run_command

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Starts N workers of a job on this machine and restarts the job when one fails.

  python -m ctl.launch --workers=2 -- python -m ctl.train --strategy=multi_worker --model_dir=DIR
  python -m ctl.launch --workers=4 --max_restarts=3 -- python my_training.py

Each process finds itself and its peers in TF_CONFIG. Exits with the first code that is not 0.
"""

# To try again would give the same: a wrong flag, a loss that is NaN, a user who said stop.
_FINAL = (UsageError.exit_code, DivergedError.exit_code, Preempted.exit_code)

_LONGEST_BACKOFF = 30.0


def run() -> None:
    """The command line, also installed as ``ctl-launch``."""
    with group("Job"):
        flags.DEFINE_integer("workers", 1, "Worker processes.", lower_bound=1)
        flags.DEFINE_integer(
            "max_restarts", 0, "Times that a failed job is started again.", lower_bound=0
        )
        flags.DEFINE_float(
            "backoff",
            1.0,
            "Seconds before the first restart; doubles each time, up to 30.",
            lower_bound=0,
        )
        flags.DEFINE_float(
            "grace",
            30.0,
            "Seconds that processes get to save and end, after a peer has failed or a signal has "
            "come, before they are killed.",
            lower_bound=0,
        )
    run_command(_main, _USAGE, takes_command=True)


def _main(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("nothing to start: end with -- COMMAND, e.g. -- python -m ctl.train …")
    code = launch(
        command,
        workers=FLAGS.workers,
        max_restarts=FLAGS.max_restarts,
        backoff=FLAGS.backoff,
        grace=FLAGS.grace,
    )
    raise SystemExit(code)


def launch(
    command: Sequence[str],
    *,
    workers: int,
    max_restarts: int = 0,
    backoff: float = 1.0,
    grace: float = 30.0,
) -> int:
    """Runs the job to its end; main thread only.

    Returns:
        0, or the exit code of the process that failed first (128 + n for signal n) in the last try.
    """
    with _Guard() as guard, _forwarded_signals() as received:
        for attempt in range(max_restarts + 1):
            job = _Job(command, workers, guard)
            code = job.wait(received, grace)
            if code == 0 or code in _FINAL or received or attempt == max_restarts:
                return code
            pause = min(_LONGEST_BACKOFF, backoff * 2**attempt)
            _say(f"restart {attempt + 1} of {max_restarts} in {pause:g} s")
            _pause(pause, received)
            if received:
                return code
    raise AssertionError("unreachable")


def cluster(workers: int) -> dict[str, list[str]]:
    """``{"worker": ["127.0.0.1:port", ...]}`` with ports that are free now, on loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for held in sockets:  # All are held until all are chosen, so that they differ.
            held.bind(("127.0.0.1", 0))
        return {"worker": [f"127.0.0.1:{held.getsockname()[1]}" for held in sockets]}


class _Job:
    """One try: its processes, each in a process group of its own."""

    def __init__(self, command: Sequence[str], workers: int, guard: _Guard):
        addresses = cluster(workers)
        self._guard = guard
        self._processes: list[tuple[str, subprocess.Popen]] = []
        self._readers: list[threading.Thread] = []
        try:
            for index in range(workers):
                config = {"cluster": addresses, "task": {"type": "worker", "index": index}}
                self._start(f"worker {index}", command, json.dumps(config))
        except OSError as error:
            self.end(0.0)
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error

    def _start(self, name: str, command: Sequence[str], config: str) -> None:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TF_CONFIG": config, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._guard.watch(process.pid)
        self._processes.append((name, process))
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_copy_lines, args=(name, source, target), daemon=True)
            reader.start()
            self._readers.append(reader)

    def wait(self, received: list[int], grace: float) -> int:
        """Waits for all; ends the rest when one fails or a signal is received."""
        passed_on = 0
        while True:
            codes = {name: process.poll() for name, process in self._processes}
            if any(codes.values()):
                name, code = self._cause()
                _say(f"{name} {_how(code)}; ending the others")
                self.end(grace, signal.SIGTERM if received else None)
                return 128 - code if code < 0 else code
            if all(code == 0 for code in codes.values()):
                self.end(0.0)
                return 0
            if len(received) > passed_on:
                passed_on = len(received)
                if passed_on == 1:
                    _say(f"{signal.Signals(received[0]).name}: passed on")
                    self._signal(received[0])
                    deadline = time.monotonic() + grace
                else:
                    deadline = time.monotonic()
            if passed_on and time.monotonic() >= deadline:
                _say(f"not ended {grace:g} s after the signal: killed")
                self.end(0.0)
                return 128 + received[0]
            time.sleep(0.05)

    def _cause(self) -> tuple[str, int]:
        """Who failed first. Workers that lost a peer may end before the peer itself has: they get
        a second in which another cause may show."""
        deadline = time.monotonic() + 1.0
        while True:
            codes = [(name, process.poll()) for name, process in self._processes]
            failed = [(name, code) for name, code in codes if code]
            others = [failure for failure in failed if failure[1] != PeerError.exit_code]
            if others or time.monotonic() >= deadline:
                return (others or failed)[0]
            time.sleep(0.05)

    def end(self, grace: float, first: int | None = None) -> None:
        """Waits up to half of ``grace`` for processes to end by themselves (they notice a lost
        peer), asks them to with SIGTERM for the other half, then kills their groups."""
        if first is None and grace:
            self._wait_until_ended(grace / 2)
            grace /= 2
        if grace:
            self._signal(signal.SIGTERM)
            self._wait_until_ended(grace)
        for _, process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._guard.forget(process.pid)
        for reader in self._readers:
            reader.join()

    def _signal(self, number: int) -> None:
        for _, process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _wait_until_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process.poll() is not None for _, process in self._processes):
                return
            time.sleep(0.05)


class _Guard:
    """A process that kills the process groups it was told of when the launcher is gone."""

    def __enter__(self) -> _Guard:
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(write)
            _guard(read)
        os.close(read)
        self._pipe = write
        return self

    def __exit__(self, *_) -> None:
        os.close(self._pipe)
        os.wait()

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone killed it: the job is none the worse
            os.write(self._pipe, line.encode())


def _guard(read: int) -> None:
    """Runs in the guard process, and ends it."""
    os.setsid()  # Ctrl-C and a killed process group are not meant for it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    with os.fdopen(read) as lines:
        for line in lines:  # until the launcher's end of the pipe is closed
            change = groups.add if line[0] == "+" else groups.discard
            change(int(line[1:]))
    for group_id in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group_id, signal.SIGKILL)
    os._exit(0)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of them."""
    received: list[int] = []

    def note(number: int, frame) -> None:
        received.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pause(seconds: float, received: list[int]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        time.sleep(0.05)


def _copy_lines(name: str, source, target: TextIO) -> None:
    for line in source:
        text = line.decode(errors="replace").rstrip("\n")
        print(f"[{name}] {text}", file=target, flush=True)


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
