"""Signals that ask a training to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ctl.distributed.watch import watchdog
from ctl.errors import UsageError

# A call of the loop takes about half a second. A call that takes longer than this may hang.
_GRACE_SECONDS = 1.0


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
        """While inside, notes the last signal. A second SIGINT raises `KeyboardInterrupt`. If the
        main thread is in a call of TensorFlow that does not return for a second, the second SIGINT
        ends the process with code 130.

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
            self._number = number
            if number == signal.SIGINT:
                interrupts.handle()

        counted = _Interrupts.active
        with contextlib.nullcontext(counted) if counted else _Interrupts() as interrupts:
            numbers = signal.SIGTERM, signal.SIGINT
            before = {number: signal.signal(number, note) for number in numbers}
            try:
                yield
            finally:
                if last and self.arrived:
                    before[signal.SIGTERM] = signal.SIG_IGN
                for number, handler in before.items():
                    signal.signal(number, handler)


class _Interrupts:
    """Counts SIGINTs. While the main thread is in a call of TensorFlow, Python calls no handler,
    and merges several signals into one. But it writes one byte per signal to a pipe at once."""

    active: _Interrupts | None = None

    def __enter__(self) -> _Interrupts:
        self._handled = self._arrived = 0
        self._over = threading.Event()  # `KeyboardInterrupt` was raised, or the context has ended
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The previous file descriptor may be asyncio's, for instance.
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="ctl_interrupts", daemon=True).start()
        _Interrupts.active = self
        return self

    def __exit__(self, *error: object) -> None:
        _Interrupts.active = None
        signal.set_wakeup_fd(self._before)
        self._over.set()
        os.write(self._writer, b"\0")  # ends the thread
        os.close(self._writer)

    def handle(self) -> None:
        """Raises `KeyboardInterrupt`, unless this is the first SIGINT. For the handler."""
        self._handled += 1
        if max(self._handled, self._arrived) > 1:
            self._over.set()
            raise KeyboardInterrupt

    @classmethod
    def forget(cls) -> None:
        """Leaves the pipe to the parent. For a forked process, which gets Ctrl-C separately."""
        if cls.active:
            signal.set_wakeup_fd(-1)
            cls.active._writer = os.open(os.devnull, os.O_WRONLY)

    def _watch(self) -> None:
        while 0 not in (numbers := os.read(self._reader, 64)):
            self._arrived += numbers.count(signal.SIGINT)
            if self._before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._before, numbers)
            if self._arrived > 1 and not self._over.wait(_GRACE_SECONDS):
                watchdog.leave(130, "interrupted")  # as commands do for `KeyboardInterrupt`
        os.close(self._reader)


os.register_at_fork(after_in_child=_Interrupts.forget)
