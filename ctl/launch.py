"""Starts the processes of a job on this machine: free ports, ``TF_CONFIG``, output, restarts.

When a process fails, the launcher ends the others and restarts the whole job on new ports; the job
resumes from its last checkpoint. With parameter servers, a failed worker is restarted alone. When
the launcher itself is killed, a guard process kills the processes of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from secrets import token_hex
from typing import IO, TextIO

from absl import flags

from ctl.distributed.cluster import secret
from ctl.distributed.cluster.guard import Guard
from ctl.errors import DivergedError, PeerError, Preempted, UsageError
from ctl.flags.parsing import group, run_command

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Starts N workers of a job on this machine and restarts the job when one fails.

  python -m ctl.launch --workers=2 -- python -m ctl.train --strategy=multi_worker --model_dir=DIR
  python -m ctl.launch --workers=4 --max_restarts=3 -- python my_training.py

With --ps=M, it also starts a coordinator and M parameter servers. A worker that fails is then
restarted alone, while the others go on.

  python -m ctl.launch --workers=2 --ps=1 -- python -m ctl.train --strategy=parameter_server …

TF_CONFIG names each process and its peers, and CTL_JOB_SECRET holds their shared key. Without --ps,
each process computes with its part of the cores (TF_NUM_INTRAOP_THREADS, unless it is set). Exits
with the first code that is not 0.
"""

# Not restarted: a wrong flag, a loss that is NaN, a stop by the user.
_FINAL = (UsageError.exit_code, DivergedError.exit_code, Preempted.exit_code)

_LONGEST_BACKOFF, _LAST_LINES_SECONDS = 30.0, 5.0  # a grandchild may keep a pipe open

THREADS = "TF_NUM_INTRAOP_THREADS"

_WRITING = threading.Lock()


def run() -> None:
    """The command line, also installed as ``ctl-launch``."""
    with group("Job"):
        flags.DEFINE_integer("workers", 1, "Number of worker processes.", lower_bound=1)
        flags.DEFINE_integer(
            "ps",
            0,
            "Number of parameter servers, in addition to a coordinator and the workers.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "max_restarts", 0, "Maximum number of restarts of a failed job.", lower_bound=0
        )
        flags.DEFINE_float(
            "backoff",
            1.0,
            "Seconds before the first restart. Doubles each time, up to 30.",
            lower_bound=0,
        )
        flags.DEFINE_float(
            "grace",
            30.0,
            "Seconds that processes have to save and exit after a peer has failed or a signal has "
            "arrived, before they are killed.",
            lower_bound=0,
        )
    FLAGS.set_gnu_getopt(False)  # the command may follow without --
    run_command(_main, _USAGE, takes_command=True, output_is_log=True)


