"""Links of a known latency and bandwidth: network namespaces of Linux, shaped by ``tc netem``.

Each has one virtual network card on a bridge; what it sends is delayed and its rate limited. Needs
root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from ctl.errors import UsageError


def run(*command: str) -> None:
    """Raises `UsageError` when ``command`` fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"{' '.join(command)}: {said[-1] if said else done.returncode}")


@contextlib.contextmanager
def namespaces(count: int, netem: Sequence[str]) -> Iterator[list[tuple[list[str], str]]]:
    """``count`` namespaces whose cards send as ``netem`` says, e.g. ``["delay", "2ms"]``.

    Yields:
        For each, what to put before a command to run it there, and its address. All are gone in the
        end.

    Raises:
        UsageError: not root, or a program is missing.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"shaped links need the program {program}: install iproute2")
    if os.geteuid():
        raise UsageError("shaped links need network namespaces: run this as root")
    mark = f"ctl{os.getpid() % 10**6}"
    subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
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
            run(*inside, "tc", "qdisc", "add", "dev", "card", "root", "netem", *netem)
            places.append((inside, address))
        yield places
