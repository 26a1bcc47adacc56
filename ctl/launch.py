"""Starts the processes of a job on this machine: free ports, ``TF_CONFIG``, output, restarts.

When a process fails, the launcher ends the others and restarts the whole job on new ports; the job
resumes from its last checkpoint. An elastic job (``--workers=2..4``) goes on with the workers that
remain, from the last call of the loop that they have finished: one of them saves it. With parameter
servers, a failed worker is restarted alone. When the launcher itself is killed, a guard process
kills the processes of the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from secrets import token_hex
from typing import IO, Any, TextIO

from absl import flags

from ctl.distributed.cluster import elastic, secret
from ctl.distributed.cluster.guard import Guard
from ctl.errors import CheckpointError, DivergedError, PeerError, Preempted, UsageError
from ctl.flags.parsing import group, run_command

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Starts N workers of a job on this machine and restarts the job when one fails.

  python -m ctl.launch --workers=2 -- python -m ctl.train --strategy=multi_worker --model_dir=DIR
  python -m ctl.launch --workers=4 --max_restarts=3 -- python my_training.py

With --workers=2..4, it starts 4, and goes on with 3 or 2 when some are lost: another one saves the
last step that was finished. Later, the job is stopped, saved and restarted with 4 again.

  python -m ctl.launch --workers=2..4 -- python -m ctl.train --strategy=multi_worker --model_dir=DIR

With --ps=M, it also starts a coordinator and M parameter servers. A worker that fails is then
restarted alone, while the others go on.

  python -m ctl.launch --workers=2 --ps=1 -- python -m ctl.train --strategy=parameter_server …

TF_CONFIG names each process and its peers, and CTL_JOB_SECRET holds their shared key. Without --ps,
each process computes with its part of the cores (TF_NUM_INTRAOP_THREADS, unless it is set). Exits
with the first code that is not 0.
"""

# Not restarted: a wrong flag, a loss that is NaN, a stop by the user.
_FINAL = (UsageError.exit_code, DivergedError.exit_code, Preempted.exit_code)

# Not for want of a worker: it has lost another, cannot write, or was stopped.
_NOT_LOST = (0, PeerError.exit_code, CheckpointError.exit_code, Preempted.exit_code)

# Seconds that a worker of an elastic job has to say that it has lost another, too. Until then they
# are in the same collective. One that is frozen does not.
_SILENT_SECONDS = 10.0

_RESTARTS_OF_ELASTIC = 3

_LONGEST_BACKOFF, _LAST_LINES_SECONDS = 30.0, 5.0  # a grandchild may keep a pipe open

THREADS = "TF_NUM_INTRAOP_THREADS"

_WRITING = threading.Lock()


