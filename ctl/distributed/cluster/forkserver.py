"""Starts the workers of a launcher as forks of one process that has imported TensorFlow.

The import takes seconds of a processor for each worker, at the start and after each loss. This is
what `multiprocessing` calls a fork server, for commands: a worker has the environment, the output
and the process group that a new process of the command would have. The server runs no operation of
TensorFlow, so that has no thread which a fork could lose; OpenBLAS, that of NumPy, ends its own
before a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ctl.errors import Preempted

_MODULE, _SERVERS = "ctl.train", "--strategy=parameter_server"
_STRATEGIES = {"--strategy=multi_worker", _SERVERS}
_ALSO = ("keras", "tensorflow", "ctl.data", "ctl.jobs.models", "ctl.logs.sinks", "ctl.loop")

_PROGRAM = f"from {__name__} import serve; serve()"

_IMPORT_SECONDS, _FORK_SECONDS = 120.0, 20.0
DEATH_SECONDS = 10.0  # after SIGKILL; a hung disk or device may hold a process for ever

_HELD = {signal.SIGTERM, signal.SIGINT}  # in the server, and in a fork until `_become_worker`

_LONGEST = 1 << 20  # bytes of a request; one that is too long for the socket is not sent at all


class Fork:
    """A process of a fork server: what `subprocess.Popen` is for a command. It waits for `begin`,
    and ends if this process ends before."""

    def __init__(self, pid: int, gate: int):
        self.pid, self._gate = pid, gate
        self._code: int | None = None

    def begin(self) -> None:
        """Lets it run the command."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._gate, b"0")
        os.close(self._gate)

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class ForkServer:
    """Forks workers of ``command``, a context manager.

    There is a server for ``python -m ctl.train`` with the strategy ``multi_worker`` or
    ``parameter_server``, on Linux without GPUs, whose libraries were not tried after a fork. It
    has the memory of one more process that has imported TensorFlow, much of which forks share.

    Args:
        command: a Python, its arguments, and those of the program.
        stopped: whether to wait for the server no longer, as after a signal.
    """

    def __init__(self, command: Sequence[str], stopped: Callable[[], object]):
        self._stopped = stopped
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        trains = [*command[1:3]] == ["-m", _MODULE] and not _STRATEGIES.isdisjoint(command)
        gpus = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
        if not trains or gpus or sys.platform != "linux":
            return
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                # The arguments are for those who look for a process by its command line.
                [command[0], "-c", _PROGRAM, str(other.fileno()), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        if not self._process:
            self._socket.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(
        self, environ: Mapping[str, str], out: int, err: int, pipe: int | None = None
    ) -> Fork | None:
        """Makes a process for a worker, in a process group of its own.

        Args:
            environ: its environment.
            out, err: file descriptors of its output.
            pipe: a file descriptor that it inherits; its number there is its ``CTL_ELASTIC``.

        Returns:
            None if there is no server, or it has failed. There is none from then on.

        Raises:
            Preempted: `stopped`.
        """
        if not self._process:
            return None
        try:
            if not self._is_ready:
                self._answer(_IMPORT_SECONDS)
                self._is_ready = True
            return self._fork(environ, [out, err] if pipe is None else [out, err, pipe])
        except (OSError, ValueError) as error:
            self._end()
            if self._stopped():
                raise Preempted("stopped by a signal before the workers had started") from error
            return None

    def _fork(self, environ: Mapping[str, str], descriptors: Sequence[int]) -> Fork:
        opens, gate = os.pipe()
        try:
            with _adopts_orphans():
                request = json.dumps(dict(environ)).encode()
                socket.send_fds(self._socket, [request], [opens, *descriptors])
                return Fork(self._answer(_FORK_SECONDS), gate)
        except BaseException:
            os.close(gate)
            raise
        finally:
            os.close(opens)

    def _answer(self, seconds: float) -> int:
        self._socket.settimeout(0.05)
        deadline = time.monotonic() + seconds
        while True:
            try:
                return int(self._socket.recv(100))
            except TimeoutError:
                if self._stopped() or time.monotonic() >= deadline:
                    raise

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk or a device holds it
                self._process.wait(DEATH_SECONDS)
            self._process = None
            self._socket.close()


@contextlib.contextmanager
def _adopts_orphans() -> Iterator[None]:
    """Makes this process the parent of descendants whose parents end meanwhile: prctl(2)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_child_subreaper, get_child_subreaper, before = 36, 37, ctypes.c_int()
    if prctl(get_child_subreaper, ctypes.byref(before), 0, 0, 0) or prctl(
        set_child_subreaper, 1, 0, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        prctl(set_child_subreaper, before, 0, 0, 0)


def serve() -> None:
    """The server; in each fork, the command."""
    from absl import app, logging

    from ctl.base import console

    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    launcher = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:1] = [path or os.getcwd() for path in sys.path[:1]]  # as of python -m
    logging.use_absl_handler()  # before TensorFlow is imported, as in a command
    given, errors = os.environ.get(console.LEVEL), _SERVERS not in sys.argv  # as `ctl.train` does
    os.environ[console.LEVEL] = console.log_level(given, errors)
    console.import_tensorflow()
    for name in (*_ALSO, _MODULE):
        importlib.import_module(name)
    # TensorFlow asks for a list of devices, in a worker that parses its flags after the import.
    app._init_callbacks.clear()  # type: ignore[attr-defined]
    gc.freeze()
    launcher.send(b"0")
    while True:
        request, descriptors, _, _ = socket.recv_fds(launcher, _LONGEST, 4)
        if not request:  # the launcher has ended
            os._exit(0)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # so the worker becomes a child of the launcher
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            for descriptor in (read, write, launcher.detach()):
                os.close(descriptor)
            _become_worker(json.loads(request), descriptors, before)
            return importlib.import_module(_MODULE).run()
        os.waitpid(between, 0)
        os.close(write)
        launcher.send(os.read(read, 100))  # nothing, if the worker has died before
        for descriptor in (read, *descriptors):
            os.close(descriptor)


def _become_worker(
    environ: Mapping[str, str], descriptors: Sequence[int], blocked: Collection[int]
) -> None:
    """Makes this process what a new one of the command is after its imports, once it may begin.
    It handles signals that have come meanwhile; those that are ``blocked`` stay so."""
    from ctl.base import signals
    from ctl.distributed.cluster import elastic

    opens, out, err, *pipe = descriptors
    if not os.read(opens, 1):
        os._exit(0)
    for descriptor, target in ((out, 1), (err, 2)):
        os.dup2(descriptor, target)
    for descriptor in (opens, out, err):
        os.close(descriptor)
    os.environ.update(environ)  # the launcher takes nothing away
    for descriptor in pipe:
        os.environ[elastic.VARIABLE] = str(descriptor)
    module = importlib.import_module(_MODULE)
    sys.argv = [str(module.__file__), *sys.argv[4:]]
    signals.begin()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
