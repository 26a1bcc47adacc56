"""The door of a task: lets in the other tasks of its job, on a port that strangers can reach.

A task that connects sends one signed line, and the other answers with one:

    hello FINGERPRINT NAME
    welcome FINGERPRINT NAME

NAME is that of the sender. FINGERPRINT is a hash of the addresses of its job. Only an answer can
show that the addresses differ: it comes from an address that this task was told to trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
import selectors
import socket
import time
from collections.abc import Collection

from ctl.distributed.cluster import addresses
from ctl.distributed.cluster.secret import VARIABLE, sign, verified
from ctl.errors import PeerError, UsageError

_GREETING_SECONDS = 5.0
_LONGEST = 300  # bytes of a line
_MOST_STRANGERS = 100  # connections that have not greeted

_LINE = r" ([0-9a-f]{64}) ([a-z]+ [a-z0-9]+)"


@dataclasses.dataclass
class _Stranger:
    came: float = dataclasses.field(default_factory=time.monotonic)
    said: bytes = b""


class HandshakeServer:
    """Listens at the address of a task, a context manager. Not for several threads.

    A connection that is silent for 5 s is closed, and so is the oldest of more than 100. Whatever
    is not a greeting is ignored.

    Args:
        address: ``host:port``. A host name of loopback binds to loopback, others to all interfaces.
        name: the name of this task.
        fingerprint: of the addresses, see `Cluster.fingerprint`.
        others: the names of the tasks to let in.

    Attributes:
        differing: names of tasks that came with another fingerprint.

    Raises:
        PeerError: the port is taken.
    """

    def __init__(self, address: str, name: str, fingerprint: str, others: Collection[str]):
        self.differing: set[str] = set()
        self._answer = sign(f"welcome {fingerprint} {name}") + b"\n"
        self._fingerprint = fingerprint
        self._others = others
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._listener = _bound(address, name, listens=True)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [self._listener, *self._strangers]:
            connection.close()
        self._selector.close()

    def fileno(self) -> int:
        """For a selector of the caller: readable when `arrivals` should be called."""
        return self._selector.fileno()

    def arrivals(self, seconds: float = 0.0) -> list[tuple[str, socket.socket]]:
        """Waits up to ``seconds``. Returns the names of the tasks that came, and their connections,
        which do not block and which the caller closes."""
        arrived = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and (name := self._hear(key.fileobj)):
                arrived.append((name, key.fileobj))
        while self._strangers:
            connection, stranger = next(iter(self._strangers.items()))
            patient = time.monotonic() - stranger.came < _GREETING_SECONDS
            if patient and len(self._strangers) <= _MOST_STRANGERS:
                break
            self._forget(connection)
            connection.close()
        return arrived

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left already, or this process has no file descriptor left
            time.sleep(0.01)
            return
        connection.setblocking(False)
        self._strangers[connection] = _Stranger()
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> str | None:
        """Returns the name of a task that has greeted."""
        stranger = self._strangers[connection]
        try:
            data = connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        stranger.said += data
        if data and b"\n" not in data and len(stranger.said) < _LONGEST:
            return None
        self._forget(connection)
        name = self._welcome(connection, stranger.said)
        if not name:
            connection.close()
        return name

    def _welcome(self, connection: socket.socket, line: bytes) -> str | None:
        said = _parse("hello", line)
        if not said:
            return None
        with contextlib.suppress(OSError):
            connection.send(self._answer)  # the buffer of a new connection has room for it
        fingerprint, name = said
        if name not in self._others:
            return None
        if fingerprint != self._fingerprint:
            self.differing.add(name)
            return None
        self.differing.discard(name)
        return name

    def _forget(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)


def handshake(address: str, peer: str, name: str, fingerprint: str) -> socket.socket:
    """Connects to the task ``peer`` at ``address`` as the task ``name``; gives up after 6 s.

    Raises:
        OSError: nobody listens there (the error has an ``errno``), or what answers is no task of
            this job; a `TimeoutError` if who listens does not answer.
        UsageError: it has other addresses, or is another task.
    """
    try:
        connection = socket.create_connection(addresses.split(address), timeout=1.0)
    except TimeoutError as error:  # not that of a task that is there and does not answer
        raise ConnectionError(errno.ETIMEDOUT, "no connection") from error
    try:
        connection.settimeout(_GREETING_SECONDS)
        connection.sendall(sign(f"hello {fingerprint} {name}") + b"\n")
        said = _parse("welcome", _read_line(connection))
        if not said:
            raise OSError(f"what answers is of another job, or has another {VARIABLE}")
        theirs, who = said
        if theirs != fingerprint:
            raise UsageError(
                f"{peer} at {address} has another list of addresses: give all tasks the same list"
            )
        if who != peer:
            raise UsageError(
                f"{peer} at {address} says that it is {who}: give each task its own address "
                "and index"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _read_line(connection: socket.socket) -> bytes:
    """Reads up to a newline, and nothing of what follows."""
    line, deadline = b"", time.monotonic() + _GREETING_SECONDS
    while not line.endswith(b"\n") and len(line) < _LONGEST:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _parse(word: str, line: bytes) -> tuple[str, str] | None:
    """Returns fingerprint and name of a line that begins with ``word``; None if it is none."""
    text = verified(line[:-1]) if line.endswith(b"\n") else None
    match = re.fullmatch(word + _LINE, text or "")
    return (match[1], match[2]) if match else None


def check_free(address: str, name: str) -> None:
    """Raises `PeerError` if the port of ``address``, that of the task ``name``, is taken."""
    _bound(address, name, listens=False).close()


def _bound(address: str, name: str, *, listens: bool) -> socket.socket:
    try:
        listener = addresses.bound(address, socket.SOCK_STREAM)
        if listens:
            listener.listen()
    except OSError as error:
        raise PeerError(
            f"{name} cannot listen on {address}: {error.strerror}; choose another port, or free it"
        ) from error
    listener.setblocking(False)
    return listener
