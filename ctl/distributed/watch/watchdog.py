"""Ends a process whose collective does not return.

TensorFlow's own time limit is not used. It starts a thread for each collective that sleeps for the
whole limit, so a job of small steps dies of too many threads within minutes. And when a thread
wakes up, it frees memory that the threads of the ring still use. Here, one thread watches whether
the main thread makes progress in its section of the code. After ``--collective_timeout`` it writes
a flight record, prints one line and calls `os._exit`. It runs by default with several workers.

All time limits are in a table of ``README.md`` beside this file.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from ctl.base.console import last_line, leave, within
from ctl.distributed.cluster import addresses, elastic
from ctl.distributed.cluster.external_watchdog import LINGER_SECONDS, ask_grpc
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.cluster.rendezvous import unreachable
from ctl.distributed.watch import hang, record
from ctl.distributed.watch.beats import Beat, Beats
from ctl.distributed.watch.record import Record, Section
from ctl.errors import CtlError, PeerError

# Limit of a first call, which compiles. Workers differ in how long that takes.
FIRST_CALL_SECONDS = 600.0

_TICK = 0.25
# The time between two ticks counts up to this much, so that a process that was stopped (SIGSTOP, a
# laptop's lid) does not take the pause for a wait.
_MOST_OF_A_TICK = 0.5
# A peer whose connection broke may take so long to end. Only then can it be told from the others.
_ENDING_SECONDS = 3.0
# Marks are read after so long without progress: reading costs time, and tells nothing earlier.
_STALLED_SECONDS = 0.5
# A worker logs which workers it waits for after so long, and each time the wait has doubled.
_QUIET_SECONDS = 10.0
# In an elastic job, a worker without beats for `_SILENT_SECONDS` is asked twice; it is lost if it
# answers neither for `_ANSWER_SECONDS`. TensorFlow's threads answer while Python computes.
_SILENT_SECONDS, _ANSWER_SECONDS = 3.0, 2.0
# A worker that has given up breaks the collectives of all others. TensorFlow may notice it late.
_GAVE_UP_SECONDS = 1.0
# Limit of all that is done before the exit, including the end of a checkpoint's write.
_LAST_WORDS_SECONDS = 60.0

_ALL_LISTEN = "other workers, which all still listen"  # if none can be named


class Watchdog:
    """The watchdog of a process, made by `start`. See the module.

    Args:
        cluster: the workers, which all receive beats.
        timeout: limit, in seconds, without progress in a collective.
        startup_timeout: limit, in seconds, while workers load their data or build their model.
        record_dir: directory of flight records; None for no records.
        abort: makes the collectives of this process fail, and says why. Called in an elastic job
            when another worker is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeout: float,
        startup_timeout: float,
        record_dir: Path | None = None,
        abort: Callable[[str], Any] | None = None,
    ):
        self.cluster, self.timeout, self.record_dir = cluster, timeout, record_dir
        self.startup_timeout = startup_timeout
        self.finish_first: Callable[[], Any] = lambda: None
        self._sections = [Section("host code", None)]
        self._broken: Section | None = None
        self._beats = Beats(cluster)
        self._stopped = threading.Event()
        self._gave_up = ""
        self._recorded, self._recorded_in = -math.inf, self._sections[0]
        self._heard_giving_up: dict[int, float] = {}  # and when, by `time.monotonic`
        self._giving_up = threading.Lock()
        self._abort, self._aborted = abort, False
        # `_read` has a thread of its own, because reading a variable can block for as long as the
        # step does: on a GPU it queues behind the collective.
        works = [self._watch, self._read]
        if abort and elastic.is_elastic():
            works.append(self._ask)
        for work in works:
            threading.Thread(target=work, name=f"ctl{work.__name__}", daemon=True).start()
        atexit.register(self._stopped.set)

    @contextlib.contextmanager
    def inside(self, section: Section) -> Iterator[None]:
        """Makes ``section`` the one that is watched, inside the context."""
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
            # The loop may have ended, and its variables with it.
            with contextlib.suppress(Exception):
                if section.progress:
                    section.step = section.progress()
                if section.marks and section.stalled >= _STALLED_SECONDS:
                    section.fired, section.not_fired = section.marks()
                    section.phase = record.phase_of(section.fired, section.not_fired)

    def _ask(self) -> None:
        """Aborts the collectives when a worker is lost. TensorFlow would do so after 10 to 14 s."""
        while self._abort and not self._aborted and not self._stopped.wait(_TICK):
            try:
                why = self._lost() if self._waits() else ""
                if why and self._waits():
                    self._aborted = True
                    self._abort(why)
            except Exception as error:  # TensorFlow notices it later
                within(0.0, logging.error, "the watchdog continues after %r", error)

    def _waits(self) -> bool:
        """Whether the main thread may wait for others."""
        return self._section().limit is not None

    def _lost(self) -> str:
        """Which worker is lost, and how; "" if none is known to be."""
        now = time.monotonic()
        for worker, at in [*self._heard_giving_up.items()]:
            if now - at >= _GAVE_UP_SECONDS:
                return f"worker {worker} gave up"
        for worker, peer in self._beats.peers.items():
            silent = peer.silent >= _SILENT_SECONDS * self._beats.interval
            if silent and not (self._answers(worker) or self._answers(worker)):
                return f"worker {worker} does not answer"
        return ""

    def _answers(self, worker: int) -> bool:
        """Whether TensorFlow runs there. If nothing listens, TensorFlow knows it already."""
        try:
            ask_grpc(*addresses.split(self.cluster.workers[worker]), _ANSWER_SECONDS)
        except OSError as error:
            no_way = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
            return not (isinstance(error, TimeoutError) or no_way)
        return True

    def _watch(self) -> None:
        before, place = time.monotonic(), None
        while not self._stopped.is_set():
            try:
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
                        within(0.0, self._say_for_whom, section)
                    continue
                if section is self._sections[-1] and self._giving_up.acquire(blocking=False):
                    self._give_up(section)
            except Exception as error:  # the time limits must not end with it
                within(0.0, logging.error, "the watchdog continues after %r", error)
                time.sleep(_TICK)

    def _say_for_whom(self, section: Section) -> None:
        """Logs for whom this worker waits; nothing if all are in one place, and compute. In a
        thread: the file system may hang, and the reader of the log."""
        waited = f"{section.stalled:.0f} s in {section.doing}"
        if named := self._named(record.make(self.cluster, "waits", section, self._beats.peers, {})):
            logging.warning("worker %d has waited %s for %s", self.cluster.index, waited, named)

    def _beat(self, section: Section) -> Beat:
        return Beat(
            step=section.step or 0,
            doing=section.doing[:100],
            phase=section.phase,
            waits=section.limit is not None,
            since=section.stalled,
            gave_up=self._gave_up,
        )

    def _listen_to_those_who_give_up(self) -> None:
        """Writes a record when a peer gives up: this worker may be the cause and not know it."""
        for worker, beat in self._beats.peers.items():
            if beat.gave_up and worker not in self._heard_giving_up:
                self._heard_giving_up[worker] = time.monotonic()
                within(0.0, self._write_record, f"worker {worker} gave up")

    def _write_record(self, why: str, gone: dict[int, str] | None = None) -> Record:
        """Makes a record, and writes it unless this hang has one already.

        If this worker gives up in the section in which it had heard of another, it had waited
        there, too: that record is replaced.
        """
        section = self._section()
        made = record.make(self.cluster, why, section, self._beats.peers, gone or {})
        recently = time.monotonic() - self._recorded < 2 * self.timeout + record.SAME_HANG_SECONDS
        had_waited = why in record.GAVE_UP and section is self._recorded_in
        if self.record_dir and (had_waited or not recently):
            self._recorded, self._recorded_in = time.monotonic(), section
            try:
                record.write(self.record_dir, made)
            except OSError as error:
                logging.error("cannot write the flight record: %s", error)
        return made

    def blame(self, why: str, step: int | None = None) -> str:
        """Writes the record of a collective that failed (``why``: see `Record`), and tells the
        other workers. ``step`` is the last global step that was finished; None keeps the one that
        is known. Returns the workers that this one waits for, as far as it can know."""
        section = self._section()
        elastic.tell(elastic.LOST)
        if step is not None:
            section.step = step
        unknown = why == "broke off" and not self._aborted
        gone = unreachable(self.cluster, _ENDING_SECONDS if unknown else 0.0)
        made = self._write_record(why, gone)
        self._gave_up = why
        self._beats.send(self._beat(section))
        return self._named(made) or _ALL_LISTEN

    def _named(self, made: Record) -> str:
        """The other workers that this one waits for, by its own record."""
        return ", ".join(str(p) for p in hang.suspects([made]) if p.worker != self.cluster.index)

    def broke_off(self, step: int | None) -> str:
        """Calls `blame` for the main thread, after TensorFlow raised an error.

        If the watchdog is about to end the process and print its own line, this waits for that.
        """
        if not self._giving_up.acquire(blocking=False):
            time.sleep(2 * _LAST_WORDS_SECONDS)
        return self.blame("broke off", step)

    def _give_up(self, section: Section) -> None:
        """Ends the process, even if the last words hang, for example in a file system."""
        within(_LAST_WORDS_SECONDS, self._last_words, section)
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
        end = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < end:
            self._beats.exchange(self._beat(section), _TICK)
        with contextlib.suppress(Exception):  # a failed save must not change the exit code
            self.finish_first()


