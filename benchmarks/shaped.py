"""Links of a known bandwidth and latency: network namespaces of Linux, shaped by ``tc``.

Each namespace has one virtual network card on a bridge. What the card sends is limited in rate
(tbf) or, with a delay, delayed and limited (netem). Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from ctl import launch
from ctl.errors import UsageError

_MADE = itertools.count()


def run(*command: str) -> None:
    """Runs ``command``. Raises `UsageError` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"{' '.join(command)}: {said[-1] if said else done.returncode}")


@contextlib.contextmanager
def namespaces(count: int, mbit: float, delay_ms: float) -> Iterator[list[tuple[list[str], str]]]:
    """Makes ``count`` namespaces, and deletes them on exit.

    Args:
        count: how many.
        mbit: the most that each card sends, in megabits per second.
        delay_ms: the delay of each packet, in milliseconds.

    Yields:
        For each namespace, a prefix that runs a command in it, and its IP address.

    Raises:
        UsageError: the user is not root, a program is missing, or ``delay_ms`` is not 0 and the
            kernel has no netem.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"shaped links need the program {program}: install iproute2")
    if os.geteuid():
        raise UsageError("shaped links need network namespaces: run this as root")
    number = 7 * os.getpid() + next(_MADE)  # Linux takes its time to delete those of the last call
    mark = f"ctl{number % 10**7}"
    subnet = f"10.{200 + number % 50}.{number // 50 % 250}"
    with contextlib.ExitStack() as stack:

        def made(*command: str, undo: Sequence[str]) -> None:
            run(*command)
            stack.callback(subprocess.run, undo, capture_output=True, check=False)

        bridge = f"{mark}b"
        made("ip", "link", "add", bridge, "type", "bridge", undo=["ip", "link", "del", bridge])
        run("ip", "link", "set", bridge, "up")
        places = []
        for index in range(count):
            name, outside, address = f"{mark}-{index}", f"{mark}v{index}", f"{subnet}.{index + 1}"
            inside = ["ip", "netns", "exec", name]
            made("ip", "netns", "add", name, undo=["ip", "netns", "del", name])
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", "card", "netns", name)
            run("ip", "link", "set", outside, "master", bridge, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", "card")
            run(*inside, "ip", "link", "set", "card", "up")
            run(*inside, "tc", "qdisc", "add", "dev", "card", "root", *_discipline(mbit, delay_ms))
            places.append((inside, address))
        yield places


def addresses(places: Sequence[tuple[list[str], str]]) -> list[str]:
    """``host:port`` of a worker in each of `namespaces`, with free ports."""
    free = launch.cluster(len(places))["worker"]
    ports = [address.rpartition(":")[2] for address in free]
    return [f"{host}:{port}" for (_, host), port in zip(places, ports, strict=True)]


def _discipline(mbit: float, delay_ms: float) -> list[str]:
    if delay_ms:
        # A queue of 10,000 packets, because a full queue drops packets.
        return ["netem", "delay", f"{delay_ms:g}ms", "rate", f"{mbit:g}mbit", "limit", "10000"]
    # What a card may send at once after a pause: what it sends in 0.5 ms, or small messages would
    # cost nothing; but more than one packet of Ethernet.
    burst = max(2000, round(mbit * 1e6 / 8 * 0.5e-3))
    return ["tbf", "rate", f"{mbit:g}mbit", "burst", f"{burst}b", "latency", "400ms"]


def limit(places: Sequence[tuple[list[str], str]], mbit: float) -> None:
    """Changes the rate of the cards of `namespaces` that have no delay."""
    for inside, _ in places:
        run(*inside, "tc", "qdisc", "replace", "dev", "card", "root", *_discipline(mbit, 0.0))
