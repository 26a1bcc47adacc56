"""Heartbeats of a job with parameter servers: which tasks are alive, which were lost, and the exit
code of the job.

TensorFlow's servers do not end by themselves, and its coordinator waits forever for a frozen one.
Every worker and parameter server therefore keeps a connection to the coordinator, at the
coordinator's address in ``TF_CONFIG``; TensorFlow uses another port there. Both sides send a line
every second. A closed connection means that the task ended. Silence means that it is frozen or
unreachable. This module imports no TensorFlow.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable

from absl import logging

from ctl.base import signals
from ctl.distributed.cluster.external_watchdog import Keeper
from ctl.distributed.cluster.handshake import HandshakeServer, handshake
from ctl.distributed.cluster.members import Tasks
from ctl.distributed.cluster.rendezvous import Waiting
from ctl.errors import CtlError, PeerError, Preempted, exit_code_of

_BEAT_SECONDS = 1.0
_QUIET_BEATS = 4
_SILENT_SECONDS = 30.0

# Seconds that a worker still serves after a signal to end. The coordinator may have received the
# signal too, and then needs the worker for the steps in progress.
_LEAVING_SECONDS = 5.0

# Seconds that the main thread of the coordinator may take to end the job after a loss. TensorFlow
# can hold it in a read from a frozen parameter server, which cannot be interrupted.
_REACTION_SECONDS = 5.0

_LONGEST_LINE = 200

_COORDINATOR = "the coordinator"


@dataclasses.dataclass
class _Peer:
    connection: socket.socket
    name: str
    heard: float = dataclasses.field(default_factory=time.monotonic)
    unread: bytes = b""

    def lines(self) -> list[str] | None:
        """The lines received since the last call; None when the connection is closed."""
        try:
            data = self.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        if not data or len(self.unread) > _LONGEST_LINE:
            return None
        self.heard = time.monotonic()
        return [line.decode(errors="replace") for line in lines]

    def say(self, line: str) -> None:
        # The buffer is full if the peer does not read. Its silence will show that.
        with contextlib.suppress(OSError):
            self.connection.send(line.encode() + b"\n")

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.heard > _SILENT_SECONDS


class Heartbeats:
    """The coordinator's side of the heartbeats, a context manager.

    The exception that leaves the context, or its absence, sets the exit code of this process. When
    this process ends, it ends all other tasks with the same code.

    Attributes:
        workers: the names of all workers of the job.

    Args:
        tasks: the tasks of the job.
        worker_timeout: seconds to wait for a worker when none is left.

    Raises:
        PeerError: the coordinator's port is taken.
    """

    def __init__(self, tasks: Tasks, worker_timeout: float = 60.0):
        self._tasks = tasks
        self._worker_timeout = worker_timeout
        self.workers = [name for name in tasks.servers if name.startswith("worker")]
        self._ps = [name for name in tasks.servers if name.startswith("ps")]
        self._peers: dict[str, _Peer] = {}
        self._why: dict[str, str] = {}  # the reason for each missing server
        self._complete = False
        self._worker_seen = time.monotonic()
        self._asked_to_stop = False
        self._kept: list[object] = []
        self._code = 1
        self._keeper: Keeper | None = None
        self._door = HandshakeServer(
            tasks.coordinator, _COORDINATOR, tasks.fingerprint, tasks.servers
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)
        self._thread.start()

    # For the main thread ------------------------------------------------------------------------

    def wait_for_all(self, timeout: float) -> None:
        """Returns when all workers and parameter servers are connected.

        Call it before TensorFlow connects, which waits forever for a missing server.

        Raises:
            PeerError: one is missing after ``timeout`` seconds. Warnings name it from 10 s on.
        """
        waiting = Waiting(_COORDINATOR, timeout)
        while missing := self._missing(self._tasks.servers):
            waiting.check(missing)
            time.sleep(0.02)
        self._complete = True
        # While TensorFlow waits for a frozen server, it may hold Python's lock and stop `_run`. The
        # other tasks would then end, and the frozen one could not be named.
        limit = _SILENT_SECONDS - _REACTION_SECONDS
        doing = "the coordinator: TensorFlow has blocked its process"
        self._keeper = Keeper(doing, self._tasks.servers, limit, "", patient=True)

    def check(self) -> None:
        """Checks that the job can go on. A worker that has ended is not an error.

        Raises:
            PeerError: a parameter server is lost, a task is silent, or there has been no worker for
                ``worker_timeout`` seconds.
        """
        if reason := self._lost() or self._no_worker():
            raise PeerError(reason)

    def quiet(self) -> str:
        """Names the tasks that missed some beats, and the seconds of their silence; "" for none."""
        now = time.monotonic()
        return ", ".join(
            f"{name} at {self._tasks.servers[name]}, silent for {now - peer.heard:.0f} s"
            for name, peer in list(self._peers.items())
            if now - peer.heard > _QUIET_BEATS * _BEAT_SECONDS
        )

    @property
    def asked_to_stop(self) -> bool:
        """Whether a parameter server, which holds a part of the state, was told to end."""
        return self._asked_to_stop

    def keep(self, owner: object) -> None:
        """Keeps ``owner`` and its functions alive until the process ends.

        When a function is freed, TensorFlow removes it from all servers, and logs an error for each
        server that was lost.
        """
        self._kept.append(owner)

    def __enter__(self) -> Heartbeats:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Raises `PeerError` in place of an exception that a lost server may have caused."""
        atexit.register(lambda: self._end(self._code))
        self._code = exit_code_of(error)
        if isinstance(error, Exception) and (reason := self._cause_of(error)):
            self._code = PeerError.exit_code
            raise PeerError(reason) from error

    def _cause_of(self, error: Exception) -> str | None:
        # TensorFlow may have noticed a loss a moment before `_run` does.
        deadline = time.monotonic() + (0.0 if isinstance(error, CtlError) else 2 * _BEAT_SECONDS)
        while not (reason := self._lost()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return reason

    def _end(self, code: int) -> None:
        """Ends the process at once: TensorFlow's exit would talk to servers that have ended."""
        self._complete = False  # from here on, a closed connection is not a loss
        for peer in list(self._peers.values()):
            peer.say(f"end {code}")
        if self._keeper:
            self._keeper.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        beat = fine = time.monotonic()
        while True:
            for key, _ in self._selector.select(_BEAT_SECONDS / 2):
                if key.data:
                    self._hear(key.data)
            for name, connection in self._door.arrivals():
                self._admit(_Peer(connection, name))
            now = time.monotonic()
            if now - beat >= _BEAT_SECONDS:
                beat = now
                if self._keeper:
                    self._keeper.beat()
                for peer in list(self._peers.values()):
                    peer.say("beat")
            reason = self._lost()
            if not reason:
                fine = now
            elif now - fine > _REACTION_SECONDS:
                print(reason, file=sys.stderr)
                self._end(PeerError.exit_code)  # the main thread may set `_code` meanwhile

    def _admit(self, peer: _Peer) -> None:
        if self._complete:
            logging.info("%s is back", peer.name)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        before, self._peers[peer.name] = self._peers.get(peer.name), peer
        if before:
            self._close(before)

    def _hear(self, peer: _Peer) -> None:
        lines = peer.lines()
        if lines is None:
            self._drop(peer, "its process has ended")
        elif "leave" in lines:
            self._asked_to_stop |= peer.name in self._ps

    def _drop(self, peer: _Peer, why: str) -> None:
        self._close(peer)
        if self._peers.get(peer.name) is peer:
            self._why[peer.name] = why
            del self._peers[peer.name]
            if peer.name in self.workers:
                self._worker_seen = time.monotonic()
                if self._complete:
                    logging.warning("%s was lost", peer.name)

    def _close(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()

    # Conclusions --------------------------------------------------------------------------------

    def _missing(self, names: Iterable[str]) -> str:
        why = self._why | dict.fromkeys(self._door.differing, "has another TF_CONFIG")
        return ", ".join(
            f"{name} at {self._tasks.servers[name]} ({why.get(name, 'not connected yet')})"
            for name in names
            if name not in self._peers
        )

    def _lost(self) -> str | None:
        """Describes a loss that ends the job; None if there is none."""
        if not self._complete:
            return None
        peers = dict(self._peers)
        silent = [name for name, peer in peers.items() if peer.is_silent]
        if silent:
            address = self._tasks.servers[silent[0]]
            return f"{silent[0]} at {address} has been silent for {_SILENT_SECONDS:.0f} s"
        gone = self._missing(self._ps)
        return f"lost {gone}; the same command resumes from the last checkpoint" if gone else None

    def _no_worker(self) -> str | None:
        if any(name in self._peers for name in self.workers):
            return None
        seconds = time.monotonic() - self._worker_seen
        if seconds < self._worker_timeout:
            return None
        missing = self._missing(self.workers)
        return f"no worker has been connected for {seconds:.0f} s (--worker_timeout): {missing}"


def attend(tasks: Tasks, timeout: float) -> int:
    """Runs the side of a worker or parameter server. Call it in the main thread, after the start of
    its server.

    Returns:
        The coordinator's exit code, when it has ended the job.

    Raises:
        PeerError: the coordinator did not come within ``timeout`` seconds, closed the connection
            without an exit code, or sent no line for 30 s.
        Preempted: SIGTERM or SIGINT was received.
        UsageError: the coordinator has other addresses in its ``TF_CONFIG``.
    """
    signals.begin()  # the process ends with this code, whatever signals come after it is known
    with signals.answered_by(received := signals.Received()), signals.deciding():
        code = _attend(tasks, timeout, received)
        signals.decided(code)
        return code


def _attend(tasks: Tasks, timeout: float, received: list[int]) -> int:
    where = f"the coordinator at {tasks.coordinator}"
    peer = _connect(tasks, timeout, received)
    leave_at = float("inf")
    while True:
        with selectors.DefaultSelector() as selector:
            selector.register(peer.connection, selectors.EVENT_READ)
            selector.select(_BEAT_SECONDS)
        lines = peer.lines()
        if lines is None:
            raise PeerError(f"{tasks.name}: {where} is gone")
        for line in lines:
            if end := re.fullmatch(r"end (\d{1,3})", line):
                return int(end[1])
        if peer.is_silent:
            raise PeerError(f"{tasks.name}: {where} has been silent for {_SILENT_SECONDS:.0f} s")
        peer.say("beat")
        if received and leave_at == float("inf"):
            # Parameter servers hold the state, so they stay until the coordinator has saved it.
            leave_at = time.monotonic() + _LEAVING_SECONDS if tasks.kind == "worker" else 1e300
            peer.say("leave")
        if time.monotonic() >= leave_at or received.count(signal.SIGINT) > 1:
            raise Preempted(f"{tasks.name}: left after {signal.Signals(received[0]).name}")


def _connect(tasks: Tasks, timeout: float, received: list[int]) -> _Peer:
    waiting = Waiting(tasks.name, timeout)
    while True:
        try:
            connection = handshake(tasks.coordinator, _COORDINATOR, tasks.name, tasks.fingerprint)
            connection.setblocking(False)
            return _Peer(connection, _COORDINATOR)
        except OSError as error:
            waiting.check(f"{_COORDINATOR} at {tasks.coordinator} ({error.strerror or error})")
        if received:
            raise Preempted(f"{tasks.name}: left after {signal.Signals(received[0]).name}")
        time.sleep(0.1)
