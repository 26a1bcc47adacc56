"""Measures the way to another worker: names, datagrams, round trips, clocks and bandwidth."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import socket
import statistics
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ctl.doctor.machine import resolve
from ctl.doctor.peers import Peers
from ctl.doctor.program import say
from ctl.doctor.report import Link

SMALL, LARGE = 100, 5  # datagrams that are sent
_PAUSE_SECONDS = 0.002  # between two of them
_HEARD_SECONDS = 1.0  # until the last of them has arrived
_ROUND_TRIPS, _ROUND_TRIP_SECONDS = 100, 2.0  # at most
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 29
_RATE_SECONDS, _LONG_ENOUGH_SECONDS = 0.6, 0.2  # for all sizes, and for one
_STAGE_SECONDS = 45.0  # for the slowest worker

_HEADERS = 28  # bytes of IP and UDP before a datagram
_LARGEST_DATAGRAM = 65_507
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # of <linux/sockios.h>


def measure(peers: Peers) -> dict[int, Link]:
    """Measures the way to every other worker. All doctors call it at once.

    In each round, every worker measures with one other: the two of a round add up to the same
    number, modulo the number of workers. So no two measurements share a link.
    """
    me, count = peers.cluster.index, len(peers.cluster.workers)
    with ThreadPoolExecutor(32) as threads:  # a name server may be slow
        described = threads.map(functools.partial(_described, peers), peers.others)
        links = dict(zip(peers.others, described, strict=True))
    for number in range(count):
        worker = (number - me) % count
        reached = worker != me and peers.reaches(worker)
        if worker != me:
            say(f"measures the way to worker {worker}")
        for name, part in (("near", _near), ("rates", _rates)):
            peers.exchange(f"{name} {number}", None, _STAGE_SECONDS)
            if reached and peers.reaches(worker):
                found = part(peers, worker, links[worker])
                links[worker] = dataclasses.replace(links[worker], **found)
    return links


def _described(peers: Peers, worker: int) -> Link:
    host = peers.cluster.workers[worker].rpartition(":")[0]
    addresses, why = resolve(host)
    address = addresses[0] if addresses else ""
    own = _own_address(address)
    return Link(
        address=address,
        unresolved=why,
        own=own,
        device=device_of(own),
        refused=peers.refused[worker],
        stranger=worker in peers.strangers,
        came=worker in peers.came,
    )


def _own_address(address: str) -> str:
    """The address of this machine on the way to ``address``; "" if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((address, 9))  # sends nothing
        except OSError:
            return ""
        return way.getsockname()[0] if address else ""


def device_of(address: str) -> str:
    """The network device that has this IP address, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = _ask_device(any_socket, name, _SIOCGIFADDR)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _ask_device(any_socket: socket.socket, name: str, question: int) -> bytes:
    return fcntl.ioctl(any_socket.fileno(), question, struct.pack("256s", name.encode()))


def _mtu_of(device: str) -> int | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return struct.unpack("i", _ask_device(any_socket, device, _SIOCGIFMTU)[16:20])[0]
        except OSError:
            return None


def _near(peers: Peers, worker: int, link: Link) -> dict[str, Any]:
    """What takes little of the link: round trips, the clock and datagrams."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found |= _round_trips(lambda: peers.ask(worker, "ping"))
        found |= _datagrams(peers, worker, link)
    return found


def _round_trips(ping: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of round trips, and seconds between the clocks, as NTP finds them: the answer
    was sent at most half of a round trip before or after the middle (RFC 5905, section 8)."""
    trips: list[tuple[float, float]] = []
    end = time.monotonic() + _ROUND_TRIP_SECONDS
    while len(trips) < _ROUND_TRIPS and (not trips or time.monotonic() < end):
        before, began = time.time(), time.perf_counter()
        theirs = ping()
        taken = time.perf_counter() - began
        trips.append((taken, theirs - before - taken / 2))
    shortest, offset = min(trips)
    return {
        "latency": 1e3 * shortest,
        "typical": 1e3 * statistics.median(taken for taken, _ in trips),
        "clock": max(0.0, abs(offset) - shortest / 2),
        "ahead": offset > 0,
    }


def _datagrams(peers: Peers, worker: int, link: Link) -> dict[str, Any]:
    """How many datagrams arrive, small ones and such that fill a packet of the device."""
    mtu = _mtu_of(link.device)
    size = min(mtu - _HEADERS, _LARGEST_DATAGRAM) if mtu else 0
    for number in range(SMALL + (LARGE if size else 0)):
        with contextlib.suppress(OSError):  # a firewall of this machine may refuse it
            peers.send_datagram(link.address, worker, size if number >= SMALL else 0)
        time.sleep(_PAUSE_SECONDS)
    deadline = time.monotonic() + _HEARD_SECONDS
    while True:
        heard, large = peers.ask(worker, "heard")
        whole = heard >= SMALL and (large >= LARGE or not size)
        if whole or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    found = {"sent": SMALL, "heard": heard, "mtu": mtu}
    return found | {"large_heard": large if size else None}


def _rates(peers: Peers, worker: int, link: Link) -> dict[str, Any]:
    """The bandwidth in both directions, which the worker with the lower index measures."""
    if worker < peers.cluster.index:
        return {}
    found = {"send": 0.0, "receive": 0.0}
    with contextlib.suppress(OSError):
        for name, do in (("send", "take"), ("receive", "give")):
            found[name] = _megabytes(functools.partial(peers.seconds_of, worker, do))
    return found


def _megabytes(seconds_of: Callable[[int], float]) -> float:
    """Megabytes per second, the best of sizes that double until one takes long enough."""
    size, best, end = _FIRST_BYTES, 0.0, time.monotonic() + _RATE_SECONDS
    while time.monotonic() < end:
        seconds = seconds_of(size)
        best = max(best, size / seconds / 1e6)
        if seconds < _LONG_ENOUGH_SECONDS and size < _MOST_BYTES:
            size *= 2
    return best
