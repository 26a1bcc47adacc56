"""What the benchmarks share: processes that work on request, their turns, and what is shown.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ctl.errors import CtlError, UsageError

T = TypeVar("T")
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

    def ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        """Sends ``request`` as JSON, and returns the `answer`."""
        self.say(json.dumps(request))
        return self.answer(seconds)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the process and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


def ask_all(peers: Sequence[Peer], seconds: float, **request: Any) -> list[dict[str, Any]]:
    """The answers of ``peers`` that work on ``request`` together."""
    for peer in peers:
        peer.say(json.dumps(request))
    return [peer.answer(seconds) for peer in peers]


def tasks(workers: Sequence[str]) -> list[dict[str, str]]:
    """The environment that makes processes the ``workers`` (host:port) of one job."""
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}}
            )
        }
        for index in range(len(workers))
    ]


def in_turn(items: Iterable[T], number: int) -> list[T]:
    """``items`` in the order of this round. In each round another one is the first, so that a
    disturbance of the machine meets all."""
    order = list(items)
    shift = number % max(1, len(order))
    return order[shift:] + order[:shift]


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises `UsageError` if one of ``names`` is not ``known``. ``what``: how the error begins."""
    choices = list(known)
    for name in names:
        if name not in choices:
            raise UsageError(f"{what} {name!r}: the choices are {', '.join(choices)}")


def write(path: str | None, results: dict[str, Any], say: bool = True) -> None:
    """Writes what --json asked for, if anything."""
    if path:
        pathlib.Path(path).write_text(json.dumps(results, indent=1))
        if say:
            print(f"json: {path}")


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
