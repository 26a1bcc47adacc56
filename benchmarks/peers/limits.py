"""Limits of an all-reduce on this machine: ``copy``, memory to memory, and ``tcp``, over loopback.

echo '{"size": 1048576, "iterations": 3}' | python benchmarks/peers/limits.py tcp
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from lines import serve

_CHUNK = 1 << 20  # bytes of one call to receive


def copy(size: int) -> Callable[[], None]:
    """A function that copies ``size`` bytes, always the same buffers."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return lambda: np.copyto(target, source)


def tcp() -> Callable[[int], Callable[[], None]]:
    """Makes functions that send a number of bytes to another process and wait for its answer, one
    byte."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        if os.fork() == 0:
            _acknowledge(socket.create_connection(listener.getsockname()))
            os._exit(0)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(size: int) -> Callable[[], None]:
        data = bytes(size)

        def send() -> None:
            connection.sendall(size.to_bytes(8, "little"))
            connection.sendall(data)
            connection.recv(1)

        return send

    return prepare


def _acknowledge(connection: socket.socket) -> None:
    """Receives until the other process closes the connection or ends."""
    buffer = memoryview(bytearray(_CHUNK))
    while header := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(header, "little")
        while left:
            left -= connection.recv_into(buffer, min(left, _CHUNK))
        connection.sendall(b".")


def build() -> tuple[dict[str, Any], Any]:
    prepare = {"copy": lambda: copy, "tcp": tcp}[sys.argv[1]]()

    def run(size: int, iterations: int) -> dict[str, Any]:
        action = prepare(size)
        ready, done = [], []
        for _ in range(iterations):
            ready.append(time.time())
            start = time.perf_counter()
            action()
            done.append(ready[-1] + time.perf_counter() - start)
        return {"ready": ready, "done": done, "call": [0.0] * iterations, "wrong": 0}

    return {"replicas": 1, "device": sys.argv[1]}, run


if __name__ == "__main__":
    serve(build)
