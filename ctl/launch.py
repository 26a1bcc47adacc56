"""Starts the processes of a job on this machine: free ports, ``TF_CONFIG``, output, restarts.

When a process fails, the launcher ends the others and restarts the whole job on new ports; the job
resumes from its last checkpoint. An elastic job (``--workers=2..4``) goes on with the workers that
remain, from the last call of the loop that they have finished, which they save. With parameter
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
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, TextIO

from absl import flags

from ctl.distributed.cluster import addresses, board, elastic, members, secret
from ctl.distributed.cluster.external_watchdog import ask_grpc
from ctl.distributed.cluster.forkserver import DEATH_SECONDS, Fork, ForkServer
from ctl.distributed.cluster.guard import Guard
from ctl.distributed.cluster.machines import (
    FINAL,
    NOT_LOST,
    SILENT_SECONDS,
    Machines,
    View,
    next_plan,
    verdict,
    worst,
)
from ctl.errors import PeerError, Preempted, UsageError
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

On several machines, each runs a launcher for its worker, and they find each other in a directory
that all see, or at a port of the first machine. CTL_JOB_SECRET must be the same on all.

  python -m ctl.launch --workers=2..4 --rendezvous=/shared/run/rendezvous -- python -m ctl.train …

With --ps=M, it also starts a coordinator and M parameter servers. A worker that fails is then
restarted alone, while the others go on.

  python -m ctl.launch --workers=2 --ps=1 -- python -m ctl.train --strategy=parameter_server …

TF_CONFIG names each process and its peers, and CTL_JOB_SECRET holds their shared key. Without --ps,
each process computes with its part of the cores (TF_NUM_INTRAOP_THREADS, unless it is set). Exits
with the code of the first process that failed; an elastic job with the worst of its last attempt.
"""

# Not restarted, nor after a stop by the user.
_FINAL = (*FINAL, Preempted.exit_code)

_RESTARTS_OF_ELASTIC = 3

_QUIET_SECONDS = 10.0  # between lines that say what a machine waits for

# A worker of an elastic job is frozen if TensorFlow has answered there once, and then leaves so
# many questions in a row unanswered, while no thread of the worker runs or waits for a core.
_ASKS, _ASK_SECONDS, _ANSWER_SECONDS = 2, 1.0, 2.0
_FROZEN = "is frozen"
_WITHOUT_THIS_ONE = "the other machines have gone on without this one"

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
            lower_bound=1,
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
            "arrived, before they are killed. In an elastic job, a worker that does not notice a "
            "loss has 10 at most.",
            lower_bound=0,
        )
    with group("Several machines"):
        _define_rendezvous()
    FLAGS.set_gnu_getopt(False)  # the command may follow without --
    run_command(_main, _USAGE, takes_command=True, output_is_log=True)


def _define_rendezvous() -> None:
    flags.DEFINE_string(
        "rendezvous",
        None,
        "Where the launchers of several machines find each other, each of which starts one "
        "worker: a directory that all machines see, or HOST:PORT of the machine that is there "
        "all the time.",
    )
    flags.DEFINE_string(
        "address",
        None,
        "HOST or HOST:PORT by which the other machines of --rendezvous reach the worker of "
        "this one. By default, the address that --rendezvous is reached from, or the name of "
        "this machine, with a port that is free.",
    )
    flags.DEFINE_float(
        "last_call",
        30.0,
        "Seconds that the first machines of --rendezvous wait for more than LEAST.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "join_timeout",
        600.0,
        "Seconds that fewer machines of --rendezvous than LEAST wait for others.",
        lower_bound=0,
    )


