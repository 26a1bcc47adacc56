"""The conversation of the doctors of a job, over the ports that the job will use.

Each listens on the TCP and the UDP port of its worker, connects to all others, and answers their
questions. Messages are signed, see `ctl.distributed.cluster.secret`: lines of JSON over TCP, and
datagrams that are only counted. Every wait has a limit.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from ctl.distributed.cluster.addresses import interface, split
from ctl.distributed.cluster.handshake import HandshakeServer, handshake
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.cluster.secret import sign, verified
from ctl.doctor.program import say
from ctl.errors import PeerError, UsageError

_QUIET_SECONDS = 10.0  # until a line names whom this doctor waits for, and between such lines
_OTHER_WAY_SECONDS = 10.0  # for the second of the two ways between workers, after the first
_ANSWER_SECONDS = 10.0
_SILENT_SECONDS = 600.0  # after which a connection of another doctor is closed
_LONGEST = 1 << 20  # bytes of a line
_LARGEST = 1 << 30  # bytes that one question moves
_BLOCK = 1 << 18  # bytes that are sent at once
_DATAGRAM = 65_507  # bytes, the most that UDP carries


class Peers:
    """The other doctors, a context manager.

    Args:
        cluster: the workers of the job.
        timeout: seconds to wait for the others to come.

    Attributes:
        refused: for each worker that this one cannot reach, the reason.
        strangers: such workers in whose place something else answers.
        came: workers that have reached this one.

    Raises:
        PeerError: the TCP or the UDP port of this worker is taken.
    """

    def __init__(self, cluster: Cluster, timeout: float):
        self.cluster, self._timeout = cluster, timeout
        self.others = [i for i in range(len(cluster.workers)) if i != cluster.index]
        self.refused: dict[int, str] = dict.fromkeys(self.others, "")
        self.strangers: set[int] = set()
        self.came: set[int] = set()
        self._lines: dict[int, _Line] = {}
        self._heard: collections.Counter[tuple[int, bool]] = collections.Counter()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._mine: dict[str, Any] = {}
        self._theirs: dict[str, dict[int, Any]] = collections.defaultdict(dict)
        self._open: collections.Counter[int] = collections.Counter()  # connections that came
        self._accepted: list[socket.socket] = []
        address = cluster.workers[cluster.index]
        names = {_name(i) for i in self.others}
        self._door = HandshakeServer(address, _name(cluster.index), cluster.fingerprint, names)
        host, port = split(address)
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._datagrams.bind((interface(host), port))
        except OSError as error:
            self._door.__exit__()
            raise PeerError(f"UDP port {port} cannot be used: {error.strerror}") from error
        self._datagrams.settimeout(0.1)
        # Packets of the size of the device arrive whole or not at all.
        self._datagrams.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PROBE)
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._let_in, self._count_datagrams)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_port()
        for connection in [line.socket for line in self._lines.values()] + self._accepted:
            connection.close()

    def close_port(self) -> None:
        """Frees the ports. The connections stay."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._door.__exit__()
        self._datagrams.close()

    # The others come ------------------------------------------------------------------------------

    def meet(self) -> None:
        """Returns when every other doctor was reached and has come, or is too late.

        Where one way is open, the other one has 10 s.
        """
        began = time.monotonic()
        first: dict[int, float] = {}  # when a worker was reached, or came
        threads = [
            threading.Thread(target=self._reach, args=(i, first, began), daemon=True)
            for i in self.others
        ]
        for thread in threads:
            thread.start()
        said = began
        while missing := [i for i in self.others if not self._is_done(i, first, began)]:
            now = time.monotonic()
            if now - said >= _QUIET_SECONDS:
                said = now
                who = ", ".join(f"worker {i} ({self.cluster.workers[i]})" for i in missing)
                say(f"has waited {now - began:.0f} s, of at most {self._timeout:.0f} s, for {who}")
            time.sleep(0.05)
        for thread in threads:
            thread.join()

    def _is_done(self, worker: int, first: dict[int, float], began: float) -> bool:
        if worker in self._lines and worker in self.came:
            return True
        return time.monotonic() > self._deadline(worker, first, began)

    def _deadline(self, worker: int, first: dict[int, float], began: float) -> float:
        if worker in self.came or worker in self._lines:
            first.setdefault(worker, time.monotonic())
        return min(
            began + self._timeout,
            first.get(worker, began + self._timeout) + _OTHER_WAY_SECONDS,
        )

    def _reach(self, worker: int, first: dict[int, float], began: float) -> None:
        """Connects to ``worker``; tries again until it is too late."""
        address, me = self.cluster.workers[worker], _name(self.cluster.index)
        while time.monotonic() < self._deadline(worker, first, began):
            try:
                connection = handshake(address, _name(worker), me, self.cluster.fingerprint)
            except (OSError, UsageError) as error:
                self.refused[worker] = getattr(error, "strerror", None) or str(error)
                if not getattr(error, "errno", None) and not isinstance(error, TimeoutError):
                    self.strangers.add(worker)
                    first.setdefault(worker, time.monotonic())
                time.sleep(0.2)
            else:
                self.refused[worker] = ""
                self.strangers.discard(worker)
                self._lines[worker] = _Line(connection)
                return

    @property
    def present(self) -> set[int]:
        """Workers to which there is a connection, one way or the other."""
        return {i for i in self.others if i in self._lines or self._open[i]}

    def reaches(self, worker: int) -> bool:
        """Whether ``worker`` can be asked. After a question without an answer, it cannot."""
        return worker in self._lines

    # What they are asked --------------------------------------------------------------------------

    def ask(self, worker: int, do: str, seconds: float = _ANSWER_SECONDS, **more: Any) -> Any:
        """The answer of ``worker`` to a question that it `_answers`.

        Raises:
            OSError: there is none in time.
        """
        with self._asking(worker) as line:
            line.send({"do": do, **more})
            return line.hear(seconds)

    def seconds_of(self, worker: int, do: str, size: int) -> float:
        """Seconds in which ``worker`` takes so many bytes (``do="take"``), or gives them
        (``do="give"``). Raises `OSError`."""
        with self._asking(worker) as line:
            began = time.perf_counter()
            line.send({"do": do, "bytes": size})
            if do == "take":
                line.give(size, _ANSWER_SECONDS)
                line.hear(_ANSWER_SECONDS)
            else:
                line.take(size, _ANSWER_SECONDS)
            return time.perf_counter() - began

    @contextlib.contextmanager
    def _asking(self, worker: int) -> Iterator[_Line]:
        """The connection to ``worker``. It is closed after an error: an answer may come late."""
        try:
            yield self._lines[worker]
        except OSError:
            self._lines.pop(worker).socket.close()
            raise

    def exchange(self, stage: str, value: Any, seconds: float) -> dict[int, Any]:
        """Tells ``value`` to all that are present; returns theirs, by worker.

        It returns when all have called it with this ``stage``, or after ``seconds``. One way
        between two workers is enough.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._mine[stage] = value
            self._changed.notify_all()
        asked = [
            threading.Thread(target=self._tell, args=(i, stage, value, seconds), daemon=True)
            for i in self.others
            if self.reaches(i)
        ]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()  # each has its limit
        with self._changed:
            self._changed.wait_for(
                lambda: self.present <= self._theirs[stage].keys(),
                max(0.0, deadline - time.monotonic()),
            )
            return dict(self._theirs[stage])

    def _tell(self, worker: int, stage: str, value: Any, seconds: float) -> None:
        with contextlib.suppress(OSError):
            self._note(
                worker, stage, self.ask(worker, "exchange", seconds, stage=stage, value=value)
            )

    def _note(self, worker: int, stage: str, value: Any) -> None:
        with self._changed:
            self._theirs[stage][worker] = value
            self._changed.notify_all()

    # What they ask --------------------------------------------------------------------------------

    def _let_in(self) -> None:
        while not self._ended.is_set():
            for name, connection in self._door.arrivals(0.05):
                worker = int(name.split()[1])
                self._accepted.append(connection)
                self._open[worker] += 1
                self.came.add(worker)
                answer = functools.partial(self._answer, worker, _Line(connection))
                threading.Thread(target=answer, daemon=True).start()

    def _answer(self, worker: int, line: _Line) -> None:
        """Answers ``worker`` until it closes the connection, or sends what is no question."""
        with contextlib.suppress(*_NO_QUESTION):
            while True:
                question = line.hear(_SILENT_SECONDS)
                self._answers[question.pop("do")](self, worker, line, **question)
        line.socket.close()
        with self._changed:
            self._open[worker] -= 1
            self._changed.notify_all()

    def _ping(self, worker: int, line: _Line) -> None:
        line.send(time.time())

    def _tell_heard(self, worker: int, line: _Line) -> None:
        line.send([self._heard[worker, large] for large in (False, True)])

    def _take(self, worker: int, line: _Line, bytes: int) -> None:
        line.take(min(bytes, _LARGEST), _ANSWER_SECONDS)
        line.send("taken")

    def _give(self, worker: int, line: _Line, bytes: int) -> None:
        line.give(min(bytes, _LARGEST), _ANSWER_SECONDS)

    def _exchange(self, worker: int, line: _Line, stage: str, value: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: stage in self._mine, _SILENT_SECONDS)
            mine = self._mine[stage]
        line.send(mine)  # first: this process may end once it knows the value of the last worker
        self._note(worker, stage, value)

    _answers: Mapping[str, Callable[..., None]] = {
        "ping": _ping,
        "heard": _tell_heard,
        "take": _take,
        "give": _give,
        "exchange": _exchange,
    }

    # Datagrams ------------------------------------------------------------------------------------

    def send_datagram(self, address: str, worker: int, size: int = 0) -> None:
        """Sends a signed datagram of at least ``size`` bytes to the UDP port of ``worker``, which
        has this IP ``address``.

        Raises:
            OSError: the system refuses to send it.
        """
        port = int(self.cluster.workers[worker].rpartition(":")[2])
        said = {"job": self.cluster.fingerprint[:16], "doctor": self.cluster.index}
        datagram = sign(json.dumps(said))
        if size:
            fill = "." * (size - len(sign(json.dumps(said | {"fill": ""}))))
            datagram = sign(json.dumps(said | {"fill": fill}))
        self._datagrams.sendto(datagram, (address, port))

    def _count_datagrams(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                said = json.loads(verified(self._datagrams.recv(_DATAGRAM)) or "")
                worker = said.get("doctor")
                if said.get("job") == self.cluster.fingerprint[:16] and worker in self.others:
                    self._heard[worker, "fill" in said] += 1


class _Line:
    """A connection to another doctor. For one thread at a time."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._input: BinaryIO = connection.makefile("rb")

    def send(self, value: Any) -> None:
        self.socket.settimeout(_ANSWER_SECONDS)
        self.socket.sendall(sign(json.dumps(value)) + b"\n")

    def hear(self, seconds: float) -> Any:
        """The next message; raises `OSError` if there is none after ``seconds``."""
        self.socket.settimeout(seconds)
        line = self._input.readline(_LONGEST)
        text = verified(line[:-1]) if line.endswith(b"\n") else None
        if text is None:
            raise ConnectionError("it has ended" if not line else "it sent what is no message")
        return json.loads(text)

    def give(self, size: int, seconds: float) -> None:
        for count in self._blocks(size, seconds):
            self.socket.sendall(bytes(count))

    def take(self, size: int, seconds: float) -> None:
        for count in self._blocks(size, seconds):
            if len(self._input.read(count)) < count:
                raise ConnectionError("it has ended")

    def _blocks(self, size: int, seconds: float) -> Iterator[int]:
        """The sizes of the blocks, within a limit for all of them."""
        deadline = time.monotonic() + seconds
        while size > 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no end after {seconds:.0f} s")
            self.socket.settimeout(left)
            yield min(size, _BLOCK)
            size -= _BLOCK


# What is raised where a message is no question.
_NO_QUESTION = OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError

# Of <linux/in.h>: the kernel cuts no datagram, and forgets what routers said of smaller ones.
_MTU_DISCOVER, _PROBE = 10, 3


def _name(worker: int) -> str:
    return f"doctor {worker}"
