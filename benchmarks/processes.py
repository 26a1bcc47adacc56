"""What the benchmarks share: processes that work when they are told to, and how progress looks.

What is measured runs in a process of its own, since what one thing leaves behind (threads, buffers,
the memory allocator) would slow the next. Each waits on stdin, without using the processor, so that
the measurements of several can be interleaved. One line in, one line of JSON out.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ctl.errors import CtlError

PEERS = pathlib.Path(__file__).parent / "peers"


class Peer:
    """A process that answers each line on its stdin with one line of JSON.

    Args:
        name: what messages call it.
        command: a script of `PEERS` and its arguments.
        environment: variables beside those of this process.
        within: what to put before the command, e.g. ``["ip", "netns", "exec", "a"]``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        script, *arguments = command
        self._process = subprocess.Popen(
            [*within, sys.executable, PEERS / script, *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the answer will tell
            print(line, file=self._process.stdin, flush=True)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next line. Raises `CtlError` when it ends, or is silent for ``seconds``."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise CtlError(f"{self.name}: no answer in {seconds:g} s; see --timeout") from None
        if not line:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["silently"]
            errors = [line for line in said if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
            why = (errors or said)[-1].strip()[:200]
            raise CtlError(f"{self.name}: its process ended: {why}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def progress(text: str) -> None:
    """On one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine(load: float) -> dict[str, Any]:
    """What the numbers were measured on; ``load`` is that before the run."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_before": load,
    }
