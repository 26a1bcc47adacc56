"""Waits until all workers of a job have started, before TensorFlow connects them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from absl import logging

from ctl.distributed.cluster import elastic
from ctl.distributed.cluster.addresses import split
from ctl.distributed.cluster.handshake import HandshakeServer, handshake
from ctl.distributed.cluster.members import Cluster
from ctl.errors import PeerError, UsageError

# Seconds until a warning names the missing tasks, and between such warnings.
_QUIET_SECONDS = 10.0

# A worker that has found another list of addresses still answers for so long, so that its peers
# find that, too.
_STAY_SECONDS = 2.0


class Waiting:
    """Limits the wait of the task ``me`` for others at the start to ``timeout`` seconds."""

    def __init__(self, me: str, timeout: float):
        self._me, self._timeout = me, timeout
        self._began, self._said = time.monotonic(), 0.0

    def check(self, missing: str) -> None:
        """Logs whom this task waits for, from 10 s on. Raises `PeerError` after the limit."""
        seconds = time.monotonic() - self._began
        if seconds >= self._timeout:
            raise PeerError(
                f"{self._me}: gave up after {seconds:.0f} s (--startup_timeout) waiting for "
                f"{missing}"
            )
        if seconds - self._said >= _QUIET_SECONDS:
            self._said = seconds
            logging.warning("%s has waited %.0f s for %s", self._me, seconds, missing)


class Frozen:
    """Ends the wait of the task ``me`` of an elastic job for a task that is frozen."""

    def __init__(self, me: str):
        self._me = me
        self._since: dict[str, float] = {}  # when it was first asked in vain, by task

    @contextlib.contextmanager
    def patient_with(self, task: str) -> Iterator[None]:
        """``task`` is asked inside. Raises `PeerError` if it has timed out for 10 s by now."""
        since = self._since.pop(task, time.monotonic())
        try:
            yield
        except TimeoutError as error:
            self._since[task] = since
            seconds = time.monotonic() - since
            if seconds >= elastic.FROZEN_SECONDS and elastic.is_elastic():
                raise PeerError(
                    f"{self._me}: gave up after {seconds:.0f} s: {task} does not answer"
                ) from error
            raise


def meet(cluster: Cluster, timeout: float) -> None:
    """Returns when every worker of ``cluster`` has called this.

    Call it before TensorFlow connects the workers: that cannot be interrupted, has no time limit on
    the chief, and keeps every Python thread from running. Workers greet each other on the ports
    that TensorFlow will use. Messages of other programs are ignored.

    Raises:
        PeerError: a worker is missing after ``timeout`` seconds, or this worker's port is taken.
            Warnings name who is missing from 10 s on.
        UsageError: a peer has another list of workers, or the index of another worker.
    """
    peers = {f"worker {index}": address for index, address in enumerate(cluster.workers)}
    me = f"worker {cluster.index}"
    came: set[str] = set()
    ended = threading.Event()
    with HandshakeServer(peers.pop(me), me, cluster.fingerprint, peers) as door:

        def welcome() -> None:
            while not ended.is_set():
                for name, connection in door.arrivals(0.05):
                    connection.close()
                    came.add(name)

        thread = threading.Thread(target=welcome, name="welcome", daemon=True)
        thread.start()
        untold, why = set(peers), dict.fromkeys(peers, "silent")
        frozen = Frozen(me)
        waiting = Waiting(me, timeout)
        try:
            while untold or not came.issuperset(peers):
                for peer in sorted(untold):
                    try:
                        with frozen.patient_with(f"{peer} at {peers[peer]}"):
                            handshake(peers[peer], peer, me, cluster.fingerprint).close()
                        untold.remove(peer)
                        why[peer] = "silent"
                    except OSError as error:
                        why[peer] = error.strerror or str(error)
                why |= dict.fromkeys(door.differing, "has another list of addresses")
                missing = ", ".join(
                    f"{peer} at {address} ({why[peer]})"
                    for peer, address in peers.items()
                    if peer in untold or peer not in came
                )
                if missing:
                    waiting.check(missing)
                time.sleep(0.05)
        except UsageError:
            time.sleep(_STAY_SECONDS)
            raise
        finally:
            ended.set()
            thread.join()


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
    def ask(address: str) -> str:
        try:
            socket.create_connection(split(address), timeout=1.0).close()
        except OSError as error:
            return f"{address}: {error.strerror or error}"
        return ""

    others = {i: address for i, address in enumerate(cluster.workers) if i != cluster.index}
    with ThreadPoolExecutor(min(64, len(others) + 1)) as threads:  # many may be cut off at once
        answers = zip(others, threads.map(ask, others.values()), strict=True)
        return {index: why for index, why in answers if why}