def run() -> None:
    """The command line, also installed as ``ctl-launch``."""
    with group("Job"):
        flags.DEFINE_string(
            "workers",
            "1",
            "Number of worker processes. LEAST..MOST, such as 2..4, is an elastic job: it goes on "
            "without lost workers as long as LEAST remain.",
        )
        flags.DEFINE_float(
            "join_every",
            300.0,
            "Seconds that an elastic job runs without lost workers before it tries again to start "
            "them. It is stopped for that after a step, which it saves.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "ps",
            0,
            "Number of parameter servers, in addition to a coordinator and the workers.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "max_restarts",
            None,
            "Maximum number of restarts of a failed job, by default 0. Of an elastic job, by "
            f"default {_RESTARTS_OF_ELASTIC}, of those that begin because fewer workers than LEAST "
            "remain; an attempt that lasts --join_every seconds begins the count anew.",
            lower_bound=0,
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
    workers = _count(FLAGS.workers)
    if FLAGS["join_every"].present and not isinstance(workers, tuple):
        raise UsageError("--join_every has no effect without --workers=LEAST..MOST")
    code = launch(
        command,
        workers=workers,
        ps=FLAGS.ps,
        max_restarts=FLAGS.max_restarts,
        backoff=FLAGS.backoff,
        grace=FLAGS.grace,
        join_every=FLAGS.join_every,
    )
    if code:
        raise SystemExit(code)


def _count(text: str) -> int | tuple[int, int]:
    """What ``--workers`` says: a number, or the least and the most."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--workers={text} is neither a number from 1 nor LEAST..MOST, as in 2..4")
    if not (found and found[2]):
        return most
    return least, most


def launch(
    command: Sequence[str],
    *,
    workers: int | tuple[int, int],
    ps: int = 0,
    max_restarts: int | None = None,
    backoff: float = 1.0,
    grace: float = 30.0,
    join_every: float = 300.0,
) -> int:
    """Runs the job to its end. Arguments as for the command, see ``--help``; main thread only.
    ``workers`` of an elastic job are the least and the most.

    Returns:
        0, or the exit code of the first failed process of the last attempt (128 + signal number).

    Raises:
        UsageError: the command cannot be started, or an elastic job has parameter servers.
    """
    if isinstance(workers, tuple):
        if ps:
            raise UsageError(
                "a job with --ps restarts lost workers alone: give --workers=N, not LEAST..MOST"
            )
        restarts = _RESTARTS_OF_ELASTIC if max_restarts is None else max_restarts
        return _launch_elastic(command, *workers, restarts, backoff, grace, join_every)
    max_restarts = max_restarts or 0
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


def _launch_elastic(
    command: Sequence[str],
    least: int,
    most: int,
    max_restarts: int,
    backoff: float,
    grace: float,
    join_every: float,
) -> int:
    """Runs an elastic job to its end, in attempts without the slots whose workers were lost.
    Returns as `launch` does."""
    away: set[int] = set()  # of ``most`` slots; ranks are in their order
    failures = 0
    with Guard() as guard, _forwarded_signals() as received:
        while True:
            there, began = sorted({*range(most)} - away), time.monotonic()
            job = _ElasticJob(command, cluster(len(there)), guard, backoff)
            code = job.wait(received, grace, began + join_every if away else math.inf)
            if job.joins and code in (0, Preempted.exit_code) and not received:
                _say(f"goes on with {most} workers: slots {_listed(away)} are tried again")
                away.clear()
                continue
            if code == 0 or code in _FINAL or received:
                return code
            lost = job.lost()
            away |= {there[rank] for rank in lost}
            left = most - len(away)
            how = ", ".join(f"worker {rank} {how}" for rank, how in lost.items())
            apart = code == PeerError.exit_code and job.trained()  # as after a fault of the network
            if left >= least and (lost or apart):
                without = f" without slots {_listed(away)}, for {join_every:g} s" if away else ""
                s = "s" * (left > 1)
                _say(f"{how or 'none is lost'}: goes on with {left} worker{s}{without}")
                continue
            if time.monotonic() - began >= join_every:
                failures = 0
            if failures == max_restarts:
                return code
            pause = _pause_before(failures, backoff)
            failures += 1
            few = f"{how}: {left} remain, at least {least} are needed: " if lost else ""
            _say(f"{few}restart {failures} of {max_restarts} in {pause:g} s")
            away.clear()
            _wait_until(lambda: received, pause)
            if received:
                return code


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


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
    pipe: int = -1  # of an elastic job: to read what the process tells
    told: bytes = b""

    def poll(self) -> int | None:
        """The exit code; None while it runs, and before it is started."""
        return self.process.poll() if self.process else None

    @property
    def is_worker(self) -> bool:
        return self.name.startswith("worker")

    def listen(self) -> None:
        """Reads what the process of an elastic job has told meanwhile."""
        with contextlib.suppress(BlockingIOError):
            self.told += os.read(self.pipe, 100)


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

    def _start(self, task: _Task, pipe: int | None = None) -> None:
        task.process = process = subprocess.Popen(
            self._command,
            env={**self._environ, "TF_CONFIG": task.config}
            | ({} if pipe is None else {elastic.VARIABLE: str(pipe)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if pipe is None else (pipe,),
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


class _ElasticJob(_Job):
    """One attempt to run an elastic job.

    Attributes:
        joins: whether it was asked to stop so that other workers can join.
    """

    def __init__(self, *arguments: Any):
        self.joins = False
        self._killed: set[str] = set()
        super().__init__(*arguments)

    def _start(self, task: _Task, pipe: int | None = None) -> None:
        task.pipe, pipe = os.pipe()
        os.set_blocking(task.pipe, False)
        try:
            super()._start(task, pipe)
        finally:
            os.close(pipe)

    def wait(self, received: list[int], grace: float, join_at: float = math.inf) -> int:
        """Waits for all. When one is lost, the others have ``grace`` seconds to save; so they have
        after a signal, and at ``join_at``, a time of `time.monotonic`. Returns the code."""
        since, asked, at_once = math.inf, False, False
        while left := [task for task in self._tasks if task.poll() is None]:
            now = time.monotonic()
            if not asked and (received or (now >= join_at and math.isinf(since))):
                asked, self.joins = True, not received
                why = "a slot is tried again" if self.joins else signal.Signals(received[0]).name
                _say(f"{why}: the workers are asked to save and end")
                self._signal(signal.SIGTERM if self.joins else received[0])
                since = min(since, now)
            at_once |= signal.SIGINT in received[1:]  # a scheduler may repeat SIGTERM
            if math.isinf(since) and (loss := self._loss()):
                _say(f"{loss}; the others save and end")
                since = now
            for task in left:
                patience = grace if asked else self._patience(task, grace)
                if at_once or now - since >= patience:
                    _say(f"{task.name} has not ended: killed")
                    self._killed.add(task.name)
                    self._kill(task)
            time.sleep(0.05)
        self.end(0.0)
        codes = [task.poll() or 0 for task in self._tasks]
        # That of a worker that was lost; else of one that was stopped or cannot write.
        lost_none = (0, PeerError.exit_code)
        code = max(codes, key=lambda code: (code not in _NOT_LOST, code not in lost_none, code))
        return 128 - code if code < 0 else code

    def _loss(self) -> str:
        """What shows that a worker is lost; "" if nothing does."""
        for task in self._tasks:
            task.listen()
            if task.poll():
                return f"{task.name} {_how(task.poll() or 0)}"
            if elastic.LOST in task.told:
                return f"{task.name} has lost another"
        return ""

    def _patience(self, task: _Task, grace: float) -> float:
        """Seconds that a worker has after the first sign of a loss."""
        task.listen()
        silent = elastic.LOST not in task.told and not self._failed()
        return min(grace, _SILENT_SECONDS) if silent else grace

    def _failed(self) -> dict[int, str]:
        """How workers have ended by themselves, but not because another was lost; by rank."""
        return {
            rank: _how(code)
            for rank, task in enumerate(self._tasks)
            if task.name not in self._killed and (code := task.poll() or 0) not in _NOT_LOST
        }

    def lost(self) -> dict[int, str]:
        """How workers were lost, by rank, after `wait`: those that failed, else those that were
        silent while others had lost one."""
        told = any(elastic.LOST in task.told for task in self._tasks)
        silent = {
            rank: "is frozen"
            for rank, task in enumerate(self._tasks)
            if told and task.name in self._killed and elastic.LOST not in task.told
        }
        return self._failed() or silent

    def trained(self) -> bool:
        """Whether a worker has finished a call of its loop."""
        return any(elastic.TRAINED in task.told for task in self._tasks)

    def end(self, grace: float, *, at_once: bool = False) -> None:
        super().end(grace, at_once=at_once)
        for task in self._tasks:
            if task.pipe >= 0:
                task.listen()
                os.close(task.pipe)
                task.pipe = -1


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
