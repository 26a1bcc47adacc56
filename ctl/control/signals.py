"""Signals that ask a training to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ctl.errors import UsageError


class StopRequested(Exception):
    """A signal arrived. Unwinds the stack to where the state can be saved."""


class Signals:
    """Notes SIGTERM and SIGINT, so that the loop can stop between two calls."""

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def arrived(self) -> bool:
        """Whether this process was asked to stop."""
        return self._number is not None

    @property
    def name(self) -> str:
        """Name of the signal for a message."""
        if self._number is None:
            return "another worker's signal"
        return signal.Signals(self._number).name

    @contextlib.contextmanager
    def noted(self, *, last: bool = False) -> Iterator[None]:
        """While inside, notes the first signal. A second SIGINT raises `KeyboardInterrupt`.

        Args:
            last: if a signal arrived, ignore SIGTERM afterwards. The process is about to end, and a
                scheduler that repeats SIGTERM must not change its exit code.

        Raises:
            UsageError: entered outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be handled in the main thread only")
        self._number = None

        def note(number: int, frame: Any) -> None:
            if self._number == number == signal.SIGINT:
                raise KeyboardInterrupt
            self._number = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            if last and self.arrived:
                before[signal.SIGTERM] = signal.SIG_IGN
            for number, handler in before.items():
                signal.signal(number, handler)
