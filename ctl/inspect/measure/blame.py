"""Who is late, and in what: the only place that accuses a worker.

Somebody is always last, by noise alone. So a step counts against a worker only when the others
waited for it for a tenth of the step or more, and for more than the clocks may be wrong by; and a
worker is named only when so many steps count against it that noise cannot be it.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from ctl.inspect.measure.timeline import Timeline

LEAST_SHARE = 0.1  # of the median step, for a step to count
LEAST_STEPS = 0.8  # of all steps, for a worker to be named

# What can make a worker late to the packs. "apply" is that of the step before, after whose packs
# nobody waits for anybody.
_CAUSES = ("apply", "input", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class Blame:
    """One late worker.

    Attributes:
        worker: its index.
        replica: of that worker, where it has several.
        phase: in which it loses most of the time; "apply" is that of the step before.
        steps: in how many of ``of`` steps the others waited for it, for a tenth of a step or more.
        seconds: how long they waited, median over those steps.
        excess: how much longer its phase took than that of the others, median over those steps.
    """

    worker: int
    replica: int
    phase: str
    steps: int
    of: int
    seconds: float
    excess: float


def accused(timeline: Timeline) -> list[tuple[int, str] | None]:
    """For each step, the row that the others waited for and the phase that made it late; None where
    nobody waited for so long that it counts. With one worker nobody is accused: replicas on a
    CPU share its cores and compute in turn."""
    measured = not np.isnan(timeline.step_seconds).all()
    if timeline.workers < 2 or not timeline.packs or not measured:
        return [None] * len(timeline.steps)
    errors = np.array([clock.error for clock in timeline.clocks])
    # Of two clocks, each may be wrong in its own direction.
    known = np.array([errors[row.worker] + errors.max() for row in timeline.rows])
    least = np.maximum(LEAST_SHARE * float(np.median(timeline.step_seconds)), known)
    causes, excess = _excess(timeline)
    found: list[tuple[int, str] | None] = []
    for step, row in enumerate(timeline.late.argmax(axis=0)):
        late = timeline.late[row, step] >= least[row]
        found.append((int(row), causes[int(excess[:, row, step].argmax())]) if late else None)
    return found


def blame(timeline: Timeline) -> Blame | None:
    """The worker that is late again and again; None where there is none."""
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
    """How much longer each phase took on a row than on the median of the other workers' rows,
    float64 [causes, N, S]."""
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