_watchdog: Watchdog | None = None


def start(
    cluster: Cluster,
    timeout: float = 300.0,
    record_dir: Path | None = None,
    startup_timeout: float = 300.0,
    abort: Callable[[str], Any] | None = None,
) -> None:
    """Starts the `Watchdog` of this process. Later calls have no effect."""
    global _watchdog
    if _watchdog is None:
        _watchdog = Watchdog(cluster, timeout, startup_timeout, record_dir, abort)


def finish_first(work: Callable[[], Any]) -> None:
    """Registers a function that the watchdog calls before it ends the process after a timeout.

    The process ends anyway after 60 s.
    """
    if _watchdog:
        _watchdog.finish_first = work


def broke_off(cluster: Cluster, step: int | None) -> str:
    """Writes the record of a collective that raised, and returns the workers to blame."""
    if _watchdog:
        return _watchdog.broke_off(step)
    gone = unreachable(cluster, _ENDING_SECONDS).items()
    return ", ".join(f"worker {i} (gone: {why})" for i, why in gone) or _ALL_LISTEN


def running() -> bool:
    """Returns whether this process has a watchdog."""
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
    """Returns a context in which the main thread may wait for other workers: up to ``timeout``
    seconds without progress, by default those of `start`; at least `FIRST_CALL_SECONDS` if the call
    compiles (``first``). See `Section` for the rest."""
    if _watchdog is None:
        return contextlib.nullcontext()
    limit = timeout or _watchdog.timeout
    if first:
        limit = max(limit, FIRST_CALL_SECONDS)
    return _watchdog.inside(Section(doing, limit, otherwise, step, progress, marks, tuple(packs)))


def building(doing: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the main thread may wait, up to ``--startup_timeout``, for workers
    that load their data or build their model."""
    if _watchdog is None:
        return contextlib.nullcontext()
    return _watchdog.inside(Section(doing, _watchdog.startup_timeout, flag="--startup_timeout"))


def host(doing: str, step: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Returns a context without a limit, for work that waits for no other worker.

    The limits of the peers still apply: they wait in their next collective.
    """
    if _watchdog is None:
        return contextlib.nullcontext()
    return _watchdog.inside(Section(doing, None, step=step))
