"""Ends this process if TensorFlow holds it because of another task.

It runs while TensorFlow connects the workers, and in a job with parameter servers. TensorFlow may
wait without end for a task that is frozen or dead. If it holds Python's lock meanwhile, no thread
of Python can give up. A second process can: it runs `main`. It names the tasks that do not answer,
and ends the first process by a signal whose handler is C's ``_exit``. The handler is called with
the number of the signal, so that is the exit code.

While TensorFlow connects them, it also does what SIGTERM and Ctrl-C ask for, if they come to the
process group, as those of a launcher do. TensorFlow takes SIGTERM for itself then, and does nothing
about it.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

# The first bytes of a gRPC client: the preface of HTTP/2 and an empty SETTINGS frame (RFC 9113,
# section 3.4). A server answers with a SETTINGS frame. The fourth byte of a frame is its type.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

_GIVE_UP = signal.SIGTRAP  # number 5, the exit code of `ctl.errors.PeerError`
_STOP = 42  # the exit code of `ctl.errors.Preempted`; a signal that is free, as the next
_CLOSE = _STOP + 1  # to the second process, which handles signals with smaller numbers before
_ASKING = signal.SIGTERM, signal.SIGINT
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv.pop(1))['main']()"
_TICK = 0.5
_QUIET_SECONDS = 10.0  # until a line names the tasks that do not answer; it doubles each time
_LOOK_SECONDS = 5.0  # before a line: each tick asks the tasks, to know who was gone first
_ANSWER_SECONDS = 2.0
_ENDING_SECONDS = 3.0  # a failed task may take so long to stop answering
LINGER_SECONDS = 2.0  # after the last line: who looks now must still find this task here


def ask_grpc(host: str | None, port: int | None, timeout: float) -> None:
    """Raises OSError unless a gRPC server answers. It answers with Python's lock held, too."""
    with socket.create_connection((host, port), timeout) as peer:
        peer.sendall(_HELLO)
        if peer.recv(9)[3:4] != _HELLO[-6:-5]:
            raise ConnectionError("what answers is not gRPC")


