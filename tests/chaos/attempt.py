"""Runs one attempt of a job: starts its tasks, disturbs them, and notes what happens. The faults
that come from outside of a task are at the end.

Tasks are forked after TensorFlow was imported, which saves seconds and is safe until the first
operation. As the launcher does, this kills what does not end, and starts a worker again that has
failed beside parameter servers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ctl import launch
from ctl.base import console, durable
from ctl.checkpoint import manifest
from ctl.errors import UsageError

from .draw import ALL, Fault, Schedule

_TICK = 0.02
_RESTART_SECONDS = 1.0  # as the launcher's first --backoff
_SECONDS_BETWEEN_SIGNALS = 0.01
_LEFT_SECONDS = 10.0  # a child that ends when its parent was killed may take a moment
_BY_THE_TASK = ("slow", "hang", "raise")  # the task marks when it meets one of these

_DISK = "size=64m"
_FILLER = "filler"
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 1 << 18, 2
_LISTEN, _CLOSED = "0A", "07"  # states in /proc/net/tcp and, of a bound socket, in /proc/net/udp

# What begins like TensorFlow's protocol: the preface of HTTP/2 (RFC 9113, section 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class Hit:
    """A fault that happened.

    Attributes:
        fault: which one.
        at: when, in seconds since the epoch.
        tasks: names of the tasks that it has hit, which were there.
        marks: the last mark of each task at that moment; "" before the first.
    """

    fault: Fault
    at: float
    tasks: tuple[str, ...]
    marks: dict[str, str]


@dataclasses.dataclass
class Attempt:
    """What happened in an attempt.

    Attributes:
        names: of the tasks.
        began: seconds since the epoch.
        hits: in the order of time.
        ends: exit code and time of each end of each task; minus the number of a signal. Without
            those that this process has killed.
        stuck: tasks that had not ended in time.
        left: processes of the job that outlived it, by id.
        marks: time and name of each mark of each task.
        said: stderr of each task.
        damaged: the file that was damaged afterwards, or "".
        thawed: when the frozen tasks went on, or 0.
    """

    names: list[str]
    began: float
    hits: list[Hit] = dataclasses.field(default_factory=list)
    ends: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    stuck: list[str] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    marks: dict[str, list[tuple[float, str]]] = dataclasses.field(default_factory=dict)
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    damaged: str = ""
    thawed: float = 0.0

    @property
    def seconds(self) -> float:
        """From the begin to the last end."""
        return max((at for ends in self.ends.values() for _, at in ends), default=0.0) - self.began


def prepare() -> None:
    """Imports what the tasks would import. Starts no threads, which a fork would not survive."""
    console.load_tensorflow()
    from . import job  # noqa: F401

    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import warm_start  # noqa: F401 - half of the processor time of a job

    gc.set_threshold(20_000, 10, 10)  # as in tests/support/ctl_fixtures.py


class _Running:
    """An attempt that runs."""

    def __init__(self, schedule: Schedule, number: int, out: Path, disk: Path):
        self.schedule, self.out, self.disk, self.run_dir = schedule, out, disk, disk / "run"
        self.faults = list(schedule.attempts[number])
        self.result = Attempt(schedule.tasks, time.time())
        self.result.ends = {name: [] for name in schedule.tasks}
        self._randoms = random.Random(f"{schedule.seed} {number}")
        self._addresses = launch.cluster(schedule.workers, schedule.servers)
        self._pids: dict[str, int] = {}
        self._sessions: list[int] = []
        self._frozen: set[str] = set()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._opened: list = []
        for index, name in enumerate(schedule.tasks):
            self._start(name, [f for f in self.faults if f.task in (index, ALL)])

    def _start(self, name: str, faults: list[Fault]) -> None:
        pid = os.fork()
        if pid:
            self._pids[name] = pid
            self._sessions.append(pid)
            return
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with the runner
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, stream in ((1, "stdout"), (2, "stderr")):
                path = self.out / f"{name}.{stream}"
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            from . import job

            job.run(name, self._addresses, self.out, self.run_dir, faults)
        finally:
            os._exit(99)

    def look(self) -> None:
        """Reads the marks, notes tasks that have ended, and does the faults that are due."""
        for name in self.schedule.tasks:
            path = self.out / f"{name}.marks"
            lines = path.read_text().splitlines() if path.exists() else []
            pairs = [line.split(" ", 1) for line in lines]
            self.result.marks[name] = [(float(at), mark) for at, mark in pairs]
        self._reap()
        now = time.time()
        for fault in list(self.faults):
            if fault.kind in _BY_THE_TASK:
                self._note_met(fault)
            elif fault.kind != "damage" and self._is_due(fault, now):
                self.faults.remove(fault)
                self._do(fault)
        for at, work in list(self._later):
            if now >= at:
                self._later.remove((at, work))
                work()

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del self._pids[name]
                    code = os.waitstatus_to_exitcode(status)
                    self.result.ends[name].append((code, time.time()))
                    if code and name.startswith("worker") and "chief 0" in self._pids:
                        self._later.append(
                            (time.time() + _RESTART_SECONDS, lambda name=name: self._again(name))
                        )

    def _again(self, name: str) -> None:
        if "chief 0" in self._pids:
            self._start(name, [])

    def _note_met(self, fault: Fault) -> None:
        name = self.schedule.tasks[fault.task]
        for at, mark in self.result.marks[name]:
            if mark == f"hit {fault.number}":
                self.faults.remove(fault)
                self._hit(fault, [name], at)
                return

    def _is_due(self, fault: Fault, now: float) -> bool:
        """Whether the mark that it waits for was passed so long ago."""
        names = self.schedule.tasks
        of = names[0 if self.schedule.servers or fault.task == ALL else fault.task]
        wait = 0.0 if fault.kind == "pause" else fault.seconds
        return any(mark == fault.place and now >= at + wait for at, mark in self.result.marks[of])

    def _hit(self, fault: Fault, names: list[str], at: float) -> None:
        marks = {}
        for name in self.schedule.tasks:
            before = [m for t, m in self.result.marks[name] if t <= at and m[:3] != "hit"]
            marks[name] = before[-1] if before else ""
        self.result.hits.append(Hit(fault, at, tuple(names), marks))

    def _do(self, fault: Fault) -> None:
        of = self.schedule.tasks if fault.task == ALL else [self.schedule.tasks[fault.task]]
        names = [name for name in of if name in self._pids and name not in self._frozen]
        if not names:
            return
        self._hit(fault, names, time.time())
        if fault.kind == "kill":
            self._signal(names, signal.SIGKILL)
        elif fault.kind in ("term", "int"):
            for _ in range(fault.times):
                self._signal(names, signal.SIGTERM if fault.kind == "term" else signal.SIGINT)
                time.sleep(_SECONDS_BETWEEN_SIGNALS)
        elif fault.kind in ("pause", "freeze"):
            self._signal(names, signal.SIGSTOP)
            if fault.kind == "freeze":
                self._frozen.update(names)
            else:
                going_on = time.time() + fault.seconds, lambda: self._signal(names, signal.SIGCONT)
                self._later.append(going_on)
        elif fault.kind == "disk":
            fill(self.disk)
        elif fault.kind == "garbage":
            self._opened += send_garbage(list(self._pids.values()), self._randoms)
        elif fault.kind in ("cut", "drop"):
            (self.out / f"{names[0]}.{fault.kind}").touch()

    def _signal(self, names: list[str], number: int) -> None:
        for name in names:
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(self._pids[name], number)

    def waits_for(self) -> list[str]:
        """The tasks that run and must end by themselves. One whose user's code hangs is ended by
        whoever started it, and a frozen one cannot end."""
        hung = {name for hit in self.result.hits if hit.fault.kind == "hang" for name in hit.tasks}
        return [name for name in self._pids if name not in self._frozen | hung]

    def thaw(self) -> bool:
        """Lets the frozen tasks go on. Returns whether there are any."""
        thawed, self._frozen = list(self._frozen), set()
        self._signal(thawed, signal.SIGCONT)
        if thawed:
            self.result.thawed = time.time()
        return bool(thawed)

    def close(self) -> None:
        """Kills all that is left, and does the damage that is due after the attempt."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._pids.clear()
        until = time.time() + _LEFT_SECONDS
        while (left := _of_sessions(self._sessions)) and time.time() < until:
            time.sleep(_TICK)
        self.result.left = left
        for pid in self.result.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._opened:
            connection.close()
        free(self.disk)
        if (self.run_dir / "inspect").exists():
            shutil.copytree(self.run_dir / "inspect", self.out / "inspect")
        for name in self.schedule.tasks:
            path = self.out / f"{name}.stderr"
            self.result.said[name] = path.read_text(errors="replace") if path.exists() else ""

    def damage(self) -> None:
        """Does the faults that come after an attempt."""
        for fault in [fault for fault in self.faults if fault.kind == "damage"]:
            checkpoints = self.run_dir / "checkpoints"
            self.result.damaged = damage(checkpoints, fault.place, self._randoms)
            if self.result.damaged:
                self._hit(fault, [], time.time())