def _main(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("nothing to start: end with -- COMMAND, e.g. -- python -m ctl.train …")
    workers = _count(FLAGS.workers)
    _check_that_flags_have_an_effect(isinstance(workers, tuple))
    code = launch(
        command,
        workers=workers,
        ps=FLAGS.ps,
        max_restarts=FLAGS.max_restarts,
        backoff=FLAGS.backoff,
        grace=FLAGS.grace,
        join_every=FLAGS.join_every,
        rendezvous=FLAGS.rendezvous,
        address=FLAGS.address,
        last_call=FLAGS.last_call,
        join_timeout=FLAGS.join_timeout,
    )
    if code:
        raise SystemExit(code)


def _check_that_flags_have_an_effect(elastic_job: bool) -> None:
    for name in ("address", "last_call", "join_timeout"):
        if FLAGS[name].present and FLAGS.rendezvous is None:
            raise UsageError(f"--{name} has no effect without --rendezvous")
    if FLAGS["join_every"].present and not elastic_job:
        raise UsageError("--join_every has no effect without --workers=LEAST..MOST")


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
    rendezvous: str | None = None,
    address: str | None = None,
    last_call: float = 30.0,
    join_timeout: float = 600.0,
) -> int:
    """Runs the job to its end. Arguments as for the command, see ``--help``; main thread only.
    ``workers`` of an elastic job are the least and the most.

    Returns:
        0, or the exit code of the process that failed first in the last attempt (128 + the number
        of the signal that ended it); of an elastic job, the worst one.

    Raises:
        UsageError: the command cannot be started, an elastic job has parameter servers, or
            ``rendezvous`` is given without a secret of the job or to a job that is not elastic.
        PeerError: too few machines have come to ``rendezvous`` in time.
        Preempted: a signal came before the processes were started.
    """
    if isinstance(workers, tuple):
        if ps:
            raise UsageError(
                "a job with --ps restarts lost workers alone: give --workers=N, not LEAST..MOST"
            )
        restarts = _RESTARTS_OF_ELASTIC if max_restarts is None else max_restarts
        bounds = _Bounds(*workers, restarts, backoff, grace, join_every, last_call, join_timeout)
        if rendezvous is not None:
            return _launch_on_machines(command, bounds, rendezvous, address)
        return _launch_elastic(command, bounds)
    if rendezvous is not None:
        raise UsageError("--rendezvous needs --workers=LEAST..MOST; N..N is a fixed number")
    max_restarts = max_restarts or 0
    with _forwarded_signals() as received, _processes(command, received) as processes:
        for attempt in range(max_restarts + 1):
            job = _Job(command, cluster(workers, ps), processes, backoff)
            code = job.wait(received, grace)
            if code == 0 or code in _FINAL or received or attempt == max_restarts:
                return code
            pause = _pause_before(attempt, backoff)
            _say(f"restart {attempt + 1} of {max_restarts} in {pause:g} s")
            _wait_until(lambda: received, pause)
            if received:
                return Preempted.exit_code
    raise AssertionError("unreachable")


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """Of an elastic job; the names are those of the flags."""

    least: int
    most: int
    max_restarts: int
    backoff: float
    grace: float
    join_every: float
    last_call: float
    join_timeout: float


def _launch_elastic(command: Sequence[str], bounds: _Bounds) -> int:
    """Runs an elastic job to its end, in attempts without the slots whose workers were lost.
    Returns as `launch` does."""
    most, join_every = bounds.most, bounds.join_every
    away: set[int] = set()  # of ``most`` slots; ranks are in their order
    failures = 0
    with _forwarded_signals() as received, _processes(command, received) as processes:
        while True:
            there, began = sorted({*range(most)} - away), time.monotonic()
            job = _ElasticJob(command, cluster(len(there)), processes, bounds.backoff)
            job.join_at = began + join_every if away else math.inf
            code = job.wait(received, bounds.grace)
            if job.joins and code == Preempted.exit_code and not received:
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
            if left >= bounds.least and (lost or apart):
                without = f" without slots {_listed(away)}, for {join_every:g} s" if away else ""
                s = "s" * (left > 1)
                _say(f"{how or 'none is lost'}: goes on with {left} worker{s}{without}")
                continue
            if time.monotonic() - began >= join_every:
                failures = 0
            if failures == bounds.max_restarts:
                return code
            pause = _pause_before(failures, bounds.backoff)
            failures += 1
            few = f"{how}: {left} remain, at least {bounds.least} are needed: " if lost else ""
            _say(f"{few}restart {failures} of {bounds.max_restarts} in {pause:g} s")
            away.clear()
            _wait_until(lambda: received, pause)
            if received:
                return Preempted.exit_code


