"""Names the worker that is late, and the phase that makes it late.

By noise alone, some worker is last in every step. So a step counts against a worker only if the
others waited for it for at least a tenth of the median step and at least the error of the clocks,
and if one of its phases explains the wait. A worker is named if at least 80 % of the steps count
against it, or else if it is late in a rhythm, such as in every 4th step, that is no chance.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from ctl.inspect.measure.timeline import Timeline

LEAST_SHARE = 0.1  # of the median step: the shortest wait that counts
LEAST_STEPS = 0.8  # of the steps, or of those of a rhythm: as many must count against a worker
REPEATS = 4  # the fewest steps that make a rhythm
LONGEST = 100  # steps from one late step of a rhythm to the next, at most
CHANCE = 0.005  # of a rhythm among late steps in random order, above which it names nobody

# The phases that can make a worker late to the packs. "apply" is that of the step before: it comes
# after the packs of that step, so nobody waits for it until the next ones.
_CAUSES = ("apply", "input", "forward", "backward")


class Accusation(NamedTuple):
    """A late row in one step.

    Attributes:
        row: its index in `Timeline.rows`.
        phase: the phase in which it lost most time; "apply" is that of the step before.
        seconds: how late it was.
        excess: how many seconds longer ``phase`` took than on the other workers.
    """

    row: int
    phase: str
    seconds: float
    excess: float


@dataclasses.dataclass(frozen=True)
class LateWorker:
    """One late worker.

    Attributes:
        worker: its index.
        replica: the late replica, counted within the worker.
        phase: the phase in which it loses most time; "apply" is that of the step before.
        every: 1 if it is late in most steps, 4 if in every 4th.
        steps: the number of steps that count against it.
        of: the number of steps out of which ``steps`` are counted: all, or those of the rhythm.
        seconds: how long the others waited for it, median over ``steps``.
        excess: how many seconds longer ``phase`` took than on the others, median over those of
            ``steps`` in which it lost most time in this phase.
    """

    worker: int
    replica: int
    phase: str
    every: int
    steps: int
    of: int
    seconds: float
    excess: float

    @property
    def when(self) -> str:
        """In which steps it is late: "in 19 of 20 steps" or "in every 4th step"."""
        if self.every == 1:
            return f"in {self.steps} of {self.of} steps"
        teens = 10 <= self.every % 100 < 20
        suffix = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(self.every % 10, "th")
        return f"in every {self.every}{suffix} step"


def accused(timeline: Timeline) -> list[Accusation | None]:
    """For each step, the late row and the phase that made it late; None if no wait counts.

    With one worker every step has None: its replicas on a CPU share the cores and compute in turn.
    """
    measured = not np.isnan(timeline.step_seconds).all()
    if timeline.workers < 2 or not timeline.packs or not measured:
        return [None] * len(timeline.steps)
    errors = np.array([clock.error for clock in timeline.clocks])
    # Two clocks may be wrong in opposite directions, so their errors add up.
    known = np.array([errors[row.worker] + errors.max() for row in timeline.rows])
    least = np.maximum(LEAST_SHARE * float(np.median(timeline.step_seconds)), known)
    causes, excess = _excess(timeline)
    found: list[Accusation | None] = []
    for step, row in enumerate(timeline.late.argmax(axis=0)):
        cause = int(excess[:, row, step].argmax())
        late, longer = float(timeline.late[row, step]), float(excess[cause, row, step])
        # A delay is the sum of what its phases took longer, so the largest has its share of it.
        # Otherwise the delay has another cause, such as sums that arrived later than on the others.
        counts = late >= least[row] and longer >= late / len(_CAUSES)
        found.append(Accusation(int(row), causes[cause], late, longer) if counts else None)
    return found


def late_worker(timeline: Timeline) -> LateWorker | None:
    """The worker that is late in most steps, or else in a rhythm; None if there is none."""
    steps = accused(timeline)
    late: dict[int, np.ndarray] = {}  # worker -> [S], seconds that count against it
    for step, each in enumerate(steps):
        if each:
            worker = timeline.rows[each.row].worker
            late.setdefault(worker, np.zeros(len(steps)))[step] = each.seconds
    by_loss = sorted(late.items(), key=lambda item: -item[1].sum())
    for worker, seconds in by_loss:
        if np.count_nonzero(seconds) >= LEAST_STEPS * len(steps):
            return _named(timeline, steps, worker, every=1, first=0)
    for worker, seconds in by_loss:
        if rhythm := _rhythm(timeline.steps, seconds):
            return _named(timeline, steps, worker, *rhythm)
    return None


def _named(
    timeline: Timeline, steps: list[Accusation | None], worker: int, every: int, first: int
) -> LateWorker:
    """The blame of ``worker`` for the steps whose number modulo ``every`` is ``first``."""
    in_rhythm = timeline.steps % every == first
    its = [
        each
        for each, counted in zip(steps, in_rhythm, strict=True)
        if each and counted and timeline.rows[each.row].worker == worker
    ]
    phase = collections.Counter(each.phase for each in its).most_common(1)[0][0]
    row = collections.Counter(each.row for each in its).most_common(1)[0][0]
    return LateWorker(
        worker=worker,
        replica=timeline.rows[row].replica,
        phase=phase,
        every=every,
        steps=len(its),
        of=int(in_rhythm.sum()),
        seconds=float(np.median([each.seconds for each in its])),
        excess=float(np.median([each.excess for each in its if each.phase == phase])),
    )


def _rhythm(steps: np.ndarray, late: np.ndarray) -> tuple[int, int] | None:
    """The shortest rhythm of a worker against whom ``late`` seconds of ``steps`` count, [S] each.

    ``(every, first)``: it is late in the steps whose number modulo ``every`` is ``first``. None if
    there is none, or if as many late steps in random order would show one as clear with a chance
    above `CHANCE`.
    """
    longest = min(len(steps) // REPEATS, LONGEST)
    tried = longest * (longest + 1) // 2 - 1
    for every in range(2, longest + 1):
        for first in range(every):
            its = steps % every == first
            usual = float(np.median(late[its])) if its.any() else 0.0
            if usual <= 0:
                continue
            # Shorter delays, which noise adds in other steps, do not hide the rhythm.
            long = late >= usual / 2
            hits, size = int(long[its].sum()), int(its.sum())
            if size < REPEATS or hits < LEAST_STEPS * size:
                continue
            if tried * _chance(len(steps), int(long.sum()), size, hits) <= CHANCE:
                return every, first
    return None


def _chance(steps: int, late: int, size: int, hits: int) -> float:
    """The chance that ``hits`` or more of ``size`` given steps are late, if ``late`` of all
    ``steps`` are, in random order: the upper tail of the hypergeometric distribution."""
    ways = sum(
        math.comb(size, k) * math.comb(steps - size, late - k)
        for k in range(hits, min(size, late) + 1)
    )
    return ways / math.comb(steps, late)


def _excess(timeline: Timeline) -> tuple[list[str], np.ndarray]:
    """Seconds by which each phase exceeds the median of other workers, float64 [causes, N, S]."""
    worker = np.array([row.worker for row in timeline.rows])
    causes, all_of_them = [], []
    for cause in _CAUSES:
        took = timeline.phases[cause]
        if np.isnan(took).all():
            continue
        if cause == "apply":
            # Of the step before the first one, only the end is known: when the first one began.
            took = np.concatenate([timeline.begin[:, :1], took[:, :-1]], axis=1)
        causes.append(cause)
        all_of_them.append(
            np.stack(
                [took[r] - np.median(took[worker != worker[r]], axis=0) for r in range(len(worker))]
            )
        )
    return causes, np.stack(all_of_them)
