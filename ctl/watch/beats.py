"""Beats: every worker tells every other where it is, about once a second.

Datagrams between the workers themselves, on the UDP port of the same number as TensorFlow's TCP
port: a stopped chief silences nobody else, no call can block, and no private name of TensorFlow is
needed (its coordination service is served by the chief, and blocks when that is stopped). They are
not authenticated: they are shown to people and decide nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import select
import socket
import time
from typing import Any

from absl import logging

from ctl.cluster.members import Cluster

_VERSION = 1
_LARGEST = 1024  # bytes of a datagram

_KINDS = {
    "worker": (int,),
    "step": (int,),
    "doing": (str,),
    "phase": (str,),
    "waits": (bool,),
    "since": (int, float),
    "gave_up": (bool,),
}


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a worker was.

    Attributes:
        step: global step it had finished.
        doing, phase: see `ctl.watch.watchdog.Section`.
        waits: whether it was where it can wait for others.
        since: seconds without progress.
        gave_up: it is about to end because a collective failed.
        at: when it was received (`time.monotonic` of the receiver).
    """

    step: int
    doing: str
    phase: str
    waits: bool
    since: float
    gave_up: bool
    at: float


class Beats:
    """Sends and receives; only `exchange` waits, and only for as long as it is told to.

    Attributes:
        peers: the last beat of each other worker that was heard.
        interval: seconds between two beats of a worker that stays where it is; one that moves sends
            four times as many. Grows with the number of workers: 100 datagrams a second, or 400.
    """

    def __init__(self, cluster: Cluster):
        self.peers: dict[int, Beat] = {}
        self.interval = interval(len(cluster.workers))
        self._index = cluster.index
        self._job = hashlib.sha256("\n".join(cluster.workers).encode()).hexdigest()[:16]
        self._others = {
            index: address
            for index, address in enumerate(cluster.workers)
            if index != cluster.index
        }
        self._resolved: dict[int, tuple[str, int]] = {}
        self._sent, self._last = -self.interval, {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        host, _, port = cluster.workers[cluster.index].rpartition(":")
        try:
            # As in ctl.cluster.meet: a name of this host need not be one that can be bound.
            loopback = host in ("localhost", "127.0.0.1")
            self._socket.bind(("127.0.0.1" if loopback else "", int(port)))
        except OSError as error:
            logging.warning(
                "UDP port %s: %s; a flight record will not know where others are", port, error
            )

    def exchange(self, mine: dict[str, Any], seconds: float) -> None:
        """Sends ``mine`` (a `Beat` without ``at``) if that is due, and receives for ``seconds``."""
        moved = any(mine[name] != self._last.get(name) for name in ("step", "doing", "phase"))
        if time.monotonic() - self._sent >= self.interval / (4 if moved else 1):
            self.send(mine)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                self._receive()

    def send(self, mine: dict[str, Any]) -> None:
        self._sent, self._last = time.monotonic(), mine
        beat = {"ctl": _VERSION, "job": self._job, "worker": self._index, **mine}
        text = json.dumps(beat).encode()
        for index, address in self._others.items():
            with contextlib.suppress(OSError):  # nobody there, a full buffer: the next may arrive
                if index not in self._resolved:
                    host, _, port = address.rpartition(":")
                    self._resolved[index] = (socket.gethostbyname(host), int(port))
                self._socket.sendto(text, self._resolved[index])

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # also what a closed port of a peer answered
            text = self._socket.recv(_LARGEST + 1)
            worker, beat = parse(text, self._job) or (None, None)
            if worker in self._others:
                self.peers[worker] = beat


def interval(workers: int) -> float:
    return max(1.0, workers / 100)


def parse(text: bytes, job: str) -> tuple[int, Beat] | None:
    """The worker and the beat of a datagram; None for anything else. Anybody can send one."""
    try:
        data = json.loads(text) if len(text) <= _LARGEST else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("ctl") != _VERSION or data.get("job") != job:
        return None
    if any(type(data.get(name)) not in kinds for name, kinds in _KINDS.items()):
        return None
    if not 0 <= data["since"] < 1e9 or not 0 <= data["step"] < 1e12:
        return None
    beat = {name: data[name] for name in _KINDS if name != "worker"}
    for name in ("doing", "phase"):
        beat[name] = "".join(c for c in beat[name] if c.isprintable())
    return data["worker"], Beat(**beat, at=time.monotonic())
