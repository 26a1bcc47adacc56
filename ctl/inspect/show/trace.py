"""Writes a `Timeline` as a trace for Perfetto and ``chrome://tracing``.

A process is a worker. Each replica has a thread for computation and one for its all-reduces, or
several if all-reduces overlap, since slices of one thread must not overlap. Arrows go from the last
replica to come to a pack to those that waited for it. The format is "Trace Event Format" (Google,
2016); times are microseconds from the first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ctl.base import svg
from ctl.inspect.show import pictures

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import PackTimes, Timeline

_SAID = {"pack": " packing", "wait": " wait", "transfer": ""}
_THREADS = 10_000  # the most threads of a replica: more than packs that overlap


def make_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object: metadata first, then events by time."""
    known = timeline.begin[np.isfinite(timeline.begin)]
    origin = float(known.min()) if known.size else 0.0
    levels = _levels(timeline)
    events = list(_arrows(timeline, levels, origin))
    for row in range(len(timeline.rows)):
        events += _row(timeline, levels, row, origin)
    # Of events that begin together, the longest comes first, as the outer one, and arrows last.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", -1.0)))
    return {
        "traceEvents": [*_names(timeline, levels), *events],
        "displayTimeUnit": "ms",
        "otherData": {"description": svg.printable(timeline.description)},
    }


def _levels(timeline: Timeline) -> np.ndarray:
    """int [packs, N, S]: the communication thread of the replica that has the pack."""
    shape = (len(timeline.rows), len(timeline.steps), len(timeline.packs))
    found = np.zeros(shape, int)
    for row, index in np.ndindex(*shape[:2]):
        found[row, index] = pictures.levels(timeline.packs, row, index)
    return np.moveaxis(found, 2, 0)


def _names(timeline: Timeline, levels: np.ndarray) -> Iterator[dict[str, Any]]:
    for row, (worker, replica) in enumerate(timeline.rows):
        process, thread = _ids(timeline, row)
        names = [("process_name", thread, f"worker {worker}")] * (replica == 0)
        names.append(("thread_name", thread, f"replica {replica}: compute"))
        for level in range(1 + int(levels[:, row].max(initial=-1))):
            names.append(("thread_name", thread + 1 + level, f"replica {replica}: all-reduce"))
        for name, at, value in names:
            event = {"ph": "M", "name": name, "pid": process, "tid": at, "ts": 0}
            yield {**event, "args": {"name": value}}


def _ids(timeline: Timeline, row: int) -> tuple[int, int]:
    """Ids of the process and of the computing thread; communicating threads have the next ids."""
    worker, replica = timeline.rows[row]
    return worker + 1, (replica + 1) * _THREADS  # process 0 is the idle one


def _row(
    timeline: Timeline, levels: np.ndarray, row: int, origin: float
) -> Iterator[dict[str, Any]]:
    process, thread = _ids(timeline, row)
    free: dict[int, float] = {}  # for each thread, the end of its last slice
    for index, step in enumerate(timeline.steps.tolist()):
        at = max(timeline.begin[row, index] - origin, free.get(thread, 0.0))
        end = timeline.begin[row, index] - origin + timeline.step_seconds[row, index]
        free[thread] = end
        yield from _slice(process, thread, f"step {step}", "step", at, end, {"step": step})
        for phase, name, seconds in pictures.computed_phases(timeline, row, index):
            yield from _slice(process, thread, name, phase, at, at + seconds)
            at += seconds
        applying = end - timeline.phases["apply"][row, index]
        yield from _slice(process, thread, "apply", "apply", np.maximum(at, applying), end)
        for pack, level in zip(timeline.packs, levels[:, row, index].tolist(), strict=True):
            on = thread + 1 + level
            about = {"step": step, "bytes": pack.bytes}
            for part, since, until in pictures.pack_parts(pack, row, index):
                name = svg.printable(pack.name) + _SAID[part]
                since = max(since - origin, free.get(on, 0.0))
                yield from _slice(process, on, name, part, since, until - origin, about)
                free[on] = max(since, until - origin)


def _transfer(pack: PackTimes, row: int, index: int, origin: float) -> tuple[float, float]:
    """Begin and end of a pack's transfer, seconds since ``origin``."""
    parts = {name: times for name, *times in pictures.pack_parts(pack, row, index)}
    there, ended = parts["transfer"]
    return there - origin, ended - origin


def _slice(
    process: int,
    thread: int,
    name: str,
    category: str,
    begin: float,
    end: float,
    about: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    first, last = _microseconds(begin), _microseconds(end)
    if first is None or last is None or last <= first:
        return
    event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": first}
    # The difference of rounded times, so that neighbours touch and do not overlap.
    yield {**event, "dur": round(last - first, 3), **({"args": about} if about else {})}


def _arrows(timeline: Timeline, levels: np.ndarray, origin: float) -> Iterator[dict[str, Any]]:
    number = 0
    for which, pack in enumerate(timeline.packs):
        for index in range(len(timeline.steps)):
            last = int(pack.begun[:, index].argmax())
            for row in range(len(timeline.rows)):
                transfers = [_transfer(pack, of, index, origin) for of in (last, row)]
                # An arrow must start and end in a slice; a transfer that took no time has none.
                if row == last or not pack.wait[row, index] > 0:
                    continue
                if not all(ended - there > 1e-6 for there, ended in transfers):
                    continue
                number += 1
                for phase, of, (there, _) in zip("sf", (last, row), transfers, strict=True):
                    process, thread = _ids(timeline, of)
                    on = thread + 1 + int(levels[which, of, index])
                    event = {"ph": phase, "name": "waits for", "cat": "wait", "id": number}
                    event |= {"pid": process, "tid": on, "ts": _microseconds(there)}
                    # "e": it ends in the slice that begins there, not in the next one.
                    yield {**event, "bp": "e"} if phase == "f" else event


def _microseconds(seconds: float) -> float | None:
    return round(float(seconds) * 1e6, 3) if np.isfinite(seconds) else None
