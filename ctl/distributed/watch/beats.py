"""Beats: about once a second, every worker tells the others where it is.

Workers send datagrams to each other, on the UDP port with the number of TensorFlow's TCP port. So a
stopped chief silences only itself, no sender waits for a receiver, and no private name of
TensorFlow is needed. (The chief serves TensorFlow's coordination service, which blocks when the
chief is stopped.) Beats are signed, see `ctl.distributed.cluster.secret`. They inform messages and
flight records. In an elastic job, a worker without beats is asked if it runs, and the attempt ends
when one says that it gave up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import select
import socket
import time
import types
import typing
from typing import Any

from absl import logging

from ctl.distributed.cluster import addresses
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.cluster.secret import sign, verified

_VERSION = 2
_LARGEST = 1024  # bytes of a datagram

# What stands for a type in JSON, and its name for messages; an object for all others.
_IN_JSON: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    str: (str, "a string"),
    tuple: (list, "a list"),
}
_MOST_CHARACTERS = 300  # of a text
_hints = functools.cache(typing.get_type_hints)


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a worker is.

    Attributes:
        step: last global step that it finished.
        doing, phase: see `ctl.distributed.watch.record.Section`.
        waits: whether it is in a section where it may wait for others.
        since: seconds without progress.
        gave_up: "timed out" or "broke off" if a collective failed and it is about to end; else "".
    """

    step: int
    doing: str
    phase: str
    waits: bool
    since: float
    gave_up: str


@dataclasses.dataclass(frozen=True)
class Peer(Beat):
    """The last beat that was received from another worker, which has been silent for so many
    seconds since."""

    silent: float


class Beats:
    """Sends and receives the beats of one worker.

    Attributes:
        interval: seconds between beats while step, section and phase stay the same, see `interval`;
            a quarter of that while they change.
    """

    def __init__(self, cluster: Cluster):
        self.interval = interval(len(cluster.workers))
        self._index = cluster.index
        self._job = cluster.fingerprint[:16]
        self._others = {
            index: address
            for index, address in enumerate(cluster.workers)
            if index != cluster.index
        }
        self._resolved: dict[int, Any] = {}
        self._heard: dict[int, tuple[Beat, float]] = {}  # and when, by `time.monotonic`
        self._sent = -self.interval
        self._last: tuple[int, str, str] | None = None
        address = cluster.workers[cluster.index]
        try:
            self._socket = addresses.bound(address, socket.SOCK_DGRAM)
        except OSError as error:
            logging.warning(
                "cannot use the UDP port of %s, so flight records lack the other workers: %s",
                address,
                error,
            )
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @property
    def peers(self) -> dict[int, Peer]:
        """The other workers that were heard, by index. For any thread."""
        now = time.monotonic()
        return {
            worker: Peer(**vars(beat), silent=now - at)
            for worker, (beat, at) in sorted(self._heard.items())
        }

    def exchange(self, mine: Beat, seconds: float) -> None:
        """Sends ``mine`` if it is due, and receives for ``seconds``."""
        moved = self._last != (mine.step, mine.doing, mine.phase)
        if time.monotonic() - self._sent >= self.interval / (4 if moved else 1):
            self.send(mine)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                self._receive()

    def send(self, mine: Beat) -> None:
        """Sends ``mine`` to all other workers at once; drops what cannot be sent."""
        self._sent, self._last = time.monotonic(), (mine.step, mine.doing, mine.phase)
        beat = {"ctl": _VERSION, "job": self._job, "worker": self._index, **vars(mine)}
        datagram = sign(json.dumps(beat))
        for index, address in self._others.items():
            with contextlib.suppress(OSError):  # no listener or a full buffer
                if index not in self._resolved:
                    self._resolved[index] = addresses.resolve(address, self._socket)
                self._socket.sendto(datagram, self._resolved[index])

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # among them the answer of a closed port
            parsed = parse(self._socket.recv(_LARGEST + 1), self._job)
            if parsed and parsed[0] in self._others:
                self._heard[parsed[0]] = parsed[1], time.monotonic()


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
        if not isinstance(data, dict) or data.get("ctl") != _VERSION or data.get("job") != job:
            return None
        return from_json(int, data.get("worker"), "worker"), from_json(Beat, data, "beat")
    except (ValueError, RecursionError):
        return None


def from_json(kind: Any, value: Any, name: str) -> Any:
    """Returns ``value``, untrusted JSON that is called ``name``, as a ``kind``: a dataclass or the
    type of a field of one. Of a text, it keeps the first 300 printable characters, so that a
    terminal obeys none of them.

    Raises:
        ValueError: ``value`` is not of that kind; the message says why.
    """
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # with None
        return None if value is None else from_json(parts[0], value, name)
    if kind in (int, float):
        if type(value) not in (int, kind) or not 0 <= value <= 1e12:
            raise ValueError(f"{name} is not a number from 0 to 1e+12")
        return kind(value)
    accepted, what = _IN_JSON.get(typing.get_origin(kind) or kind, (dict, "an object"))
    if not isinstance(value, accepted):
        raise ValueError(f"{name} is not {what}")
    if kind is bool:
        return value
    if kind is str:
        return "".join(c for c in value if c.isprintable())[:_MOST_CHARACTERS]
    if accepted is list:
        return tuple(from_json(parts[0], one, name) for one in value)
    if not parts:  # a dataclass
        hints = _hints(kind).items()
        return kind(**{field: from_json(hint, value.get(field), field) for field, hint in hints})
    # A mapping, from texts or from the indices of workers.
    keys = [from_json(str, key, name) for key in value]
    if parts[0] is int and (wrong := [k for k in keys if not k.isdecimal() or len(k) > 7]):
        raise ValueError(f"there is no worker {wrong[0]}")
    pairs = zip(keys, value.values(), strict=True)
    return {parts[0](key): from_json(parts[1], one, f"{name}: {key}") for key, one in pairs}
