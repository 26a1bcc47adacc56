"""Names the worker that is late, and the phase that makes it late.

By noise alone, some worker is last in every step. So a step counts against a worker only if the
others waited for it for at least a tenth of the median step and at least the error of the clocks. A
worker is named only if at least 80 % of the steps count against it.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from ctl.inspect.measure.timeline import Timeline

LEAST_SHARE = 0.1  # of the median step: the shortest wait that counts
LEAST_STEPS = 0.8  # of all steps: as many must count against a worker to name it

# The phases that can make a worker late to the packs. "apply" is that of the step before: it comes
# after the packs of that step, so nobody waits for it until the next ones.
_CAUSES = ("apply", "input", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class Blame:
    """One late worker.

    Attributes:
        worker: its index.
        replica: the late replica, counted within the worker.
        phase: the phase in which it loses most time; "apply" is that of the step before.
        steps: the number of steps that count against it.
        of: the number of all steps.
        seconds: how long the others waited for it, median over ``steps``.
        excess: how many seconds longer ``phase`` took than on the others, median over ``steps``.
    """

    worker: int
    replica: int
    phase: str
    steps: int
    of: int
    seconds: float
    excess: float


def accused(timeline: Timeline) -> list[tuple[int, str] | None]:
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
    found: list[tuple[int, str] | None] = []
    for step, row in enumerate(timeline.late.argmax(axis=0)):
        late = timeline.late[row, step] >= least[row]
        found.append((int(row), causes[int(excess[:, row, step].argmax())]) if late else None)
    return found


def blame(timeline: Timeline) -> Blame | None:
    """The worker that is late in most steps; None if there is none."""
    steps = accused(timeline)
    workers = collections.Counter(timeline.rows[each[0]].worker for each in steps if each)
    if not workers:
        return None
    worker, times = workers.most_common(1)[0]
    if times < LEAST_STEPS * len(steps):
        return None
    its = [
        (step, *each)
        for step, each in enumerate(steps)
        if each and timeline.rows[each[0]].worker == worker
    ]
    phase = collections.Counter(phase for _, _, phase in its).most_common(1)[0][0]
    row = collections.Counter(row for _, row, _ in its).most_common(1)[0][0]
    causes, excess = _excess(timeline)
    when = [step for step, _, _ in its]
    return Blame(
        worker=worker,
        replica=timeline.rows[row].replica,
        phase=phase,
        steps=times,
        of=len(steps),
        seconds=float(np.median([timeline.late[row, step] for step, row, _ in its])),
        excess=float(np.median(excess[causes.index(phase), row, when])),
    )


def _excess(timeline: Timeline) -> tuple[list[str], np.ndarray]:
    """Seconds by which each phase exceeds the median of other workers, float64 [causes, N, S]."""
    worker = np.array([row.worker for row in timeline.rows])
    causes, all_of_them = [], []
    for cause in _CAUSES:
        took = timeline.phases[cause]
        if np.isnan(took).all():
            continue
        if cause == "apply":
            took = np.concatenate([np.zeros([len(took), 1]), took[:, :-1]], axis=1)
        causes.append(cause)
        all_of_them.append(
            np.stack(
                [took[r] - np.median(took[worker != worker[r]], axis=0) for r in range(len(worker))]
            )
        )
    return causes, np.stack(all_of_them)