def _launch_on_machines(
    command: Sequence[str], bounds: _Bounds, rendezvous: str, address: str | None
) -> int:
    """Runs the worker of this machine in each plan of the launchers. Returns as `launch` does."""
    if not os.environ.get(secret.VARIABLE):
        raise UsageError(
            f"--rendezvous needs {secret.VARIABLE}, the same on all machines: choose one with "
            "openssl rand -hex 16"
        )
    name = f"{re.sub(r'[^a-zA-Z0-9-]', '-', socket.gethostname()[:60])}-{token_hex(4)}"
    with contextlib.ExitStack() as stack:
        received = stack.enter_context(_forwarded_signals())
        processes = stack.enter_context(_processes(command, received))
        place, host, port = _place(rendezvous, address)
        mine = board.Machine(name, _own_address(host, port))
        machines = stack.enter_context(Machines(place, mine))
        waiting = _Waiting(machines, bounds, rendezvous)
        while isinstance(plan := waiting.for_plan(received), board.Plan):
            rank = plan.members.index(name)
            _say(f"{plan.why}: worker {rank} of {len(plan.members)} starts here")
            job = _JobOnMachine(command, plan, rank, processes, machines, bounds)
            code = job.wait(received, bounds.grace)
            if lost := job.lost():
                how = ", ".join(lost.values())
                _say(f"worker {rank} {how}: this machine is away for {bounds.join_every:g} s")
            machines.say(
                state=board.LEFT if received else board.AWAY if lost else board.WAITS,
                code=code,
                trained=job.trained(),
                address=_own_address(host, port),
            )
            waiting.begin(away=bool(lost))
        if received:
            machines.say(state=board.LEFT)
        return plan


def _place(
    rendezvous: str, address: str | None
) -> tuple[board.DirectoryBoard | board.ServedBoard, str, int]:
    """Returns the board, and host and port of ``--address``; port 0 is any that is free."""
    host, _, port = (address or "").rpartition(":")
    if not port.isdecimal():
        host, port = address or "", "0"
    if "://" in rendezvous:
        raise UsageError(f"--rendezvous={rendezvous} is a URL: give a directory, or HOST:PORT")
    if "/" in rendezvous:
        return board.DirectoryBoard(Path(rendezvous)), host or socket.gethostname(), int(port)
    try:
        members.check_addresses([rendezvous], "--rendezvous")
    except UsageError as error:
        raise UsageError(f"{error}; or give a directory, with a /") from None
    served = board.ServedBoard(rendezvous)
    host = host or served.reached_from()
    if int(port):
        members.check_addresses([rendezvous, f"{host}:{port}"], "--rendezvous and --address")
    return served, host, int(port)


def _own_address(host: str, port: int) -> str:
    if not port:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    members.check_addresses([f"{host}:{port}"], "--address")
    return f"{host}:{port}"


