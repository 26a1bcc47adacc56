"""Beats: about once a second, every worker tells the others where it is.

Workers send datagrams to each other, on the UDP port with the number of TensorFlow's TCP port. So a
stopped chief silences only itself, no sender waits for a receiver, and no private name of
TensorFlow is needed. (The chief serves TensorFlow's coordination service, which blocks when the
chief is stopped.) Beats are signed, see `ctl.distributed.cluster.secret`. They inform messages and
flight records, and end no process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import socket
import time
from typing import Any

from absl import logging

from ctl.distributed.cluster.handshake import interface
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.cluster.secret import sign, verified

_VERSION = 2
_LARGEST = 1024  # bytes of a datagram

_KINDS = {
    "worker": (int,),
    "step": (int,),
    "doing": (str,),
    "phase": (str,),
    "waits": (bool,),
    "since": (int, float),
    "gave_up": (str,),
}


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a worker was.

    Attributes:
        step: last global step that it finished.
        doing, phase: see `ctl.distributed.watch.section.Section`.
        waits: whether it was in a section where it may wait for others.
        since: seconds without progress.
        gave_up: "timed out" or "broke off" if a collective failed and it is about to end; else "".
        at: when the beat was received (`time.monotonic` of the receiver).
    """

    step: int
    doing: str
    phase: str
    waits: bool
    since: float
    gave_up: str
    at: float


class Beats:
    """Sends and receives the beats of one worker.

    Attributes:
        peers: the last beat received from each other worker.
        interval: seconds between beats while step, section and phase stay the same, see `interval`;
            a quarter of that while they change.
    """

    def __init__(self, cluster: Cluster):
        self.peers: dict[int, Beat] = {}
        self.interval = interval(len(cluster.workers))
        self._index = cluster.index
        self._job = cluster.fingerprint[:16]
        self._others = {
            index: address
            for index, address in enumerate(cluster.workers)
            if index != cluster.index
        }
        self._resolved: dict[int, tuple[str, int]] = {}
        self._sent = -self.interval
        self._last: dict[str, Any] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        host, _, port = cluster.workers[cluster.index].rpartition(":")
        try:
            self._socket.bind((interface(host), int(port)))
        except OSError as error:
            logging.warning(
                "UDP port %s: %s; a flight record will not know where others are", port, error
            )

    def exchange(self, mine: dict[str, Any], seconds: float) -> None:
        """Sends ``mine`` (a `Beat` without ``at``) if it is due, and receives for ``seconds``."""
        moved = any(mine[name] != self._last.get(name) for name in ("step", "doing", "phase"))
        if time.monotonic() - self._sent >= self.interval / (4 if moved else 1):
            self.send(mine)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                self._receive()

    def send(self, mine: dict[str, Any]) -> None:
        """Sends ``mine`` to all other workers at once; drops what cannot be sent."""
        self._sent, self._last = time.monotonic(), mine
        beat = {"ctl": _VERSION, "job": self._job, "worker": self._index, **mine}
        datagram = sign(json.dumps(beat))
        for index, address in self._others.items():
            with contextlib.suppress(OSError):  # no listener or a full buffer
                if index not in self._resolved:
                    host, _, port = address.rpartition(":")
                    self._resolved[index] = (socket.gethostbyname(host), int(port))
                self._socket.sendto(datagram, self._resolved[index])

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # among them the answer of a closed port
            parsed = parse(self._socket.recv(_LARGEST + 1), self._job)
            if parsed and parsed[0] in self._others:
                self.peers[parsed[0]] = parsed[1]


def interval(workers: int) -> float:
    """Returns the seconds between two beats, at least 1.

    Above 100 workers it grows, so that each sends at most 100 datagrams a second, or 400 while it
    makes progress.
    """
    return max(1.0, workers / 100)


def parse(datagram: bytes, job: str) -> tuple[int, Beat] | None:
    """Returns the worker and the beat in a datagram, or None if it is not a beat of ``job``.

    Other programs may send datagrams too, so the signature and every field are checked.
    """
    text = verified(datagram) if len(datagram) <= _LARGEST else None
    try:
        data = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("ctl") != _VERSION or data.get("job") != job:
        return None
    if any(type(data.get(name)) not in kinds for name, kinds in _KINDS.items()):
        return None
    if not 0 <= data["since"] < 1e9 or not 0 <= data["step"] < 1e12:
        return None
    beat = {name: data[name] for name in _KINDS if name != "worker"}
    for name in ("doing", "phase", "gave_up"):
        beat[name] = "".join(c for c in beat[name] if c.isprintable())
    return data["worker"], Beat(**beat, at=time.monotonic())
