"""Joins the windows of all workers, and turns their stamps into durations.

A *row* is one replica of one worker; rows are ordered by worker, then by replica. For pack p on a
row, with stamps ``ready`` and ``done``:

    start    = max(ready[p], done[p-1])      the collective waits for the one before it
    wait     = max over rows of start - start
    transfer = done - max over rows of start

If a profile says when the collective itself began and ended, those times replace start and done,
and the time before and after them is packing.

All rows need one clock. The clock of worker j is ahead of the clock of worker 0 by an unknown
offset. No worker leaves a barrier before the last one has come to it, so each barrier has bounds:

    arrived_j - done_0  <=  offset_j  <=  done_j - arrived_0

The middle of the tightest bounds is taken as the offset. Packs serve as barriers only if there are
no others: a late worker widens their bounds, and a busy worker may stamp its arrival after the
collective has begun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ctl.errors import UsageError
from ctl.inspect.measure.link import bus_factor
from ctl.inspect.measure.window import Window, check_together

# The phases of a step, in order; they add up to it. "wait" and "transfer" are communication that
# the backward pass does not hide. Without a profile, "pack" is part of "transfer".
PHASES = ("input", "forward", "backward", "pack", "wait", "transfer", "apply", "other")

# The most by which two clocks drift apart, in seconds per second. Quartz is good to some 20 ppm.
DRIFT = 50e-6


class Row(NamedTuple):
    """One replica of one worker; ``replica`` counts within the worker."""

    worker: int
    replica: int


@dataclasses.dataclass(frozen=True)
class Clock:
    """How far the clock of a worker is ahead of the clock of worker 0, in seconds.

    Attributes:
        worker: its index.
        low, high: bounds of the offset; certain as long as clocks drift apart by less than `DRIFT`.
    """

    worker: int
    low: float
    high: float

    @property
    def offset(self) -> float:
        """The middle of the bounds, seconds."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """The most by which `offset` may be wrong, seconds."""
        return abs(self.high - self.low) / 2


@dataclasses.dataclass(frozen=True)
class PackTimes:
    """One all-reduce on N rows in S steps; times in seconds.

    Attributes:
        name: as in the graph, such as ``pack0``.
        bytes: on each replica; 0 if the shape is unknown while tracing.
        ready: float64 [N, S], since `Timeline.origin`: when its gradients were ready.
        start: float64 [N, S], since the origin: when it was ready and the pack before it done.
        begun: float64 [N, S], since the origin: when the collective itself began; ``start`` without
            a profile.
        packing: float64 [N, S]: before and after the collective; NaN without a profile.
        wait: float64 [N, S]: until the last row has begun.
        transfer: float64 [N, S]: from when the last row has begun until this row has the sums.
        bus_factor: 2(n-1)/n for n replicas.
    """

    name: str
    bytes: int
    ready: np.ndarray
    start: np.ndarray
    begun: np.ndarray
    packing: np.ndarray
    wait: np.ndarray
    transfer: np.ndarray
    bus_factor: float

    @property
    def seconds(self) -> np.ndarray:
        """float64 [S]: from when the last row has begun until all rows have the sums."""
        return self.transfer.max(axis=0)

    @property
    def algbw(self) -> float:
        """Bytes over the median time, in GB/s (1e9 bytes, as nccl-tests); NaN if either is 0."""
        seconds = float(np.median(self.seconds))
        return self.bytes / seconds / 1e9 if seconds > 0 and self.bytes else float("nan")

    @property
    def busbw(self) -> float:
        """algbw · 2(n-1)/n, in GB/s: comparable with the speed of a link for any n.

        Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
        """
        return self.algbw * self.bus_factor


@dataclasses.dataclass(frozen=True)
class Timeline:
    """N rows (replicas of workers) in S steps; all times in seconds, on worker 0's clock.

    Attributes:
        rows: the N rows.
        steps: int64 [S]: batches seen before each step.
        origin: seconds since the epoch; points in time below are relative to it.
        begin: float64 [N, S]: when the step began, that is, when the one before was applied.
        marks: name of the mark -> float64 [N, S], when it was stamped; NaN if it was not.
        step_seconds: float64 [N, S], durations.
        phases: each of `PHASES` -> float64 [N, S], durations that add up to ``step_seconds``. NaN
            for a phase that cannot be told apart: "forward" and "apply" are then part of
            "backward", "pack" is part of "transfer", and if the replicas `reduce_unseen`, "wait",
            "transfer" and "apply" are part of "other".
        hidden: float64 [N, S]: communication while this row still computed; NaN if unseen.
        exposed: float64 [N, S]: communication after its backward pass; NaN if unseen.
        packs: in the order in which they are reduced; empty if unseen.
        late: float64 [N, S]: how much later than the median of the other rows this row had the
            gradients of a pack ready; of the pack for which this is longest, at least 0. So a delay
            counts once, however many packs it makes late. NaN if unseen.
        clocks: one for each worker.
        description: of the run, for people.
        plan: the plan of worker 0 as JSON, see `ctl.phases.plan.plan`; or None.
    """

    rows: tuple[Row, ...]
    steps: np.ndarray
    origin: float
    begin: np.ndarray
    marks: Mapping[str, np.ndarray]
    step_seconds: np.ndarray
    phases: Mapping[str, np.ndarray]
    hidden: np.ndarray
    exposed: np.ndarray
    packs: tuple[PackTimes, ...]
    late: np.ndarray
    clocks: tuple[Clock, ...]
    description: str = ""
    plan: Mapping[str, Any] | None = None

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.clocks)

    @property
    def clock_error(self) -> float:
        """The most by which times of two workers may be wrong to each other, seconds: clocks may be
        wrong in opposite directions, so two errors add up."""
        return sum(sorted(clock.error for clock in self.clocks)[-2:])

    @property
    def reduce_unseen(self) -> bool:
        """Whether replicas reduce without a mark: the step has a `sum_gradients` of its own."""
        return len(self.rows) > 1 and not self.packs

    @property
    def bytes(self) -> int:
        """Bytes of all packs on each replica."""
        return sum(pack.bytes for pack in self.packs)


def join(windows: Sequence[Window]) -> Timeline:
    """The timeline of the steps that all ``windows`` have together with the step before.

    Raises:
        UsageError: the windows are not of all workers of one run, or share no two steps in a row.
    """
    windows = sorted(windows, key=lambda window: window.worker)
    check_together(windows)
    common = set.intersection(*(set(window.steps.tolist()) for window in windows))
    steps = np.array(sorted(step for step in common if step - 1 in common), np.int64)
    if not len(steps):
        raise UsageError("the workers' windows have no two consecutive steps in common")
    clocks = tuple(_clock(window, windows[0], np.array(sorted(common))) for window in windows)
    origin = float(_stamps(windows[0], steps - 1)["apply"].min())
    rows, marks, begin = [], [], []
    for window, clock in zip(windows, clocks, strict=True):
        shift = origin + clock.offset
        rows += [Row(window.worker, replica) for replica in range(len(window.stamps))]
        marks.append({name: t - shift for name, t in _stamps(window, steps).items()})
        begin.append(_stamps(window, steps - 1)["apply"] - shift)
    joined = {
        name: np.concatenate([m[name] for m in marks])
        for name in windows[0].names
        if all(name in m for m in marks)  # some workers may have no profile
    }
    return _timeline(tuple(rows), steps, origin, np.concatenate(begin), joined, clocks, windows[0])


def _stamps(window: Window, steps: np.ndarray) -> dict[str, np.ndarray]:
    """Name of the mark -> [R, S], its stamps in these ``steps``."""
    stamps = window.stamps[:, np.searchsorted(window.steps, steps)]
    return {name: stamps[:, :, index] for index, name in enumerate(window.names)}


def _clock(window: Window, first: Window, steps: np.ndarray) -> Clock:
    if window.worker == first.worker:
        return Clock(window.worker, 0.0, 0.0)
    if len(window.barriers):
        (arrived, done), (arrived_0, done_0) = window.barriers.T, first.barriers.T
    else:
        arrived, done = _around_packs(window, steps)
        arrived_0, done_0 = _around_packs(first, steps)
    low, high = arrived - done_0, done - arrived_0
    low, high = low[~np.isnan(low)], high[~np.isnan(high)]
    if not len(low):
        raise UsageError(
            "cannot align the clocks of the workers: the windows have neither barriers nor packs"
        )
    drift = DRIFT * max(window.clock_age, first.clock_age)
    return Clock(window.worker, float(low.max()) - drift, float(high.min()) + drift)


def _around_packs(window: Window, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When this worker came to each pack and when it left it, [P * S] each."""
    at = _stamps(window, steps)
    packs = range(len(window.packs))
    arrived = [at[f"ready{number}"].max(axis=0) for number in packs]
    return np.ravel(arrived), np.ravel([at[f"done{number}"].min(axis=0) for number in packs])


