"""Runs commands of ctl in processes of their own, without paying for the start of each.

A process that imported what a command needs (the zygote) forks for every command: TensorFlow takes
seconds to import and starts no thread before its first operation, so the child is what
``python -m ctl.train`` is after its imports. It runs as the main program of its process, to the end
of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paths import SUPPORT

# Reads requests, one JSON object per line, and answers each with one line.
_ZYGOTE = r"""
import ctypes, gc, importlib, json, os, resource, select, signal, sys, time

preload, blocked = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in blocked:
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse)
from absl import app, logging

logging.use_absl_handler()  # before TensorFlow is imported, as in a command
sys.path.insert(0, sys.argv[3])
for name in preload:
    importlib.import_module(name)
sys.path.remove(sys.argv[3])
gc.set_threshold(20_000, 10, 10)  # as in ctl_fixtures.py
app._init_callbacks.clear()  # TensorFlow asks to be called by app.run, which it never finds running
running, command = set(), None
print("ready", flush=True)
while command is None:
    line = sys.stdin.readline()
    if not line:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    request = json.loads(line)
    if "wait" in request:
        pid, deadline = request["wait"], time.monotonic() + request["timeout"]
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.005)
        if ended[0]:
            running.discard(pid)
        print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "running", flush=True)
        continue
    pid = os.fork()
    if pid:
        running.add(pid)
        print(pid, flush=True)
        continue
    command = request
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with the zygote
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(command["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    err = os.open(command["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    if command["namespace"]:
        with open("/run/netns/" + command["namespace"]) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    if command["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["file_limit"],) * 2)
    os.environ.update(command["environ"])
    sys.path[:0] = command["path"]
    sys.argv = command["argv"]
importlib.import_module(command["module"]).run()
"""


class Command:
    """A process that runs a command. ``stdout`` and ``stderr`` are what it has written so far."""

    def __init__(self, zygote: Zygote, pid: int, directory: Path):
        self.pid = pid
        self._zygote = zygote
        self._directory = directory
        self._exit_code: int | None = None

    @property
    def stdout(self) -> str:
        return (self._directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._directory / "stderr").read_text()

    def wait(self, timeout: float = 120) -> int:
        """The exit code; minus the number of the signal that killed it."""
        if self._exit_code is None:
            answer = self._zygote.ask({"wait": self.pid, "timeout": timeout})
            if answer == "running":
                self.signal(signal.SIGKILL)
                self._zygote.ask({"wait": self.pid, "timeout": 10})
                self._exit_code = -signal.SIGKILL
                raise AssertionError(f"still running after {timeout} s: {self.stderr[-2000:]}")
            self._exit_code = int(answer)
        return self._exit_code

    def signal(self, number: int) -> None:
        assert self._exit_code is None
        os.kill(self.pid, number)  # not reaped yet, so the pid is still its

    def until(self, text: str, stream: str = "stderr", timeout: float = 60) -> None:
        """Waits for ``text`` in what it writes."""
        deadline = time.monotonic() + timeout
        while text not in getattr(self, stream):
            if time.monotonic() > deadline or self._zygote.ended(self):
                raise AssertionError(f"{text!r} never came: {self.stderr[-2000:]}")
            time.sleep(0.005)


class Zygote:
    """See the module. ``preload``: modules to import, also those beside this one; ``blocked``:
    modules that must not be."""

    def __init__(self, directory: Path, preload: list[str], blocked: Sequence[str] = ()):
        self._directory = directory
        self._count = 0
        here = str(SUPPORT)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE, json.dumps(preload), json.dumps(blocked), here],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, request: dict) -> str:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def ended(self, command: Command) -> bool:
        if command._exit_code is None:
            answer = self.ask({"wait": command.pid, "timeout": 0})
            if answer != "running":
                command._exit_code = int(answer)
        return command._exit_code is not None

    def start(
        self,
        module: str,
        *flags: str,
        path: Sequence[Path] = (),
        file_limit: int | None = None,
        directory: Path | None = None,
        namespace: str | None = None,
        **environ: str,
    ) -> Command:
        """Starts ``python -m MODULE FLAGS`` (its function ``run``), in a network ``namespace`` if
        one is given; what it writes is in ``directory``."""
        self._count += 1
        directory = directory or self._directory / f"{self._count:03}"
        directory.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            (directory / stream).write_text("")
        request = {
            "module": module,
            "argv": [module, *map(str, flags)],
            "stdout": str(directory / "stdout"),
            "stderr": str(directory / "stderr"),
            "path": [str(p) for p in path],
            "file_limit": file_limit,
            "namespace": namespace,
            "environ": environ,
        }
        return Command(self, int(self.ask(request)), directory)

    def run(self, module: str, *flags: str, exit_code: int = 0, **kwargs) -> Command:
        """Runs a command to its end and checks its exit code."""
        command = self.start(module, *flags, **kwargs)
        got = command.wait()
        assert got == exit_code, f"exit code {got}, not {exit_code}: {command.stderr[-4000:]}"
        return command

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def one_line(command: Command) -> str:
    """What ``command`` says on stderr: exactly one line. It says nothing else."""
    assert command.stdout == ""
    (line,) = command.stderr.splitlines()
    return line


def last_line(command: Command) -> str:
    """What ``command`` says last; no traceback anywhere."""
    assert "Traceback" not in command.stderr
    return command.stderr.splitlines()[-1]