def _main(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("nothing to start: end with -- COMMAND, e.g. -- python -m ctl.train …")
    code = launch(
        command,
        workers=FLAGS.workers,
        ps=FLAGS.ps,
        max_restarts=FLAGS.max_restarts,
        backoff=FLAGS.backoff,
        grace=FLAGS.grace,
    )
    if code:
        raise SystemExit(code)


def launch(
    command: Sequence[str],
    *,
    workers: int,
    ps: int = 0,
    max_restarts: int = 0,
    backoff: float = 1.0,
    grace: float = 30.0,
) -> int:
    """Runs the job to its end. Arguments as for the command, see ``--help``; main thread only.

    Returns:
        0, or the exit code of the first failed process of the last attempt (128 + signal number).

    Raises:
        UsageError: the command cannot be started.
    """
    with Guard() as guard, _forwarded_signals() as received:
        for attempt in range(max_restarts + 1):
            job = _Job(command, cluster(workers, ps), guard, backoff)
            code = job.wait(received, grace)
            if code == 0 or code in _FINAL or received or attempt == max_restarts:
                return code
            pause = _pause_before(attempt, backoff)
            _say(f"restart {attempt + 1} of {max_restarts} in {pause:g} s")
            _wait_until(lambda: received, pause)
            if received:
                return code
    raise AssertionError("unreachable")


def cluster(workers: int, ps: int = 0) -> dict[str, list[str]]:
    """``{"worker": ["127.0.0.1:port", ...]}`` with ports that are free now. With parameter
    servers, it has the keys ``"chief"`` (the coordinator) and ``"ps"``, too."""
    counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
    with contextlib.ExitStack() as stack:
        sockets = {
            kind: [stack.enter_context(socket.socket()) for _ in range(count)]
            for kind, count in counts.items()
        }
        for held in sum(sockets.values(), []):  # all stay open until the end, so ports differ
            held.bind(("127.0.0.1", 0))
        return {
            kind: [f"127.0.0.1:{held.getsockname()[1]}" for held in group]
            for kind, group in sockets.items()
        }


@dataclasses.dataclass
class _Task:
    """A process of a job, in a process group of its own. It may be started several times."""

    name: str
    config: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    start_at: float | None = None  # when to start it again

    def poll(self) -> int | None:
        """The exit code; None while it runs, and before it is started."""
        return self.process.poll() if self.process else None

    @property
    def is_worker(self) -> bool:
        return self.name.startswith("worker")


def threads_of(processes: int) -> str:
    """The value of `THREADS` with which each of ``processes`` on this machine uses its part of the
    cores. By default, TensorFlow computes with a thread for each core in every process."""
    return str(max(1, len(os.sched_getaffinity(0)) // processes))


class _Job:
    """One attempt to run all processes."""

    def __init__(
        self, command: Sequence[str], addresses: dict[str, list[str]], guard: Guard, backoff: float
    ):
        self._command = command
        self._guard = guard
        self._backoff = backoff
        self._readers: list[threading.Thread] = []
        self._has_coordinator = "chief" in addresses
        self._tasks = [
            _Task(
                f"{kind} {index}",
                json.dumps({"cluster": addresses, "task": {"type": kind, "index": index}}),
            )
            for kind, group in addresses.items()
            for index in range(len(group))
        ]
        self._environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if len(self._tasks) > 1:  # a single worker may have peers on other machines
            self._environ.setdefault(secret.VARIABLE, token_hex(16))
            if not self._has_coordinator:  # which mostly waits, as parameter servers do
                self._environ.setdefault(THREADS, threads_of(len(self._tasks)))
        try:
            for task in self._tasks:
                self._start(task)
        except OSError as error:
            self.end(0.0)
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error

    def _start(self, task: _Task) -> None:
        task.process = process = subprocess.Popen(
            self._command,
            env={**self._environ, "TF_CONFIG": task.config},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._guard.watch(process.pid)
        task.starts += 1
        task.start_at = None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(
                target=_copy_lines, args=(task.name, source, target), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def wait(self, received: list[int], grace: float) -> int:
        """Waits for all; ends the rest when one fails or a signal arrives. Returns the code."""
        passed_on, deadline = 0, 0.0
        while True:
            if self._has_coordinator and not received:
                self._restart_workers()
            codes = {task.name: task.poll() for task in self._deciding()}
            if any(codes.values()):
                name, code = self._cause()
                _say(f"{name} {_how(code)}; ending the others")
                # Ask at once if the coordinator failed: servers it has not reached would wait.
                if passed_on:  # the others have the signal, and the rest of the grace
                    self._wait_until_ended(deadline - time.monotonic())
                    grace = 0.0
                self.end(grace, at_once=bool(received) or name.startswith("chief"))
                return 128 - code if code < 0 else code
            if all(code == 0 for code in codes.values()):
                self.end(grace if self._has_coordinator else 0.0)
                return 0
            if len(received) > passed_on:
                if not passed_on:
                    _say(f"{signal.Signals(received[0]).name}: passed on")
                    self._signal(received[0])
                    deadline = time.monotonic() + grace
                elif signal.SIGINT in received[passed_on:]:  # a scheduler may repeat SIGTERM
                    deadline = time.monotonic()
                passed_on = len(received)
            if passed_on and time.monotonic() >= deadline:
                _say(f"not ended {grace:g} s after the signal: killed")
                self.end(0.0)
                return 128 + received[0]
            time.sleep(0.05)

    def _deciding(self) -> list[_Task]:
        """The tasks that end the job when they end."""
        return [t for t in self._tasks if not (self._has_coordinator and t.is_worker)]

    def _restart_workers(self) -> None:
        """Restarts failed workers. The coordinator gives their work to others until they return."""
        for task in filter(lambda task: task.is_worker, self._tasks):
            code = task.poll()
            if not code:  # it runs, or the coordinator has told it to end
                continue
            if task.start_at is None:
                pause = _pause_before(task.starts - 1, self._backoff)
                task.start_at = time.monotonic() + pause
                _say(f"{task.name} {_how(code)}; the others go on; restarting it in {pause:g} s")
            elif time.monotonic() >= task.start_at:
                self._kill(task)
                self._start(task)

    def _cause(self) -> tuple[str, int]:
        """The task that failed first, and its code."""

        def first() -> tuple[str, int]:
            codes = [(task.name, task.poll()) for task in self._deciding()]
            failed = [(name, code) for name, code in codes if code]
            return min(failed, key=lambda failure: failure[1] == PeerError.exit_code)

        # A worker that lost a peer may end before the peer does: wait a second for the cause.
        _wait_until(lambda: first()[1] != PeerError.exit_code, 1.0)
        return first()

    def end(self, grace: float, *, at_once: bool = False) -> None:
        """Sends SIGTERM after half of ``grace`` seconds, or ``at_once``; kills the process groups
        after the rest."""
        if grace and not at_once:
            self._wait_until_ended(grace / 2)  # processes that lost a peer end by themselves
            grace /= 2
        if grace:
            self._signal(signal.SIGTERM)
            self._wait_until_ended(grace)
        for task in self._tasks:
            self._kill(task)
        deadline = time.monotonic() + _LAST_LINES_SECONDS
        for reader in self._readers:
            while reader.is_alive() and (_WRITING.locked() or time.monotonic() < deadline):
                reader.join(0.05)

    def _kill(self, task: _Task) -> None:
        """Kills the process group: children may outlive the process."""
        if task.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.process.pid, signal.SIGKILL)
            task.process.wait()
            self._guard.forget(task.process.pid)

    def _signal(self, number: int) -> None:
        for task in self._tasks:
            if task.process and task.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(task.process.pid, number)

    def _wait_until_ended(self, seconds: float) -> None:
        _wait_until(lambda: all(task.poll() is not None for task in self._tasks), seconds)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list, so that they do not end the launcher."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pause_before(restart: int, backoff: float) -> float:
    """Returns the seconds to wait before a restart, of which ``restart`` came before."""
    return min(_LONGEST_BACKOFF, backoff * 2.0 ** min(restart, 1000))


def _wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Waits for ``condition`` to be true, at most so many ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.05)


def _copy_lines(name: str, source: IO[bytes], target: TextIO) -> None:
    for line in source:
        text = line.decode(errors="replace").rstrip("\n")
        # The worker would wait if nobody emptied its pipe.
        with contextlib.suppress(OSError, ValueError):
            _write(target, f"[{name}] {text}")


def _how(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _say(text: str) -> None:
    _write(sys.stderr, f"[launch] {text}")


def _write(target: TextIO, line: str) -> None:
    """Writes a whole line under a lock. The job goes on when nobody reads the output."""
    with _WRITING, contextlib.suppress(BrokenPipeError):  # as in `| head`; raised once
        target.write(line + "\n")  # in one piece: `print` writes the newline separately
        target.flush()
        return
    _say("nobody reads the standard output; the job goes on without it")


if __name__ == "__main__":
    run()