def _timeline(
    rows: tuple[Row, ...],
    steps: np.ndarray,
    origin: float,
    begin: np.ndarray,
    marks: dict[str, np.ndarray],
    clocks: tuple[Clock, ...],
    first: Window,
) -> Timeline:
    # A busy machine stamps late: clip the stamps, so that no phase is negative.
    arrived = np.maximum(marks["input"], begin)
    forward = np.fmax(marks["forward"], arrived) if "forward" in marks else arrived
    known = ~np.isnan(marks["forward"]) if "forward" in marks else np.zeros(arrived.shape, bool)
    # If XLA compiled the whole step, only its beginning and its end are stamped.
    whole = np.isnan(marks["backward"])
    computed = np.maximum(np.where(whole, marks["apply"], marks["backward"]), forward)
    applied = np.maximum(marks["apply"], computed)

    packs, spans = [], []
    late = np.zeros(begin.shape)
    exposed = {name: np.zeros(begin.shape) for name in ("pack", "wait", "transfer")}
    covered, covered_after = np.full(begin.shape, -np.inf), computed
    before = np.full(begin.shape, -np.inf)
    factor = bus_factor(len(rows))
    for number, pack in enumerate(first.packs):
        ready, done = marks[f"ready{number}"], marks[f"done{number}"]
        if np.isnan(ready).any() or np.isnan(done).any():
            continue  # the step reduces in a loop or a branch
        start = np.minimum(np.maximum(ready, before), done) if first.in_order else ready
        begun = np.clip(np.fmax(marks.get(f"begun{number}", start), start), None, done)
        ended = np.clip(np.fmin(marks.get(f"ended{number}", done), done), begun, None)
        profiled = ~np.isnan(marks.get(f"begun{number}", np.full(begin.shape, np.nan)))
        all_there = begun.max(axis=0)
        packing = (begun - start) + (done - ended)
        packs.append(
            PackTimes(
                name=pack.name,
                bytes=pack.bytes,
                ready=ready,
                start=start,
                begun=begun,
                packing=np.where(profiled, packing, np.nan),
                wait=all_there - begun,
                transfer=np.maximum(ended - all_there, 0.0),
                bus_factor=factor,
            )
        )
        # Not ``begun``: it waits for the pack before, which the same delay has made late.
        came = np.minimum(ready, done)
        late = np.maximum(late, came - _median_of_others(came))
        spans.append((start, done))
        moments = [start, begun, np.clip(all_there, begun, ended), ended, done]
        for name, since, until in zip(
            ("pack", "wait", "transfer", "pack"), moments, moments[1:], strict=False
        ):
            exposed[name] += np.maximum(0.0, until - np.maximum(since, covered_after))
        covered, covered_after = np.maximum(covered, done), np.maximum(covered_after, done)
        before = done
    unknown = np.full(begin.shape, np.nan)
    unseen = len(rows) > 1 and not packs
    if unseen:
        exposed, late = dict.fromkeys(exposed, unknown), unknown
    reduced = np.maximum(covered, computed) if packs else computed
    applied = np.maximum(applied, reduced)
    total = exposed["pack"] + exposed["wait"] + exposed["transfer"]
    phases = {
        "input": arrived - begin,
        "forward": np.where(known, forward - arrived, np.nan),
        "backward": computed - forward,
        "pack": exposed["pack"] if "begun0" in marks else unknown,
        "wait": exposed["wait"],
        "transfer": exposed["transfer"],
        "apply": np.where(whole | unseen, np.nan, applied - reduced),
        "other": applied - computed if unseen else reduced - computed - total,
    }
    return Timeline(
        rows=rows,
        steps=steps,
        origin=origin,
        begin=begin,
        marks=marks,
        step_seconds=applied - begin,
        phases=phases,
        hidden=covered_seconds(spans) - total,
        exposed=total,
        packs=tuple(packs),
        late=late,
        clocks=clocks,
        description=first.description,
        plan=first.plan,
    )


