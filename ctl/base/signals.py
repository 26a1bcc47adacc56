"""Signals that ask a process to stop: what they do in a loop, and in a command from its first line
to its exit. No TensorFlow here."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from ctl.base import console
from ctl.base.interactive import is_shell
from ctl.errors import Preempted, UsageError, exit_code_of

_NUMBERS = signal.SIGTERM, signal.SIGINT

# Bytes in the pipe of `_Watch` that are no signals.
_END, _NEXT = 0, 255

# A call of the loop takes about half a second. A call that takes longer than this may hang.
_GRACE_SECONDS = 1.0


class StopRequested(Exception):
    """A signal arrived. Unwinds the stack to where the state can be saved."""


class Interrupted(KeyboardInterrupt):
    """A signal arrived where there is nothing to save. Ends a command with 42."""

    exit_code = Preempted.exit_code


class _End(NamedTuple):
    """How the process ends, unless ``prevented`` is set within some seconds."""

    code: int
    line: str
    seconds: float
    prevented: threading.Event


class _Answer(Protocol):
    """What signals do at present."""

    def handle(self, number: int) -> None:
        """Called in the main thread, when it runs code of Python; may raise."""

    def arrive(self, number: int) -> _End | None:
        """Called in a thread, at once. Returns how the process ends; None if it goes on."""


class Signals:
    """Notes SIGTERM and SIGINT, so that the loop can stop between two calls."""

    def __init__(self) -> None:
        self._number: int | None = None
        self.is_button = False  # noted by `button`

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
    def noted(self) -> Iterator[None]:
        """While inside, notes the last signal. A second SIGINT raises `KeyboardInterrupt`. If the
        main thread is in a call of TensorFlow that does not return for a second, the second SIGINT
        ends the process with code 130. In a program of the user's, prints a `Preempted` that ends
        the context: Python prints nothing when it ends the process.

        Raises:
            UsageError: entered outside the main thread.
        """
        self._number, self.is_button = None, False
        self._handled = self._arrived = 0
        self._over = threading.Event()  # `KeyboardInterrupt` was raised, or the context has ended
        with answered_by(self) as outer:
            if isinstance(outer, Signals):
                self._handled, self._arrived = outer._handled, outer._arrived
            try:
                with deciding():
                    yield
            except Preempted as stopped:
                if not _command:
                    print(stopped, file=sys.stderr)
                raise
            finally:
                self._over.set()
                if _command and self._number is not None:
                    _command.asked(self._number)

    @contextlib.contextmanager
    def button(self, in_scripts: bool = False) -> Iterator[None]:
        """In a notebook or a shell, notes the first SIGINT, of the stop button or Ctrl-C, while
        inside; the next one raises `KeyboardInterrupt`. So it does ``in_scripts``. Where something
        else than Python's default handles SIGINT, and outside the main thread, it changes nothing.

        Raises:
            StopRequested: at the end, if one came.
        """
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        main = threading.current_thread() is threading.main_thread()
        if not ((is_shell() or in_scripts) and default and main):
            yield
            return

        def note(number: int, frame: Any) -> None:
            self._number = number
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self._number, self.is_button = None, True
        signal.signal(signal.SIGINT, note)
        try:
            yield
            if self.arrived:
                raise StopRequested
        finally:
            self._number = None
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def handle(self, number: int) -> None:
        """See `_Answer`."""
        self._number = number
        self._handled += number == signal.SIGINT
        if number == signal.SIGINT and max(self._handled, self._arrived) > 1:
            self._over.set()
            raise KeyboardInterrupt

    def arrive(self, number: int) -> _End | None:
        """See `_Answer`."""
        self._arrived += number == signal.SIGINT
        # As commands do for `KeyboardInterrupt`.
        end = _End(130, "interrupted", _GRACE_SECONDS, self._over)
        return end if self._arrived > 1 and not is_shell() else None  # a kernel has more to lose


class _Command:
    """What signals do in a command outside of its loop.

    The first one ends it with 42: at once, or by `Interrupted` after `unwind`, where files and runs
    are to be closed. Once the exit code is decided, SIGTERM changes nothing, since a scheduler may
    repeat it, and Ctrl-C ends the process at once with that code.
    """

    def __init__(self) -> None:
        self._line, self._unwinds = "stopped before the training; run the same command again", False
        self._number: int | None = None
        self._code: int | None = None
        self.skips_teardown = False
        self._first = True  # for the thread: whether the next signal is the first
        self._raised = threading.Event()

    @property
    def succeeded(self) -> bool:
        return self._code == 0

    def handle(self, number: int) -> None:
        """See `_Answer`."""
        if self._unwinds and self._code is None:
            self._code = Preempted.exit_code  # the thread may not have heard of it yet
            self._raised.set()
            raise Interrupted(self._said(number))

    def arrive(self, number: int) -> _End | None:
        """See `_Answer`."""
        first, self._first = self._first, False
        if first:
            seconds = _GRACE_SECONDS if self._unwinds else 0.0
            return _End(Preempted.exit_code, self._said(number), seconds, self._raised)
        if number == signal.SIGINT:
            code = Preempted.exit_code if self._code is None else self._code
            return _End(code, "", 0.0, threading.Event())
        return None

    def asked(self, number: int) -> None:
        """A signal has come."""
        self._number, self._first = number, False
        if self._code is None:
            self.decide(Preempted.exit_code)

    def decide(self, code: int) -> None:
        """The exit code is known."""
        self._code, self._first = code, False

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Knows the exit code if an exception ends the context."""
        try:
            yield
        except BaseException as error:
            self.decide(exit_code_of(error))
            raise

    def unwind(self, line: str) -> None:
        """From now on, a signal raises `Interrupted`; one that came in the loop does so now."""
        self._line, self._unwinds = line, True
        if self._number is not None:
            raise Interrupted(self._said(self._number))

    def _said(self, number: int) -> str:
        return f"{signal.Signals(number).name}: {self._line}"


