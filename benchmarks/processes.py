"""What the benchmarks share: processes that work on request, a progress line, facts of the machine.

Each thing that is measured runs in its own process, because its threads, buffers and memory would
slow the next one. Between requests a process waits on stdin and uses no processor time, so that the
measurements of several can be interleaved. A request is one line, its answer one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
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
        name: its name in messages.
        command: a script in `PEERS` and its arguments.
        environment: environment variables in addition to those of this process.
        within: a prefix of the command, e.g. ``["ip", "netns", "exec", "a"]``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
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
        """Sends a request."""
        with contextlib.suppress(BrokenPipeError):  # `answer` tells why it ended
            print(line, file=self._process.stdin, flush=True)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next answer. Raises `CtlError` if it ended or does not answer in ``seconds``."""
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
        """Kills the process and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of at least 95 % for the median, whatever the distribution is: the
    order statistics of the sign test (Conover 1999, "Practical Nonparametric Statistics", section
    3.2). ``values``: 6 at least."""
    n = len(values)
    outside = [sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = sum(2 * p <= 0.05 for p in outside)  # values left out on each side, and one more
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def progress(text: str) -> None:
    """Replaces the progress line on stderr; prints nothing if that is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine(load: float) -> dict[str, Any]:
    """Facts of this machine for the results; ``load`` is its load average before the run."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_before": load,
    }
