"""A bad link between two network namespaces: packets take a while, and some are lost.

    python wire.py NAMESPACE0 ADDRESS0 NAMESPACE1 ADDRESS1 DELAY_SECONDS LOSS

What ``tc qdisc add … netem delay … loss …`` does, for kernels that are built without it: a TUN
device in each namespace, and this program between them. Prints "up"; ends when it is killed, and
its devices with it. Needs the rights of root.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
QUEUE = 10_000  # packets; more are dropped, as a router does


def tun(namespace: str, address: str) -> int:
    """A device with ``address`` in ``namespace``; its file descriptor."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
    for command in (f"address add {address}/24 dev wire", "link set wire up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def carry(ends: tuple[int, int], delay: float, loss: float) -> None:
    """For ever; every packet that comes in at one end goes out at the other."""
    randoms = random.Random(0)
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for end in select.select(ends, [], [], wait)[0]:
            packet = os.read(end, 65536)
            if randoms.random() >= loss and len(on_the_way) < QUEUE:
                other = ends[1] if end == ends[0] else ends[0]
                on_the_way.append((time.monotonic() + delay, other, packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, end, packet = on_the_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    ends = tun(*sys.argv[1:3]), tun(*sys.argv[3:5])
    print("up", flush=True)
    carry(ends, float(sys.argv[5]), float(sys.argv[6]))
