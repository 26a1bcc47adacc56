"""The only place that ends a process whose collective does not come back.

TensorFlow's own time limit is not used. It starts a thread for each collective, which sleeps for
all of the limit: a job of small steps has too many of them within minutes, and dies. And when one
wakes up, it frees what the threads of the ring still use. Here one thread knows in which section of
the code the main thread is, sees whether that makes progress, and after ``--collective_timeout``
writes a flight record, prints one line and leaves with `os._exit`. With several workers it is on by
default; with one there is none, and nobody to wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from ctl.cluster.members import Cluster
from ctl.cluster.rendezvous import unreachable
from ctl.errors import CtlError, PeerError
from ctl.logs.console import last_line
from ctl.watch import hang, record
from ctl.watch.beats import Beats
from ctl.watch.record import Record
from ctl.watch.section import Section

# How long a first call may take: it compiles, and workers differ in how long that takes them.
FIRST_CALL_SECONDS = 600.0

_TICK = 0.25
# A process that was stopped (SIGSTOP, a laptop's lid) and goes on has not waited meanwhile: of the
# time between two ticks no more than this counts.
_MOST_OF_A_TICK = 0.5
# Between the line and the exit: the others reach their own limits, and say what they know, before
# their connection to this worker breaks.
_LINGER_SECONDS = 2.0
# How long a peer whose connection broke may take to end, so that it can be told from the others.
_ENDING_SECONDS = 3.0
# From when on the marks are read: that costs, and means something only when nothing moves.
_STALLED_SECONDS = 0.5
# A worker that has waited for so long says for whom, and again each time the wait has doubled.
_QUIET_SECONDS = 10.0
# For everything that is done before the exit, a checkpoint in flight included.
_LAST_WORDS_SECONDS = 60.0
# For what was printed to reach a reader that may be stuck itself.
_FLUSH_SECONDS = 2.0


class Watchdog:
    """See the module. One for each process; `start` makes it.

    Args:
        cluster: the workers; beats go to all of them.
        timeout: seconds without progress in a collective.
        startup_timeout: seconds to wait for workers that load their data or build their model.
        record_dir: where flight records go; None: nowhere.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeout: float,
        startup_timeout: float,
        record_dir: Path | None = None,
    ):
        self.cluster, self.timeout, self.record_dir = cluster, timeout, record_dir
        self.startup_timeout = startup_timeout
        self.finish_first: Callable[[], Any] = lambda: None
        self._sections = [Section("host code", None)]
        self._broken: Section | None = None
        self._beats = Beats(cluster)
        self._stopped = threading.Event()
        self._gave_up = False
        self._recorded = -math.inf
        self._heard_giving_up: set[int] = set()
        self._giving_up = threading.Lock()
        # Reading a variable can block for as long as the step does (on a GPU it queues behind the
        # collective), so it is not for the thread that watches.
        for work in (self._watch, self._read):
            threading.Thread(target=work, name=f"ctl{work.__name__}", daemon=True).start()
        atexit.register(self._stopped.set)

    @contextlib.contextmanager
    def inside(self, section: Section) -> Iterator[None]:
        if section.step is None:
            section.step = self._sections[-1].step
        self._broken = None
        self._sections.append(section)
        try:
            yield
        except Exception:
            self._broken = self._broken or section
            raise
        finally:
            self._sections.remove(section)
            self._sections[-1].step = section.step

    def _section(self) -> Section:
        """Where the main thread is, or was when a collective raised."""
        return self._broken or self._sections[-1]

    def _read(self) -> None:
        while not self._stopped.wait(_TICK):
            section = self._section()
            # The variables may be gone by now, with the loop that had them.
            with contextlib.suppress(Exception):
                if section.progress:
                    section.step = section.progress()
                if section.marks and section.stalled >= _STALLED_SECONDS:
                    section.fired, section.not_fired = section.marks()
                    section.phase = record.phase_of(section.fired, section.not_fired)

    def _watch(self) -> None:
        before, place = time.monotonic(), None
        while not self._stopped.is_set():
            section = self._section()
            self._beats.exchange(self._beat(section), _TICK)
            now = time.monotonic()
            if place == (section, section.step):
                section.stalled += min(now - before, _MOST_OF_A_TICK)
            else:
                section.stalled, section.phase = 0.0, ""
                section.quiet_until = _QUIET_SECONDS
            before, place = now, (section, section.step)
            self._listen_to_those_who_give_up()
            if section.limit is None:
                continue
            if section.stalled < section.limit:
                if section.stalled >= section.quiet_until:
                    section.quiet_until *= 2
                    self._say_for_whom(section)
                continue
            if section is self._sections[-1] and self._giving_up.acquire(blocking=False):
                self._give_up(section)

    def _say_for_whom(self, section: Section) -> None:
        """Logs for whom this worker waits; nothing where all wait in the same place, since they
        compile or compute."""
        named = self._named(record.make(self.cluster, "waits", section, self._beats.peers, {}))
        line = (
            f"worker {self.cluster.index} waits in {section.doing} since {section.stalled:.0f} s "
            f"for {named}"
        )
        if named:  # in a thread of its own: what reads the log may be what hangs
            threading.Thread(target=logging.warning, args=("%s", line), daemon=True).start()

    def _beat(self, section: Section) -> dict[str, Any]:
        return {
            "step": section.step or 0,
            "doing": section.doing[:100],
            "phase": section.phase,
            "waits": section.limit is not None,
            "since": section.stalled,
            "gave_up": self._gave_up,
        }

    def _listen_to_those_who_give_up(self) -> None:
        """Who keeps the others waiting writes down where it is: it may never come to know."""
        for worker, beat in self._beats.peers.items():
            if beat.gave_up and worker not in self._heard_giving_up:
                self._heard_giving_up.add(worker)
                writer = threading.Thread(
                    target=self._write_record, args=(f"worker {worker} gave up",), daemon=True
                )
                writer.start()

    def _write_record(self, why: str, gone: dict[int, str] | None = None) -> Record:
        """The record of now, which is also written to its file; the first of a hang stays there."""
        made = record.make(self.cluster, why, self._section(), self._beats.peers, gone or {})
        recently = time.monotonic() - self._recorded < 2 * self.timeout + record.SAME_HANG_SECONDS
        if self.record_dir and not recently:
            self._recorded = time.monotonic()
            try:
                record.write(self.record_dir, made)
            except OSError as error:
                logging.error("cannot write the flight record: %s", error)
        return made

    def blame(self, why: str, step: int | None = None) -> str:
        """Writes the record of a collective that failed, tells the others, and names who is to
        blame as far as this worker can know."""
        section = self._section()
        if step is not None:
            section.step = step
        gone = unreachable(self.cluster, _ENDING_SECONDS if why == "broke off" else 0.0)
        made = self._write_record(why, gone)
        self._gave_up = True
        self._beats.send(self._beat(section))
        return self._named(made) or "workers that are there but do not come"

    def _named(self, made: Record) -> str:
        """Those whom this worker waits for, by its own record. It does not wait for itself."""
        others = [p for p in hang.suspects([made]) if p.worker != self.cluster.index]
        return ", ".join(map(str, others))

    def broke_off(self, step: int | None) -> str:
        """`blame` for the main thread, to which TensorFlow raised an error. Does not return when
        the watchdog is about to end the process: that has a line of its own."""
        if not self._giving_up.acquire(blocking=False):
            time.sleep(2 * _LAST_WORDS_SECONDS)
        return self.blame("broke off", step)

    def _give_up(self, section: Section) -> None:
        """Ends the process. Nothing may keep it from that: a file system can be what hangs."""
        _within(_LAST_WORDS_SECONDS, lambda: self._last_words(section))
        leave((section.otherwise or PeerError).exit_code)

    def _last_words(self, section: Section) -> None:
        if section.otherwise:
            last_line(str(section.otherwise))
            return
        after = "" if section.step is None else f" after step {section.step}"
        waited = section.stalled
        blamed = self.blame("timed out")
        last_line(
            f"worker {self.cluster.index} of {len(self.cluster.workers)}: a collective in "
            f"{section.doing}{after} timed out: no progress for {waited:.0f} s "
            f"({section.flag}); waiting for {blamed}"
        )
        end = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < end:
            self._beats.exchange(self._beat(section), _TICK)
        with contextlib.suppress(Exception):  # a failed save must not change the exit code
            self.finish_first()


