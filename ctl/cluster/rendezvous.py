"""Waits until all workers of a job have started, before TensorFlow connects them."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time

from absl import logging

from ctl.cluster.members import Cluster
from ctl.errors import PeerError, UsageError

# Seconds until a warning names the missing workers, and between such warnings.
_QUIET_SECONDS = 10.0


def meet(cluster: Cluster, timeout: float) -> None:
    """Returns when every worker of ``cluster`` has called this.

    Call it before TensorFlow connects the workers: that cannot be interrupted, has no time limit on
    the chief, and keeps every Python thread from running. Workers greet each other on the ports
    that TensorFlow will use. Messages of other programs are ignored.

    Raises:
        PeerError: a worker is missing after ``timeout`` seconds, or this worker's port is taken.
            Warnings name who is missing from 10 s on.
        UsageError: a peer has another list of workers.
    """
    peers = set(range(len(cluster.workers))) - {cluster.index}
    spec = hashlib.sha256("\n".join(cluster.workers).encode()).hexdigest()
    host, _, port = cluster.workers[cluster.index].rpartition(":")
    came: set[int] = set()
    strangers: list[str] = []
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loopback = host in ("localhost", "127.0.0.1")
        try:
            listener.bind(("127.0.0.1" if loopback else "", int(port)))
        except OSError as error:
            raise PeerError(
                f"worker {cluster.index} cannot listen on {host}:{port}: {error.strerror}; choose "
                "another port, or free it"
            ) from error
        listener.listen()

        def welcome() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed: all have met
                    return
                with connection, contextlib.suppress(OSError, ValueError):
                    connection.settimeout(5.0)
                    index, theirs = connection.recv(200).decode().split()
                    if theirs != spec:
                        strangers.append(index)
                    connection.sendall(b"welcome")
                    came.add(int(index))

        threading.Thread(target=welcome, name="welcome", daemon=True).start()
        told: set[int] = set()
        why: dict[int, str] = {}
        began, said = time.monotonic(), 0.0
        try:
            while not (peers <= told and peers <= came):
                for peer in peers - told:
                    try:
                        _greet(cluster.workers[peer], f"{cluster.index} {spec}".encode())
                        told.add(peer)
                    except OSError as error:
                        why[peer] = error.strerror or str(error)
                if strangers:
                    raise UsageError(
                        f"worker {strangers[0]} has another list of workers: give all the same"
                    )
                missing = ", ".join(
                    f"worker {peer} at {cluster.workers[peer]} ({why.get(peer, 'silent')})"
                    for peer in sorted((peers - told) | (peers - came))
                )
                seconds = time.monotonic() - began
                if missing and seconds >= timeout:
                    raise PeerError(
                        f"worker {cluster.index}: gave up after {seconds:.0f} s "
                        f"(--startup_timeout) waiting for {missing}"
                    )
                if missing and seconds - said >= _QUIET_SECONDS:
                    said = seconds
                    logging.warning(
                        "worker %d waits for %s since %.0f s", cluster.index, missing, seconds
                    )
                time.sleep(0.05)
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()


def _greet(address: str, greeting: bytes) -> None:
    """Sends ``greeting``; raises OSError unless a worker of ctl answers."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=1.0) as connection:
        connection.settimeout(5.0)
        connection.sendall(greeting)
        if connection.recv(16) != b"welcome":
            raise OSError("another program answers there")


def unreachable(cluster: Cluster, patience: float = 0.0) -> dict[int, str]:
    """Returns the other workers that do not listen, and the reason for each.

    A frozen worker listens, since its kernel accepts connections. If all listen, the call tries
    again for up to ``patience`` seconds, because a failed worker may take a moment to end.
    """
    deadline = time.monotonic() + patience
    while not (why := _not_listening(cluster)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return why


def _not_listening(cluster: Cluster) -> dict[int, str]:
    why = {}
    for index, address in enumerate(cluster.workers):
        host, _, port = address.rpartition(":")
        if index != cluster.index:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError as error:
                why[index] = f"{address}: {error.strerror or error}"
    return why