class Received(list[int]):
    """The numbers of the signals that have come. For `answered_by`."""

    def handle(self, number: int) -> None:
        """See `_Answer`."""
        self.append(number)

    def arrive(self, number: int) -> None:
        """See `_Answer`."""


class _Watch:
    """Handles SIGTERM and SIGINT, in the main thread and in one of its own.

    While the main thread is in a call of TensorFlow, Python calls no handler, and merges several
    signals into one. But it writes one byte per signal to a pipe at once, which a thread reads.
    """

    active: _Watch | None = None

    def __init__(self, answer: _Answer):
        self.answer = answer
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The previous file descriptor may be asyncio's, for instance.
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._next: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        thread = threading.Thread(target=self._watch, args=(answer,), name="ctl_signals")
        thread.daemon = True
        thread.start()
        self._handlers = self.install()
        _Watch.active = self

    def switch(self, answer: _Answer) -> None:
        """Lets ``answer`` decide from now on. The thread, which may be late, asks the one before
        about signals that came before: else it would take the last one of a loop for one that came
        after the loop."""
        self.answer = answer
        self._next.put(answer)
        os.write(self._writer, bytes([_NEXT]))

    def install(self) -> dict[int, Any]:
        """Returns the handlers of before."""
        return {number: signal.signal(number, self._handle) for number in _NUMBERS}

    def close(self) -> None:
        """Puts back what handled signals before."""
        _Watch.active = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, bytes([_END]))
        os.close(self._writer)

    def _handle(self, number: int, frame: Any) -> None:
        self.answer.handle(number)

    @classmethod
    def forget(cls) -> None:
        """Leaves the pipe to the parent. For a forked process, which gets Ctrl-C separately."""
        if cls.active:
            signal.set_wakeup_fd(-1)
            cls.active._writer = os.open(os.devnull, os.O_WRONLY)
            if cls.active.answer is _command:  # what the parent does with them would not end it
                for number, handler in cls.active._handlers.items():
                    signal.signal(number, handler)

    def _watch(self, answer: _Answer) -> None:
        while True:
            for number in os.read(self._reader, 64):
                if number == _END:
                    os.close(self._reader)
                    return
                if number == _NEXT:
                    answer = self._next.get()
                    continue
                end = answer.arrive(number) if number in _NUMBERS else None
                if self._before >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._before, bytes([number]))
                if end and not end.prevented.wait(end.seconds):
                    console.leave(end.code, end.line)


os.register_at_fork(after_in_child=_Watch.forget)


@contextlib.contextmanager
def answered_by(answer: _Answer) -> Iterator[_Answer | None]:
    """Inside, ``answer`` decides what SIGTERM and SIGINT do. Gives what has decided before, if any.

    Raises:
        UsageError: entered outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("signals can be handled in the main thread only")
    if watch := _Watch.active:
        outer = watch.answer
        watch.switch(answer)
        watch.install()  # a strategy of the user's own may have taken the signals meanwhile
        try:
            yield outer
        finally:
            watch.switch(outer)
        return
    watch = _Watch(answer)
    try:
        yield None
    finally:
        watch.close()


def ending() -> list[int]:
    """The signals that may end this process where it cannot handle them: both in a command, SIGTERM
    in a program of the user's; none that it ignores or blocks."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    numbers = _NUMBERS if _command else (signal.SIGTERM,)
    return [
        int(number)
        for number in numbers
        if number not in blocked and signal.getsignal(number) is not signal.SIG_IGN
    ]


def install() -> None:
    """Handles signals again that TensorFlow has taken over where it connected tasks, as before:
    Python has not noticed. Has no effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            if (handler := signal.getsignal(number)) is not None:  # None: not Python's
                signal.signal(number, handler)


# Of a command that trains ------------------------------------------------------------------------

_command: _Command | None = None


def begin() -> None:
    """Makes SIGTERM and Ctrl-C end this process with 42 where no loop handles them, see `_Command`.
    For the first line of a command; a second call does nothing."""
    global _command
    if _command is None:
        _command = _Command()
        _Watch(_command)
        atexit.register(_end)  # what is registered first is called last


def _end() -> None:
    """Python would give the signals back to the system, which kills the process."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    if _command and _command.skips_teardown and _command.succeeded:
        console.leave(0)


def skip_teardown() -> None:
    """If the command succeeds, its process ends when all is called that is registered with
    `atexit`: Python takes 0.2 s to free TensorFlow's modules. Not for one of several workers, which
    TensorFlow disconnects there."""
    if _command:
        _command.skips_teardown = True


def unwind(line: str) -> None:
    """From now on, a signal ends the command with 42 and ``line``, but not at once: files are
    closed first. Raises `Interrupted` if one has come in the loop."""
    if _command:
        _command.unwind(line)


def decided(code: int = 0) -> None:
    """From now on, signals do not change that the command ends with ``code``."""
    if _command:
        _command.decide(code)


def deciding() -> contextlib.AbstractContextManager[None]:
    """An exception that ends the context decides with which code the command ends."""
    return _command.deciding() if _command else contextlib.nullcontext()
