"""Where the time of a run went, over all its starts: the file of a worker, and what it adds up to.

Each start of a worker appends lines to ``time-worker-N.jsonl``: the accounts of `ctl.base.ledger`
so far. A thread writes them, so that a process which is killed has told all but its last moments.
What no start accounts for is "down", unless the run is done or was refused. Steps that a later
start does again are "lost". The time of the job is that of worker 0. Imports neither TensorFlow nor
NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from absl import logging

from ctl.base import durable
from ctl.base.ledger import LEDGER, Snapshot
from ctl.base.svg import printable
from ctl.base.units import time_text
from ctl.errors import Preempted, UsageError

# Names of what a run spends, in the order of a table. "exposed" is a part of "steps" that an
# inspection has measured.
NAMES = {
    "steps": "steps",
    "exposed": "exposed communication",
    "input": "input",
    "compile": "compile",
    "start": "start",
    "evaluation": "evaluation",
    "saving": "saving",
    "waiting": "waiting for workers",
    "lost": "lost to failures",
    "down": "down",
    "other": "other",
}
_WORKED = ("steps", "input")  # what is lost with a step

# Seconds between two lines: this share of the time of the start, within these bounds. So a kill
# hides at most half a percent of what the start has done, and a day takes 1 MB.
_SHARE, _SHORTEST, _LONGEST = 0.005, 0.1, 30.0
_LONGEST_LINE = 1 << 16
_SHORT = 60.0  # seconds of a run whose goodput says nothing
_FAR = 1e11  # seconds, some thousand years


@dataclass(frozen=True)
class Start:
    """A start of a worker.

    Attributes:
        began: seconds since the epoch.
        workers: of the job then.
        records: ``(time, accounts)``, in order.
        end: "done", "stopped", the name of an error, or "" if it was killed or goes on.
    """

    began: float
    workers: int
    records: list[tuple[float, Snapshot]]
    end: str = ""

    @property
    def ended(self) -> float:
        """When it was last known to run."""
        return self.records[-1][0]

    @property
    def last(self) -> Snapshot:
        """Its accounts at the end."""
        return self.records[-1][1]

    @property
    def leaves_a_pause(self) -> bool:
        """Whether the run is not down until the next start: it is done, or was refused before its
        first step, and somebody reads why."""
        refused = self.end == UsageError.__name__ and self.last.step == self.last.first
        return self.end == "done" or refused


@dataclass(frozen=True)
class Span:
    """A part of a run: the number of its start, from 0, or of the start after it; its time, in
    seconds since the epoch; and how many seconds were for what."""

    start: int
    begin: float
    end: float
    seconds: Mapping[str, float]


class LedgerFile:
    """Writes where the time of this process goes, as a context manager around a training::

        with ctl.logs.LedgerFile("/tmp/run") as ledger:
            loop.scalars.extras.append(ledger.goodput)
            loop.train_and_evaluate(until=1000)
        print(*ledger.pieces(), sep="\\n")

    ``python -m ctl.inspect time /tmp/run`` shows it, with all earlier starts of the run. A file
    that cannot be written is a warning. One at a time in a process, in the main thread.

    Args:
        model_dir: directory of the run; it is made.
        worker: the index of this worker; each has a file.
        workers: the number of workers of the job now.
        age: seconds before, which are "start".
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        worker: int = 0,
        workers: int = 1,
        *,
        age: float = 0.0,
    ):
        self.path = path_of(Path(model_dir), worker)
        self._workers, self._age = workers, age
        self._earlier: list[Start] = []
        self._before: tuple[int | None, Spent] | None = None  # by the step it goes on from
        self._file: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="ctl-ledger", daemon=True)

    def __enter__(self) -> LedgerFile:
        self._begun, self._began = time.monotonic() - self._age, time.time() - self._age
        LEDGER.begin(self._age)
        self._earlier = _starts(self.path) if self.path.exists() else []
        with self._warned():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(self.path)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        stops = kind is not None and issubclass(kind, Preempted | KeyboardInterrupt)
        self._write("stopped" if stops else kind.__name__ if kind else "done")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def goodput(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """The `Spent.goodput` of the run so far, for ``loop.scalars.extras``."""
        del scalars
        now, wall = LEDGER.read(), time.time() - self._began
        if self._before is None or self._before[0] != now.first:
            self._before = now.first, _add(spans(self._earlier, now.first))
        before = self._before[1]
        if self._earlier and not self._earlier[-1].leaves_a_pause:
            wall += self._began - self._earlier[-1].ended
        steps = before.seconds["steps"] + now.seconds.get("steps", 0.0)
        return {"goodput": steps / max(before.wall + wall, 1e-9)}

    def pieces(self) -> list[str]:
        """What the run has spent so far, earlier starts included: its goodput, and its accounts
        from the largest on. Empty if the file cannot be written."""
        self._write()
        return spent(_starts(self.path)).pieces() if self._file is not None else []

    def _write_on(self) -> None:
        def pause() -> float:
            return min(_LONGEST, max(_SHORTEST, _SHARE * (time.monotonic() - self._begun)))

        while not self._stopped.wait(pause()):
            self._write()

    def _write(self, end: str = "") -> None:
        if (file := self._file) is None:
            return
        now = LEDGER.read()
        moment = self._began + sum(now.seconds.values())  # whatever the clock does meanwhile
        record: dict[str, Any] = {"schema": 1, "began": self._began, "time": moment}
        record |= {"workers": self._workers, "first": now.first, "step": now.step}
        record["seconds"] = {name: round(value, 4) for name, value in now.seconds.items()}
        if any(now.inspected):
            record["inspected"] = now.inspected
        if end:
            record["end"] = end
        with self._warned():
            os.write(file, json.dumps(record).encode() + b"\n")

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            logging.warning("cannot write %s: %s", self.path, error.strerror)


@dataclass(frozen=True)
class Spent:
    """What a run has spent.

    Attributes:
        seconds: by each of `NAMES`.
        wall: seconds from the first start to the last moment known, without what lies between the
            end of a run and a start that extends it, or between a start that was refused and the
            next. It is the sum of ``seconds``.
        inspected: seconds of the steps in which inspections have measured what is "exposed".
    """

    seconds: Mapping[str, float]
    wall: float
    inspected: float = 0.0

    @property
    def goodput(self) -> float:
        """Time in steps that count, with their communication and without the wait for input, as a
        share of the wall time."""
        return (self.seconds["steps"] + self.seconds["exposed"]) / max(self.wall, 1e-9)

    def names(self) -> dict[str, str]:
        """The names of what does not round to 0, by their keys. "steps" is "compute" where an
        inspection has told the communication apart."""
        names = NAMES | ({"steps": "compute"} if self.seconds["exposed"] else {})
        return {key: name for key, name in names.items() if abs(self.seconds[key]) >= 0.05}

    def pieces(self) -> list[str]:
        """The wall time, from a minute on with the goodput (of less, most is the start), and the
        accounts from the largest on, as texts for `console.filled`."""
        ordered = sorted(self.names().items(), key=lambda item: -self.seconds[item[0]])
        head = f"{time_text(self.wall)} in all"
        if self.wall >= _SHORT:
            head = f"{100 * self.goodput:.0f} % of {time_text(self.wall)} in steps that count"
        return [head, *(f"{name} {time_text(self.seconds[key])}" for key, name in ordered)]


def path_of(model_dir: Path, worker: int) -> Path:
    """The file of a worker in the directory of a run."""
    return model_dir / f"time-worker-{worker}.jsonl"


def read(model_dir: Path) -> dict[int, list[Start]]:
    """The starts of each worker of the run in ``model_dir``, in order; worker 0 is there.

    Raises:
        UsageError: there is no such file, or no line of it can be used.
    """
    found = {}
    for path in model_dir.glob("time-worker-*.jsonl"):
        if match := re.fullmatch(r"time-worker-(\d{1,6})\.jsonl", path.name):
            found[int(match[1])] = _starts(path)
    if not found.get(0):
        raise UsageError(
            f"{model_dir} has no {path_of(model_dir, 0).name} of a run: give its --model_dir"
        )
    return {worker: starts for worker, starts in sorted(found.items()) if starts}


def spent(starts: Sequence[Start]) -> Spent:
    """What ``starts``, in order, have spent. The share of the steps that inspections have measured
    as exposed is taken for all steps of the start."""
    inspected = sum(start.last.inspected[0] for start in starts)
    return dataclasses.replace(_add(spans(starts)), inspected=inspected)


def spans(starts: Sequence[Start], goes_on: int | None = None) -> Iterator[Span]:
    """What ``starts``, in order, have spent, one record after the other. ``goes_on``: the step from
    which a later start goes on."""
    # The step from which each part of the run, between two restarts, was gone on with.
    firsts = [(snapshot.first, n) for n, s in enumerate(starts) for _, snapshot in s.records]
    parts = [part for part in dict.fromkeys(firsts) if part[0] is not None]
    kept: dict[tuple[int | None, int], float] = {}
    least = float("inf") if goes_on is None else goes_on
    for first, number in reversed(parts):
        kept[first, number] = least
        least = min(least, first if first is not None else least)
    for number, start in enumerate(starts):
        if number and not starts[number - 1].leaves_a_pause:
            gap = start.began - starts[number - 1].ended
            yield Span(number, starts[number - 1].ended, start.began, {"down": gap})
        at, before = start.began, Snapshot()
        share = _exposed_share(start.last)
        for moment, now in start.records:
            seconds = {
                name: now.seconds.get(name, 0.0) - before.seconds.get(name, 0.0)
                for name in {*now.seconds, *before.seconds}
            }
            lost = _lost_share(before, now, kept.get((now.first, number), float("inf")))
            for name in _WORKED:
                again = lost * seconds.get(name, 0.0)
                seconds[name] = seconds.get(name, 0.0) - again
                seconds["lost"] = seconds.get("lost", 0.0) + again
            seconds["exposed"] = share * seconds["steps"]
            seconds["steps"] -= seconds["exposed"]
            # The clock of the accounts stops while a machine sleeps.
            seconds["down"] = moment - at - sum(seconds.values())
            yield Span(number, at, moment, seconds)
            at, before = moment, now


def _lost_share(before: Snapshot, now: Snapshot, kept: float) -> float:
    """The share of the work between two records that comes after the step ``kept``."""
    if now.step is None or now.step < kept:
        return 0.0
    begin = before.step if before.first == now.first and before.step is not None else now.first
    assert begin is not None
    return (now.step - max(begin, kept)) / (now.step - begin) if now.step > begin else 1.0


def _exposed_share(last: Snapshot) -> float:
    seconds, exposed = last.inspected
    return min(1.0, exposed / seconds) if seconds > 0 else 0.0


def _add(spans: Iterator[Span]) -> Spent:
    seconds, wall = Counter(dict.fromkeys(NAMES, 0.0)), 0.0
    for span in spans:
        seconds.update(span.seconds)
        wall += span.end - span.begin
    return Spent(dict(seconds), wall)


def _open(path: Path) -> int:
    """Opens ``path`` to append lines; follows no link, and does not block on a pipe."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o666)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(None, "not a regular file")
    if status.st_size and os.pread(file, 1, status.st_size - 1) != b"\n":
        os.write(file, b"\n")  # a kill or a full disk has cut off the last line
    return file


def _starts(path: Path) -> list[Start]:
    """The starts in a file. Lines that are not as `LedgerFile` writes them are left out, and starts
    that ran beside another and did nothing."""
    found: dict[float, Start] = {}
    with contextlib.suppress(OSError), durable.open_regular(path) as file:
        while line := file.readline(_LONGEST_LINE):
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                began, moment, workers, snapshot, end = _parsed(json.loads(line))
                start = found.setdefault(began, Start(began, workers, []))
                start.records.append((moment, snapshot))
                if end:
                    found[began] = dataclasses.replace(start, end=end)
    starts: list[Start] = []
    for start in sorted(found.values(), key=lambda start: start.began):
        beside = starts and start.began < starts[-1].ended
        if not (beside and start.last.step is None):
            starts.append(start)
    return starts


def _parsed(record: Mapping[str, Any]) -> tuple[float, float, int, Snapshot, str]:
    numbers = [record["began"], record["time"], *record["seconds"].values()]
    counts = [record["workers"], *(record[n] for n in ("first", "step") if record[n] is not None)]
    inspected = record.get("inspected", (0.0, 0.0))
    if not all(durable.is_number(n) and abs(n) < _FAR for n in [*numbers, *inspected]):
        raise ValueError("not a number")
    if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
        raise ValueError("not a count")
    if (record["first"] is None) != (record["step"] is None) or len(inspected) != 2:
        raise ValueError("not of a loop")
    names = {*NAMES} - {"exposed", "lost", "down"}
    seconds = {str(n): float(v) for n, v in record["seconds"].items() if n in names}
    exposed = float(inspected[0]), float(inspected[1])
    snapshot = Snapshot(seconds, record["first"], record["step"], exposed)
    end = printable(record.get("end", ""))[:40]
    return float(record["began"]), float(record["time"]), record["workers"], snapshot, end