class Keeper:
    """The second process, a context manager. It ends with the context, or with this process.

    Args:
        doing: this task and what TensorFlow has been doing, for messages.
        peers: ``host:port`` of each other task that runs a gRPC server, by name.
        timeout: seconds without `beat` after which it ends this process with code 5.
        flag: the flag that sets ``timeout``, or "".
        patient: whether to end it only if a task does not answer.
        signals: numbers of those of `_ASKING` that end it with 42; others change nothing.
        frozen: seconds after which it ends this process because of a task that times out.
    """

    def __init__(
        self,
        doing: str,
        peers: Mapping[str, str],
        timeout: float,
        flag: str,
        *,
        patient: bool = False,
        signals: Sequence[int] = (),
        frozen: float | None = None,
    ):
        self._libc = ctypes.CDLL(None)
        self._libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        self._libc.signal.restype = ctypes.c_void_p
        handler = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        self._before = {n: self._libc.signal(n, handler) for n in (_GIVE_UP, _STOP)}
        watched = {"parent": os.getpid(), "doing": doing, "peers": dict(peers), "timeout": timeout}
        watched |= {"frozen_timeout": frozen, "flag": flag, "patient": patient}
        # Without the site's packages, it starts in 20 ms.
        program = [sys.executable, "-I", "-S", "-c", _PROGRAM, __file__]
        program.append(json.dumps([watched, [*signals]]))
        pipe = subprocess.PIPE
        # They stay pending until `_answer` handles them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ASKING, _CLOSE))
        try:
            self._process = subprocess.Popen(program, stdin=pipe, stdout=pipe)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beat(self) -> None:
        """Says that Python runs."""
        self._write(b".")

    def silent(self) -> str:
        """The tasks that do not answer, and why, see `_silent`; "" if all answer for 3 s."""
        assert self._process.stdout
        deadline, text = time.monotonic() + _ENDING_SECONDS, "\n"
        while text == "\n" and time.monotonic() < deadline:
            self._write(b"?")
            text = self._process.stdout.readline().decode()
        return text.rstrip()

    def _write(self, message: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is closed
            os.write(self._process.stdin.fileno(), message)

    def close(self) -> None:
        """Ends the second process. A signal that came to it before ends this one."""
        self._process.send_signal(_CLOSE)
        self._process.communicate()
        for number, handler in self._before.items():
            self._libc.signal(number, handler)


def _silent(
    peers: Mapping[str, str], patient: bool, missed: dict[str, int]
) -> tuple[str, set[str]]:
    """The tasks that do not answer, and why: the frozen ones, or else those that are gone for the
    longest time, since later ones may have given up as this one does, or else those that have not
    started TensorFlow. With patience, without workers that are gone, since they are started again.
    Also the names of the frozen ones.

    ``missed`` counts the calls in a row, up to this one, in which a task was gone.
    """

    def ask(name: str, address: str) -> OSError | None:
        host, _, port = address.rpartition(":")  # this program imports nothing of ctl
        try:
            ask_grpc(host.strip("[]"), int(port), _ANSWER_SECONDS)
        except OSError as error:
            return error
        return None

    with ThreadPoolExecutor(max(1, len(peers))) as threads:
        answers = dict(zip(peers, threads.map(ask, peers, peers.values()), strict=True))
    frozen, gone, early = {}, {}, {}
    for name, error in answers.items():
        refused = isinstance(error, ConnectionRefusedError)
        why = f"{name} (at {peers[name]}: {error and error.strerror or error})"
        if isinstance(error, TimeoutError):
            frozen[name] = why
        elif isinstance(error, ConnectionError) and not refused:
            early[name] = why
        elif error and not (patient and refused and name.startswith("worker")):
            gone[name] = why
        missed[name] = missed.get(name, 0) + 1 if name in gone else 0
    longest = max((missed[name] for name in gone), default=0)
    first = [why for name, why in gone.items() if missed[name] == longest]
    return ", ".join(frozen.values() or first or early.values()), {*frozen}


def main() -> None:
    """The second process."""
    watched, signals = json.loads(sys.argv[1])
    _answer(signals, watched["parent"], watched["doing"])
    watch(**watched)


def _answer(signals: Sequence[int], parent: int, doing: str) -> None:
    def stop(number: int, frame: object) -> None:
        signal.signal(_CLOSE, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # nobody may read it
            if select.select([], [2], [], 0.0)[1]:
                os.write(2, f"{signal.Signals(number).name}: {doing}; stopped\n".encode())
        if os.getppid() == parent:
            os.kill(parent, _STOP)
        os._exit(0)

    signal.signal(_CLOSE, lambda *_: os._exit(0))
    for number in _ASKING:
        signal.signal(number, stop if number in signals else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_ASKING, _CLOSE))


def watch(
    parent: int,
    doing: str,
    peers: Mapping[str, str],
    timeout: float,
    frozen_timeout: float | None,
    flag: str,
    patient: bool,
) -> None:
    """Ends the parent after the limit, unless it beats, closes stdin or ends before."""
    waited, quiet = 0.0, min(_QUIET_SECONDS, timeout)
    missed: dict[str, int] = {}
    since: dict[str, float] = {}  # when a task that is frozen was first asked in vain
    while True:
        # Ticks are counted, so that a job that was stopped as a whole has not waited.
        if select.select([sys.stdin], [], [], _TICK)[0]:
            message = os.read(sys.stdin.fileno(), 1000)
            if not message:
                return
            if b"?" in message:
                print(_silent(peers, patient, missed)[0], flush=True)
            waited, quiet, since = 0.0, min(_QUIET_SECONDS, timeout), {}
            continue
        waited += _TICK
        if waited < quiet - _LOOK_SECONDS and frozen_timeout is None:
            continue
        began = time.monotonic()
        silent, frozen = _silent(peers, patient, missed)
        since = {name: since.get(name, waited) for name in frozen}
        waited += time.monotonic() - began
        longest = waited - min(since.values(), default=waited)
        hopeless = frozen_timeout is not None and longest >= frozen_timeout
        if waited < quiet and not hopeless:
            continue
        late = waited >= quiet >= timeout
        ends = hopeless or late and (silent or not patient)
        if silent or not patient:
            how = f"{f' ({flag})' if flag and late else ''}; gave up" if ends else ""
            whom = f"waiting for {silent}" if silent else "all other tasks answer"
            with contextlib.suppress(Exception):  # nobody may read it, and the rest must go on
                print(
                    f"{doing} for {waited:.0f} s{how}; {whom}",
                    file=sys.stderr,
                    flush=True,
                )
        if ends:
            if select.select([sys.stdin], [], [], LINGER_SECONDS)[0]:
                continue  # it goes on after all, or has ended
            if os.getppid() == parent:
                os.kill(parent, _GIVE_UP)
            return
        quiet = min(2 * quiet, timeout) if quiet < timeout else waited + _QUIET_SECONDS
