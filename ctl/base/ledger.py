"""On which account each second of this process goes: one at a time, so that they add up.

The loop, the checkpoints and what waits for workers say what they do by `Ledger.spend`, once per
call of the loop, not per step. `ctl.logs.ledger` writes the accounts to the directory of a run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Account = Literal["start", "compile", "input", "steps", "evaluation", "saving", "waiting", "other"]


@dataclass(frozen=True)
class Snapshot:
    """The accounts at a moment.

    Attributes:
        seconds: by account.
        first, step: the loop has trained from ``first`` to ``step``; None before it has begun.
        inspected: seconds of inspected steps without their input, and of what was exposed
            communication there, see `ctl.Inspection`; (0, 0) without an inspection.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    first: int | None = None
    step: int | None = None
    inspected: tuple[float, float] = (0.0, 0.0)


class Ledger:
    """The accounts of a process. The main thread spends; any thread may `read`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin()

    def begin(self, age: float = 0.0) -> None:
        """Begins anew, with ``age`` seconds of "start"."""
        with self._lock:
            self._seconds: dict[str, float] = {"start": age}
            self._account: str = "start"
            self._since = time.perf_counter()
            self._first: int | None = None
            self._step: int | None = None
            self._inspected = 0.0, 0.0

    @contextlib.contextmanager
    def spend(self, account: Account) -> Iterator[None]:
        """Puts the time inside on ``account``, but for what is spent otherwise inside."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer = self._turn_to(account)
        try:
            yield
        finally:
            self._turn_to(outer)

    def move(self, source: Account, target: Account, seconds: float) -> None:
        """Moves ``seconds`` that were on ``source``, as one learns afterwards."""
        with self._lock:
            self._seconds[source] = self._seconds.get(source, 0.0) - seconds
            self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def reach(self, step: int) -> None:
        """The loop is at ``step``. Once it has run a step, what nobody spends is "other"; until
        then, it is "start"."""
        with self._lock:
            if self._step is None or step < self._step:  # it begins, or was restored
                self._first = step
            elif step > self._step and self._account == "start":
                self._pass("other")
            self._step = step

    def inspect(self, seconds: float, exposed: float) -> None:
        """Adds inspected steps: their ``seconds`` without input, and the ``exposed`` ones among
        them."""
        with self._lock:
            self._inspected = self._inspected[0] + seconds, self._inspected[1] + exposed

    def read(self) -> Snapshot:
        """The accounts now."""
        with self._lock:
            self._pass(self._account)
            return Snapshot(dict(self._seconds), self._first, self._step, self._inspected)

    def _turn_to(self, account: str) -> str:
        with self._lock:
            outer = self._account
            self._pass(account)
        return outer

    def _pass(self, account: str) -> None:
        now = time.perf_counter()
        seconds = self._seconds.get(self._account, 0.0) + now - self._since
        self._seconds[self._account] = seconds
        self._account, self._since = account, now


LEDGER = Ledger()  #: of this process


def process_age() -> float:
    """Seconds since this process was started, by the kernel of Linux; elsewhere 0."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        # proc(5): the 22nd field, in ticks since the boot. The name in parentheses may have spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return 0.0