class _Waiting:
    """Waits for the plans of an elastic job on several machines, and makes them."""

    def __init__(self, machines: Machines, bounds: _Bounds, rendezvous: str):
        self._machines, self._bounds, self._rendezvous = machines, bounds, rendezvous
        self._worst = PeerError.exit_code
        self._started = math.inf
        self.begin(away=False)

    def begin(self, away: bool) -> None:
        """A worker of this machine has ended; with ``away`` it was lost."""
        self._since = self._said = now = time.monotonic()
        self._joins_later = False
        self._lasted = now - self._started >= self._bounds.join_every
        self._away_until = now + self._bounds.join_every * away

    def for_plan(self, received: list[int]) -> board.Plan | int:
        """Returns the next plan that this machine is in, which it follows from now on; or the exit
        code of the job, also after a signal."""
        machines = self._machines
        code = machines.mine.code if received else -1  # of a worker that a signal has stopped
        while not received:
            view, mine = machines.view, machines.mine
            if mine.state == board.AWAY and time.monotonic() >= self._away_until:
                machines.say(state=board.WAITS)
            if machines.concerned:
                if view.plan.number > mine.plan:
                    if view.plan.failures > self._bounds.max_restarts:
                        return self._worst
                    if mine.name in view.plan.members:
                        return self._follow(view.plan)
                if (final := verdict(view)) is not None:
                    return final
                if mine.name not in view.plan.members and not view.is_over():
                    self._say_that_it_joins_later(view)
                ended = [machine.code for machine in view.of_plan() if machine.code >= 0]
                self._worst = worst(ended) if ended else self._worst
            anew = view.plan.number < mine.plan
            if mine.code == 0 and (anew or machines.silence > SILENT_SECONDS):
                return 0
            if anew:
                raise PeerError(
                    f"--rendezvous={self._rendezvous} was started anew, without what the launchers "
                    "had agreed on: start this one again"
                )
            if machines.knows_who_is_there and view.is_over():
                self._make_plan(view)
                self._check_that_some_come(view)
            if machines.silence > self._bounds.join_timeout:
                raise PeerError(
                    f"--rendezvous={self._rendezvous} has not answered for "
                    f"{self._bounds.join_timeout:g} s (--join_timeout): {machines.trouble}"
                )
            if machines.silence > SILENT_SECONDS:
                self._say_now_and_then(
                    f"no answer from --rendezvous={self._rendezvous} for {machines.silence:.0f} s: "
                    f"{machines.trouble or 'it hangs'}"
                )
            time.sleep(0.05)
        if code >= 0:
            return code
        _say(f"{signal.Signals(received[0]).name}: stopped while it waited")
        return Preempted.exit_code

    def _follow(self, plan: board.Plan) -> board.Plan:
        follows = {"plan": plan.number, "state": board.RUNS, "code": -1}
        self._machines.say(**follows, trained=False, broken=False, joins=False)
        self._started = time.monotonic()
        return plan

    def _make_plan(self, view: View) -> None:
        """Makes the next plan if that is up to this machine, and enough others are there."""
        order = view.order()
        if not order or order[0].name != self._machines.mine.name:
            return
        bounds, waited = self._bounds, time.monotonic() - self._since
        plan = next_plan(
            view,
            bounds.least,
            bounds.most,
            waited=waited,
            last_call=bounds.last_call,
            lasted=self._lasted,
        )
        counts = plan and plan.failures > view.plan.failures
        if plan and not (counts and waited < _pause_before(view.plan.failures, bounds.backoff)):
            self._machines.propose(plan)

    def _check_that_some_come(self, view: View) -> None:
        """Says for whom this machine waits. Raises `PeerError` when it has waited for too long."""
        here, waited = [machine.name for machine in view.order()], time.monotonic() - self._since
        if strangers := view.strangers():
            self._say_now_and_then(
                f"waits for {', '.join(strangers)}, of a job that began before the rendezvous did"
            )
        if len(here) >= self._bounds.least:
            return
        few = f"{len(here)} of at least {self._bounds.least} machines came: {', '.join(here)}"
        if waited >= self._bounds.join_timeout:
            raise PeerError(
                f"{few}; start the launchers of others within --join_timeout="
                f"{self._bounds.join_timeout:g} s, with the same --rendezvous and {secret.VARIABLE}"
            )
        self._say_now_and_then(f"waits for more, {waited:.0f} s now: {few}")

    def _say_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            _say(text)

    def _say_that_it_joins_later(self, view: View) -> None:
        if not self._joins_later:
            self._joins_later = True
            _say(f"{len(view.plan.members)} machines train: this one waits until it can join them")


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
    process: subprocess.Popen[bytes] | Fork | None = None
    starts: int = 0
    start_at: float | None = None  # when to start it again
    pipe: int = -1  # of an elastic job: to read what the process tells
    told: bytes = b""
    asked: int = 0  # of an elastic job: the signal that asked it to save and end
    killed: bool = False  # its process group
    ended: float = math.inf  # when the process was seen to have ended, by `time.monotonic`
    readers: list[threading.Thread] = dataclasses.field(default_factory=list)  # of its output

    def poll(self) -> int | None:
        """The exit code; None while it runs, and before it is started."""
        code = self.process.poll() if self.process else None
        if code is None and self.killed:  # the kernel does not let it go
            return -signal.SIGKILL
        # A worker of an elastic job that a signal ends has not come so far as to handle it.
        return Preempted.exit_code if self.asked and code == -self.asked else code

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
    """One attempt to run all processes, or ``only`` the worker of this index."""

    def __init__(
        self,
        command: Sequence[str],
        addresses: dict[str, list[str]],
        processes: _Processes,
        backoff: float,
        only: int | None = None,
    ):
        self._command = command
        self._server, self._guard = processes
        self._backoff = backoff
        self._has_coordinator = "chief" in addresses
        self._tasks = [
            _Task(
                f"{kind} {index}",
                json.dumps({"cluster": addresses, "task": {"type": kind, "index": index}}),
            )
            for kind, group in addresses.items()
            for index in range(len(group))
            if only in (None, index)
        ]
        self._environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if len(self._tasks) > 1:  # a single worker may have peers on other machines
            self._environ.setdefault(secret.VARIABLE, token_hex(16))
            if not self._has_coordinator:  # which mostly waits, as parameter servers do
                self._environ.setdefault(THREADS, threads_of(len(self._tasks)))
        try:
            for task in self._tasks:
                self._start(task)
        except Preempted:
            self.end(0.0)
            raise
        except OSError as error:
            self.end(0.0)
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error

    def _start(self, task: _Task, pipe: int | None = None) -> None:
        environ = {**self._environ, "TF_CONFIG": task.config}
        if pipe is not None:
            environ[elastic.VARIABLE] = str(pipe)
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        try:
            task.process = self._server.start(environ, to_out, to_err, pipe) or subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
                pass_fds=() if pipe is None else (pipe,),
            )
            self._guard.watch(task.process.pid)
            if isinstance(task.process, Fork):
                task.process.begin()
        finally:
            os.close(to_out)
            os.close(to_err)
        task.starts += 1
        task.start_at, task.killed, task.ended = None, False, math.inf
        for source, target in ((out, sys.stdout), (err, sys.stderr)):
            reader = threading.Thread(
                target=_copy_lines, args=(task.name, source, target), daemon=True
            )
            reader.start()
            task.readers.append(reader)

    def wait(self, received: list[int], grace: float) -> int:
        """Waits for all; ends the rest when one fails or a signal arrives. Returns the code."""
        passed_on, deadline, late = 0, 0.0, f"not ended {grace:g} s after the signal"
        while True:
            if self._has_coordinator and not received:
                self._restart_workers()
            self._kill_children()
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
                    deadline, late = time.monotonic(), "a second Ctrl-C"
                passed_on = len(received)
            if passed_on and time.monotonic() >= deadline:
                _say(f"{late}: killed")
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
                with contextlib.suppress(Preempted):  # `wait` passes the signal on to the others
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
        for reader in [reader for task in self._tasks for reader in task.readers]:
            while reader.is_alive() and (_WRITING.locked() or time.monotonic() < deadline):
                reader.join(0.05)

    def _kill(self, task: _Task) -> None:
        """Kills the process group once: its number may be given out again."""
        process = task.process
        if not process or task.killed:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        _wait_until(lambda: process.poll() is not None, DEATH_SECONDS, every=0.005)
        task.killed = True
        if process.poll() is None:
            _say(f"{task.name} cannot be killed: a disk or a device holds it; going on without it")
        else:
            self._guard.forget(process.pid)

    def _kill_children(self) -> None:
        """Kills the children that ended processes have left: they may hold locks of files. A child
        that holds the output has 5 s to write the last lines: it is often a filter."""
        now = time.monotonic()
        for task in self._tasks:
            if task.poll() is not None:
                task.ended = min(task.ended, now)
                writes = any(reader.is_alive() for reader in task.readers)
                if not writes or now - task.ended >= _LAST_LINES_SECONDS:
                    self._kill(task)

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
        join_at: a time of `time.monotonic` when it is asked to stop so that other workers can join.
        joins: whether it was.
    """

    def __init__(self, *arguments: Any):
        self.join_at, self.joins = math.inf, False
        self._others_lost_one = False  # workers that other launchers have started
        self._missed: dict[str, int] = {}  # questions in a row without an answer, by name
        self._stalled = math.inf  # since when no worker here answers
        self._killed: dict[str, str] = {}  # why, by name
        self._over = threading.Event()
        super().__init__(*arguments)
        for task in self._tasks:
            threading.Thread(target=self._ask, args=(task,), daemon=True).start()

    def _ask(self, task: _Task) -> None:
        """Asks a worker. TensorFlow answers while Python computes, or hangs."""
        config = json.loads(task.config)
        _, port = addresses.split(config["cluster"]["worker"][config["task"]["index"]])
        answered = False
        while not self._over.wait(_ASK_SECONDS):
            missed = 0  # also before it listens, and when it has ended
            try:
                ask_grpc("localhost", port, _ANSWER_SECONDS)
                answered = True
            except TimeoutError:
                assert task.process
                if answered and not _is_busy(task.process.pid):
                    missed = self._missed.get(task.name, 0) + 1
            except OSError:
                pass
            self._missed[task.name] = missed

    def _start(self, task: _Task, pipe: int | None = None) -> None:
        task.pipe, pipe = os.pipe()
        os.set_blocking(task.pipe, False)
        try:
            super()._start(task, pipe)
        finally:
            os.close(pipe)

    def wait(self, received: list[int], grace: float) -> int:
        """Waits for all. When one is lost, the others have ``grace`` seconds to save; so they have
        after a signal, and when others join. Returns the code."""
        since, asked, at_once = math.inf, False, False
        while left := [task for task in self._tasks if task.poll() is None]:
            now = time.monotonic()
            self._kill_children()
            self._listen()
            others = self._who_joins() if math.isinf(since) else ""
            if not asked and (received or others):
                asked, self.joins = True, not received
                why = others if self.joins else signal.Signals(received[0]).name
                _say(f"{why}: the workers are asked to save and end")
                self._signal(signal.SIGTERM if self.joins else received[0])
                since = min(since, now)
            at_once |= signal.SIGINT in received[1:]  # a scheduler may repeat SIGTERM
            if math.isinf(since) and (loss := self._loss()):
                _say(f"{loss}; the others save and end")
                since = now
            frozen = self._frozen(left, grace)
            for task in left:
                is_frozen = task in frozen
                if at_once or is_frozen or now - since >= self._patience(task, grace, asked):
                    how = _FROZEN if is_frozen else "has not ended"
                    _say(f"{'a second Ctrl-C: ' * at_once}{task.name} {how}: killed")
                    self._kill(task)
                    if not is_frozen or task.poll() == -signal.SIGKILL:  # else it ended by itself
                        self._killed[task.name] = how
            time.sleep(0.05)
        self.end(0.0)
        left = [task for task in self._tasks if self._killed.get(task.name) != _FROZEN]
        code = worst(task.poll() or 0 for task in (received and left) or self._tasks)
        if received and code == PeerError.exit_code:  # it has lost one that was frozen, and saved
            return Preempted.exit_code
        return 128 - code if code < 0 else code

    def _frozen(self, left: list[_Task], grace: float) -> list[_Task]:
        """Those that do not answer. What stops all workers here, such as the disk, may let them go
        on: then they have ``grace`` seconds, and are judged together."""
        missed = [self._missed.get(task.name, 0) for task in left]
        silent = [task for task, times in zip(left, missed, strict=True) if times >= _ASKS]
        now = time.monotonic()
        if len(left) > 1 and all(missed):
            self._stalled = min(self._stalled, now)
            return silent if silent == left and now - self._stalled >= grace else []
        if math.isfinite(self._stalled):  # one goes on, so each is asked again
            self._stalled = math.inf
            self._missed.clear()
            return []
        return silent

    def _signal(self, number: int) -> None:
        super()._signal(number)
        for task in self._tasks:
            task.asked = number

    def _who_joins(self) -> str:
        """Why the workers should stop; "" if they need not."""
        return "a slot is tried again" if time.monotonic() >= self.join_at else ""

    def _listen(self) -> None:
        """Reads what the workers have told."""
        for task in self._tasks:
            task.listen()

    def _loss(self) -> str:
        """What shows that a worker is lost; "" if nothing does."""
        for task in self._tasks:
            if task.poll():
                return f"{task.name} {_how(task.poll() or 0)}"
            if elastic.LOST in task.told:
                return f"{task.name} has lost another"
        return ""

    def _patience(self, task: _Task, grace: float, asked: bool) -> float:
        """Seconds that a worker has to save and end after it was ``asked``, or the first sign of a
        loss."""
        stopped = any(other.poll() == Preempted.exit_code for other in self._tasks)
        knows = elastic.LOST in task.told or self._failed() or asked or stopped
        return grace if knows else min(grace, SILENT_SECONDS)

    def _failed(self) -> dict[int, str]:
        """Which workers were frozen, or have ended by themselves, but not because another was lost;
        how, by rank."""
        found = {}
        for rank, task in enumerate(self._tasks):
            if self._killed.get(task.name) == _FROZEN:
                found[rank] = _FROZEN
            elif task.name not in self._killed and (code := task.poll() or 0) not in NOT_LOST:
                found[rank] = _how(code)
        return found

    def lost(self) -> dict[int, str]:
        """How workers were lost, by rank, after `wait`: those that failed, else those that were
        silent while others had lost one."""
        told = self._others_lost_one or any(elastic.LOST in task.told for task in self._tasks)
        silent = {
            rank: "hangs"
            for rank, task in enumerate(self._tasks)
            if told and task.name in self._killed and elastic.LOST not in task.told
        }
        return self._failed() or silent

    def trained(self) -> bool:
        """Whether a worker has finished a call of its loop."""
        return any(elastic.TRAINED in task.told for task in self._tasks)

    def end(self, grace: float, *, at_once: bool = False) -> None:
        self._over.set()
        super().end(grace, at_once=at_once)
        for task in self._tasks:
            if task.pipe >= 0:
                task.listen()
                os.close(task.pipe)
                task.pipe = -1


class _JobOnMachine(_ElasticJob):
    """The worker ``rank`` of a ``plan``: that of this machine, in an attempt on several."""

    def __init__(
        self,
        command: Sequence[str],
        plan: board.Plan,
        rank: int,
        processes: _Processes,
        machines: Machines,
        bounds: _Bounds,
    ):
        self._plan, self._machines = plan, machines
        self._may_join = rank == 0 and len(plan.members) < bounds.most
        self._is_over = False  # for all, whatever the worker does
        super().__init__(command, {"worker": [*plan.workers]}, processes, bounds.backoff, rank)
        self.join_at = time.monotonic() + bounds.join_every

    def _signal(self, number: int) -> None:
        self._machines.say(joins=True)  # the others go on, also if this machine is gone before
        super()._signal(number)

    def _trains_beside(self, view: View) -> bool:
        """Whether the worker still trains, and others have another plan: it saves, then."""
        knows = elastic.LOST in self._tasks[0].told
        return view.plan.number > self._plan.number and self.trained() and not knows

    def _who_joins(self) -> str:
        view = self._machines.view
        if self._trains_beside(view):
            return _WITHOUT_THIS_ONE
        if not self._may_join or time.monotonic() < self.join_at:
            return ""
        if self._machines.silence > SILENT_SECONDS:  # there could be no plan
            return ""
        newcomers = view.newcomers()
        return f"{', '.join(newcomers)} can join" if newcomers else ""

    def _listen(self) -> None:
        super()._listen()
        broken = elastic.LOST in self._tasks[0].told
        self._machines.say(broken=broken, trained=self.trained())

    def _loss(self) -> str:
        own = super()._loss()
        machines, plan = self._machines, self._plan
        view = machines.view
        if self._trains_beside(view):
            return own  # `_who_joins` says so
        if view.plan.number > plan.number:
            self._is_over = True
            return own or _WITHOUT_THIS_ONE
        absent = [name for name in plan.members if name not in view.there]
        if absent and not self.trained():  # all wait for it
            self._is_over = True
            return own or f"{', '.join(absent)} is lost before the first call"
        for machine in view.of_plan():
            ended = machine.state != board.RUNS and machine.code not in (0, Preempted.exit_code)
            if machine.name != machines.mine.name and (machine.broken or ended):
                self._others_lost_one = True
                return own or f"{machine.name} has lost a worker"
        return own

    def _patience(self, task: _Task, grace: float, asked: bool) -> float:
        return 0.0 if self._is_over and not asked else super()._patience(task, grace, asked)

    def lost(self) -> dict[int, str]:
        # Before its first call it waited for others, and does not hang.
        return super().lost() if self.trained() else self._failed()


class _Processes(NamedTuple):
    """What starts the processes of a job, and what kills them if the launcher is killed."""

    server: ForkServer
    guard: Guard


@contextlib.contextmanager
def _processes(command: Sequence[str], received: list[int]) -> Iterator[_Processes]:
    # The guard is first: it is a fork, and there are no threads yet.
    with Guard() as guard, ForkServer(command, lambda: received) as server:
        yield _Processes(server, guard)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list, so that they do not end the launcher."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    # If who has started the launcher lets it ignore SIGCHLD, no exit code is known.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_busy(group: int) -> bool:
    """Whether a thread of a process group runs, or waits for a core, or a process writes its core
    file. Not on systems without ``/proc``."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(process.name)) != group:
                continue
            if "CoreDumping:\t1" in (process / "status").read_text():
                return True
            for thread in process.glob("task/*/stat"):
                if thread.read_text().rpartition(") ")[2].startswith("R"):
                    return True
    return False


def _pause_before(restart: int, backoff: float) -> float:
    """Returns the seconds to wait before a restart, of which ``restart`` came before."""
    return min(_LONGEST_BACKOFF, backoff * 2.0 ** min(restart, 1000))


def _wait_until(condition: Callable[[], object], seconds: float, every: float = 0.05) -> None:
    """Waits for ``condition`` to be true, at most so many ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(every)


def _copy_lines(name: str, source: int, target: TextIO) -> None:
    with open(source, "rb") as lines:
        for line in lines:
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