def of_one_step(values: np.ndarray) -> float:
    """The median over the steps of each row, and the mean of these over the rows; [N, S] -> one.

    The verdict, the figures of the page, the row "mean" of the table and the scalars all say this,
    so a reader can check them in the table. NaNs do not count; NaN if there is nothing else.
    """
    rows = [row[~np.isnan(row)] for row in values]
    medians = [float(np.median(row)) for row in rows if row.size]
    return sum(medians) / len(medians) if medians else float("nan")


def exposed_seconds(timeline: Timeline, worker: int) -> tuple[float, float]:
    """All seconds of the steps of a worker's replicas without their input, and those that were
    exposed communication. Steps in which it is unseen do not count."""
    rows = [row.worker == worker for row in timeline.rows]
    exposed = timeline.exposed[rows]
    seconds = timeline.step_seconds[rows] - timeline.phases["input"][rows]
    seen = ~np.isnan(exposed + seconds)
    return float(seconds[seen].sum()), float(exposed[seen].sum())


def covered_seconds(spans: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Seconds that lie in at least one of the spans, of which any may overlap. ``spans``: begin and
    end of each, float64 arrays of one shape, which the result has, too; 0.0 without spans."""
    if not spans:
        return np.zeros([])
    begin, end = (np.stack(moments) for moments in zip(*spans, strict=True))
    order = np.argsort(begin, axis=0)
    begin, end = np.take_along_axis(begin, order, 0), np.take_along_axis(end, order, 0)
    begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end, axis=0)[:-1])
    return np.maximum(0.0, end - begin).sum(axis=0)


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """[N, S] -> [N, S]: the median over the other rows; a single row keeps its values."""
    if len(values) == 1:
        return values
    return np.stack(
        [np.median(np.delete(values, row, axis=0), axis=0) for row in range(len(values))]
    )