def run(
    schedule: Schedule,
    number: int,
    out: Path,
    disk: Path,
    deadline: Callable[[Attempt], float],
) -> tuple[Attempt, Callable[[], None]]:
    """Runs attempt ``number`` of ``schedule`` to its end.

    Args:
        schedule: of which job.
        number: of the attempt, from 0.
        out: an empty directory for output and marks.
        disk: where the job has its directory ``run``.
        deadline: until when all must have ended, by what has happened so far.

    Returns:
        What happened, and a function that does the damage that comes after the attempt.
    """
    out.mkdir(parents=True)
    running = _Running(schedule, number, out, disk)
    result = running.result
    try:
        while True:
            running.look()
            waiting = running.waits_for()
            if waiting and time.time() > deadline(result):
                result.stuck += waiting
            if result.stuck or not (waiting or running.thaw()):
                break
            time.sleep(_TICK)
    finally:
        running.close()
    return result, running.damage


def empty(disk: Path) -> None:
    """Removes what the attempts of a schedule have left on the disk."""
    free(disk)
    for path in disk.iterdir():
        shutil.rmtree(path)


def _of_sessions(sessions: list[int]) -> list[int]:
    """The processes whose session is one of ``sessions``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) in sessions and stat[0] != "Z":
                found.append(int(entry.name))
    return found


# Faults from outside of a task ------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mounts a disk of 64 MiB on ``directory``, which this process and its children see.

    Raises:
        UsageError: it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = not (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, _DISK.encode())
    )
    if not mounted:
        reason = os.strerror(ctypes.get_errno())
        raise UsageError(f"cannot mount a disk to fill ({reason}): run it as root")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(directory), _MNT_DETACH)


def fill(disk: Path) -> None:
    """Leaves no byte free."""
    with open(disk / _FILLER, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def free(disk: Path) -> None:
    """Undoes `fill`."""
    (disk / _FILLER).unlink(missing_ok=True)


def ports(pids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The kinds (``socket.SOCK_STREAM`` or ``SOCK_DGRAM``) and ports on which processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry.path))
    for name, kind, state in (
        ("tcp", socket.SOCK_STREAM, _LISTEN),
        ("tcp6", socket.SOCK_STREAM, _LISTEN),
        ("udp", socket.SOCK_DGRAM, _CLOSED),
        ("udp6", socket.SOCK_DGRAM, _CLOSED),
    ):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in inodes:
                yield kind, int(fields[1].rpartition(":")[2], 16)


def send_garbage(pids: Sequence[int], randoms: random.Random) -> list[socket.socket]:
    """Sends to every port on which processes listen what nobody of the job would send. Returns
    connections that stay open until they are closed."""
    opened = []
    for kind, port in set(ports(pids)):
        for content in (
            b"",  # silence
            randoms.randbytes(300),
            b"two words",
            _PREFACE[: randoms.randrange(1, len(_PREFACE))],
            _PREFACE + randoms.randbytes(100),
        ):
            connection = socket.socket(socket.AF_INET, kind)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(content)
                if kind == socket.SOCK_STREAM:
                    _leave(connection, randoms.choice(["open", "half open", "reset", "closed"]))
            opened.append(connection)
    return opened


def _leave(connection: socket.socket, how: str) -> None:
    if how == "half open":
        connection.shutdown(socket.SHUT_WR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how in ("reset", "closed"):
        connection.close()


def intact(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints whose files are as their manifest says, ascending."""
    steps = []
    for saved in manifest.load_all(checkpoints):
        with contextlib.suppress(durable.Damaged):
            durable.verify(saved.path, saved.files)
            steps.append(saved.step)
    return steps


def to_resume_from(checkpoints: Path) -> int:
    """The step from which the next attempt must go on: the last one committed, or else the newest
    intact one before it, or else any; 0 if there is none."""
    steps = intact(checkpoints)
    last = manifest.end_of_history(checkpoints)
    return max((s for s in steps if s <= last), default=max(steps, default=0))


def damage(checkpoints: Path, how: str, randoms: random.Random) -> str:
    """Damages a file of the newest checkpoint, or the file that names it. Returns which file; ""
    and does nothing if there would be no other checkpoint."""
    steps = intact(checkpoints)
    if len(steps) < 2:
        return ""
    newest = manifest.path_of(checkpoints, steps[-1])
    latest = checkpoints / "latest.json"  # which may have been deleted before
    path = randoms.choice([*sorted(newest.iterdir()), *([latest] if latest.exists() else [])])
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: randoms.randrange(len(content))])
    else:
        content[randoms.randrange(len(content))] ^= 1 << randoms.randrange(8)
        path.write_bytes(content)
    return str(path.relative_to(checkpoints))
