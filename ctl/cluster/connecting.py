"""Limits the time in which TensorFlow connects the tasks of a job.

All tasks are here. If one of them freezes or dies at this moment, TensorFlow may wait without end,
and holds Python's lock, so that no thread can give up. A second process can: it runs `main`. It
names the tasks that do not answer, and ends the first process by a signal whose handler is C's
``_exit``. The handler is called with the number of the signal, so that is the exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

# The first bytes of a gRPC client: the preface of HTTP/2 and an empty SETTINGS frame (RFC 9113,
# section 3.4). A server answers with a SETTINGS frame. The fourth byte of a frame is its type.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

_SIGNAL = signal.SIGTRAP  # number 5, the exit code of `ctl.errors.PeerError`
_QUIET_SECONDS = 10.0  # until a line names the tasks that do not answer; it doubles each time
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv.pop(1))['main']()"
_ANSWER_SECONDS = 2.0
_LINGER_SECONDS = 2.0  # after the last line: who looks now must still find this task here


def ask_grpc(host: str | None, port: int | None, timeout: float) -> None:
    """Raises OSError unless a gRPC server answers. It answers with Python's lock held, too."""
    with socket.create_connection((host, port), timeout) as peer:
        peer.sendall(_HELLO)
        if peer.recv(9)[3:4] != _HELLO[-6:-5]:
            raise ConnectionError("what answers is not gRPC")


@contextlib.contextmanager
def limited(me: str, peers: Mapping[str, str], timeout: float) -> Iterator[None]:
    """A context that ends this process with code 5 if it is not left after ``timeout`` seconds.

    Args:
        me: name of this task, for messages.
        peers: ``host:port`` of each other task that runs a gRPC server, by name.
        timeout: seconds.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = libc.signal(_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
    # Without the site's packages, it starts in 20 ms.
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM, __file__]
    watcher = subprocess.Popen(
        [*program, me, str(timeout), json.dumps(dict(peers))], stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()
        libc.signal(_SIGNAL, before)


def _silent(peers: Mapping[str, str]) -> str:
    """The tasks that do not answer, and why."""
    found = []
    for name, address in peers.items():
        host, _, port = address.rpartition(":")
        try:
            ask_grpc(host, int(port), _ANSWER_SECONDS)
        except OSError as error:
            found.append(f"{name} (at {address}: {error.strerror or error})")
    return ", ".join(found) or "tasks that all answer"


def main() -> None:
    """Ends the parent after the limit, unless it closes stdin or ends before."""
    me, timeout, peers = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
    began, quiet = time.monotonic(), min(_QUIET_SECONDS, timeout)
    while not select.select([sys.stdin], [], [], max(0.0, began + quiet - time.monotonic()))[0]:
        silent = _silent(peers)
        if quiet >= timeout:
            sys.stderr.write(
                f"{me}: TensorFlow has not connected the job after {timeout:.0f} s "
                f"(--startup_timeout); waiting for {silent}\n"
            )
            sys.stderr.flush()
            time.sleep(_LINGER_SECONDS)
            os.kill(os.getppid(), _SIGNAL)
            return
        sys.stderr.write(f"{me}: TensorFlow connects the job since {quiet:.0f} s; {silent}\n")
        sys.stderr.flush()
        quiet = min(2 * quiet, timeout)