def leave(exit_code: int) -> None:
    """Ends the process at once. TensorFlow's threads are still in the collective that failed: an
    orderly end would wait for them, or crash with them and exit with another code."""
    _within(_FLUSH_SECONDS, _flush)
    os._exit(exit_code)


def _flush() -> None:
    logging.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Returns when ``work`` is done or its time is over."""
    thread = threading.Thread(target=work, name="ctl_last_words", daemon=True)
    thread.start()
    thread.join(seconds)


_watchdog: Watchdog | None = None


def start(
    cluster: Cluster,
    timeout: float = 300.0,
    record_dir: Path | None = None,
    startup_timeout: float = 300.0,
) -> None:
    """Starts the threads, once in a process: what comes later has no effect."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(cluster, timeout, startup_timeout, record_dir)


def finish_first(work: Callable[[], Any]) -> None:
    """``work`` is done before the watchdog ends the process, if it is done in time."""
    if _watchdog:
        _watchdog.finish_first = work


def broke_off(cluster: Cluster, step: int | None) -> str:
    """A collective raised: writes the record, and names the workers that are to blame."""
    if _watchdog:
        return _watchdog.broke_off(step)
    return str(unreachable(cluster) or "workers that listen but do not come")


def running() -> bool:
    """Whether this process is watched."""
    return _watchdog is not None


def collective(
    doing: str,
    *,
    timeout: float | None = None,
    first: bool = False,
    otherwise: CtlError | None = None,
    step: int | None = None,
    progress: Callable[[], int] | None = None,
    marks: Callable[[], tuple[dict[str, float], tuple[str, ...]]] | None = None,
    packs: Sequence[int] = (),
) -> contextlib.AbstractContextManager[None]:
    """The main thread may wait for other workers inside.

    Args:
        doing: what, for the message.
        timeout: seconds without progress; by default those of `start`.
        first: a first call, which compiles: `FIRST_CALL_SECONDS`, if that is more.
        otherwise: what is wrong when the others do not come; by default they are blamed.
        step, progress, marks, packs: see `Section`.
    """
    if _watchdog is None:
        return contextlib.nullcontext()
    limit = timeout or _watchdog.timeout
    if first:
        limit = max(limit, FIRST_CALL_SECONDS)
    return _watchdog.inside(Section(doing, limit, otherwise, step, progress, marks, tuple(packs)))


def building(doing: str) -> contextlib.AbstractContextManager[None]:
    """Inside, the main thread may wait up to ``--startup_timeout`` for workers that load their data
    or build their model."""
    if _watchdog is None:
        return contextlib.nullcontext()
    return _watchdog.inside(Section(doing, _watchdog.startup_timeout, flag="--startup_timeout"))


def host(doing: str, step: int | None = None) -> contextlib.AbstractContextManager[None]:
    """The main thread does something on its own inside, however long it takes: its peers wait in
    their next collective, and their limits count."""
    if _watchdog is None:
        return contextlib.nullcontext()
    return _watchdog.inside(Section(doing, None, step=step))
