"""What Python merges or forgets: signals during a call of C++, and those of forked processes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from ctl.base import console, signals
from ctl.base.signals import Signals, StopRequested


@pytest.fixture
def outer():
    """A pipe that gets a byte for each signal, as asyncio has one: the end to read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    yield reader
    assert signal.set_wakeup_fd(-1) == writer
    for thread in threading.enumerate():
        if thread.name == "ctl_signals":
            thread.join(20)  # a late one would write to the pipe of the next test
            assert not thread.is_alive()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("returns", [True, False])
def test_two_interrupts_in_one_call(outer, monkeypatch, returns):
    """No signal ends the wait for this lock, and no handler of Python runs meanwhile."""
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    left, told = [], threading.Event()
    library.pthread_mutex_lock(lock)

    def leave(*arguments):
        left.append(arguments)
        told.set()

    def interrupt_twice():
        time.sleep(0.05)  # until the lock is waited for; in a test that comes earlier, none merge
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert os.read(outer, 1) == bytes([signal.SIGINT])
        if not returns:
            told.wait(20)
        library.pthread_mutex_unlock(lock)

    monkeypatch.setattr(console, "leave", leave)
    monkeypatch.setattr(signals, "_GRACE_SECONDS", 60.0 if returns else 0.01)
    thread = threading.Thread(target=interrupt_twice)
    with pytest.raises(KeyboardInterrupt), Signals().noted():
        thread.start()
        library.pthread_mutex_lock(lock)
    thread.join()
    assert left == ([] if returns else [(130, "interrupted")])


def test_a_signal_that_tensorflow_has_taken_over(outer):
    """Its C++ code handles SIGTERM where it connects workers."""
    with Signals().noted():
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN
        inner = Signals()
        with inner.noted():
            signal.raise_signal(signal.SIGTERM)
        assert inner.name == "SIGTERM"


def test_the_signals_of_a_forked_process_are_its_own(outer):
    noting = Signals()
    with noting.noted():
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGINT)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        assert not noting.arrived
        signal.raise_signal(signal.SIGTERM)
        assert os.read(outer, 1) == bytes([signal.SIGTERM])
    assert noting.name == "SIGTERM"


def test_the_second_interrupt_may_come_in_an_inner_context(outer):
    with Signals().noted():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), Signals().noted():
            signal.raise_signal(signal.SIGINT)


def test_a_thread_that_is_late_asks_who_answered_then(outer):
    """The second interrupt of a loop is not one that comes after the loop, which would end the
    process without a word."""
    asked, released = [], threading.Event()

    class Answer(signals.Received):
        def __init__(self, name):
            self.name = name

        def arrive(self, number):
            released.wait(20)
            asked.append(self.name)

    with signals.answered_by(Answer("outer")):
        with signals.answered_by(Answer("inner")):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        released.set()
        for _ in range(3):
            assert select.select([outer], [], [], 20)[0]
            os.read(outer, 1)
    assert asked == ["inner", "inner", "outer"]


def test_the_stop_button_of_a_notebook(monkeypatch):
    """`tests/test_notebook.py` presses it in a kernel."""
    number, default = signal.SIGINT, signal.default_int_handler
    noted, reached = Signals(), []
    with pytest.raises(KeyboardInterrupt), noted.button():  # of a script
        signal.raise_signal(number)
    monkeypatch.setattr(signals, "is_shell", lambda: True)
    for _ in range(2):
        with pytest.raises(StopRequested), noted.button():
            signal.raise_signal(number)
            reached.append(noted.arrived)
        assert noted.is_button and not noted.arrived and signal.getsignal(number) is default
    assert reached == [True, True]
    with pytest.raises(KeyboardInterrupt), noted.button():
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert signal.getsignal(number) is default
    with noted.noted():
        with noted.button():  # the loop answers signals already
            signal.raise_signal(number)
        assert noted.arrived and not noted.is_button
        noted._arrived = 2
        assert noted.arrive(number) is None  # a kernel does not end
    thread = threading.Thread(target=lambda: noted.button().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(number) is default


@pytest.mark.parametrize("code", [0, 3])
def test_who_skips_the_teardown_calls_all_that_is_registered(code):
    program = f"""
import atexit, sys
from ctl.base import signals
signals.begin()
atexit.register(print, "registered")
signals.skip_teardown()
class Freed:
    def __del__(self, write=sys.stdout.write):
        write("freed")
kept = Freed()
signals.decided({code})
sys.exit({code})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == "registered\n" + ("freed" if code else "")
