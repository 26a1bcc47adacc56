"""How long a step would take on other numbers of replicas, and how much of it is communication.

The step is simulated: packs become ready during the backward pass, as the plan or the marks say,
and go through the network one after the other, in the time that `ctl.inspect.predict.cost` gives.
Pure Python: what was measured comes from files, what was not from flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ctl.errors import UsageError

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Pack:
    """One all-reduce of a step.

    Attributes:
        bytes: on each replica.
        ready: the share of the backward pass that must be done before it can start, in [0, 1].
    """

    bytes: float
    ready: float


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one replica, without communication; seconds.

    Attributes:
        forward, backward, apply: the phases.
        other: what is left: input, metrics, the host.
        packs: in the order in which they are reduced; each waits for the one before it.
        jitter: standard deviation of the compute time from step to step.
        contention: how many times as long a transfer takes while the backward pass is running
            beside it; 1 where they share nothing.
    """

    forward: float
    backward: float
    apply: float
    packs: tuple[Pack, ...]
    other: float = 0.0
    jitter: float = 0.0
    contention: float = 1.0

    @property
    def alone(self) -> float:
        """Seconds of a step without any communication."""
        return self.forward + self.backward + self.apply + self.other

    def with_share(self, share: float) -> Step:
        """The step with that share of the examples: strong scaling. What does not depend on the
        examples (apply, other) stays."""
        return dataclasses.replace(
            self, forward=self.forward * share, backward=self.backward * share
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of a step on some replicas; seconds.

    Attributes:
        replicas: how many.
        step: the whole step.
        communication: all transfers, hidden or not.
        exposed: that part of the transfers that nothing hides.
        wait: for the slowest of the replicas.
        efficiency: useful work over time: the step of one replica alone over this one (weak
            scaling), or that over n times this one (strong scaling).
    """

    replicas: int
    step: float
    communication: float
    exposed: float
    wait: float
    efficiency: float


def predict(
    step: Step, replicas: int, seconds: Callable[[float], float], *, strong: bool = False
) -> Prediction:
    """The step on ``replicas`` replicas.

    Args:
        step: on one replica.
        replicas: how many take part.
        seconds: the time of an all-reduce of so many bytes on that many replicas.
        strong: the global batch stays that of one replica, so each has 1/n of the examples. By
            default each has all of them: weak scaling.

    The slowest of n replicas whose times are normal with standard deviation s is expected
    s·sqrt(2·ln n) after the mean (Cramér 1946, section 28.6, the leading term).
    """
    share = step.with_share(1 / replicas) if strong else step
    useful = step.alone / (replicas if strong else 1)
    if replicas == 1:
        return Prediction(1, step.alone, 0.0, 0.0, 0.0, 1.0)
    wait = share.jitter * math.sqrt(2 * math.log(replicas))
    backward_end = share.forward + share.backward
    free = communication = 0.0
    for pack in share.packs:
        start = max(free, share.forward + pack.ready * share.backward)
        free = _end(start, seconds(pack.bytes), backward_end, share.contention)
        communication += free - start
    exposed = max(0.0, free - backward_end)
    total = share.alone + exposed + wait
    return Prediction(replicas, total, communication, exposed, wait, useful / total)


def _end(start: float, seconds: float, backward_end: float, contention: float) -> float:
    """When a transfer ends that takes ``seconds`` by itself and ``contention`` times as long up to
    ``backward_end``."""
    beside = max(0.0, backward_end - start)
    if seconds * contention <= beside:
        return start + seconds * contention
    return start + beside + seconds - beside / contention


def measured_step(timeline: Timeline, contention: float = 1.0) -> Step:
    """The step that ``python -m ctl.inspect run`` measured: medians over its replicas and steps.

    Raises:
        UsageError: it has no forward pass or no packs, or stamped none of them.
    """
    import numpy as np

    phases, marks = timeline.phases, timeline.marks
    if not timeline.packs or np.isnan(phases["forward"]).all():
        raise UsageError("these windows hold no packs or no forward pass: measure them again")

    def median(values: np.ndarray) -> float:
        return float(np.nanmedian(values))

    backward = marks["backward"] - marks["forward"]
    packs = [
        Pack(
            pack.bytes,
            min(1.0, max(0.0, median((marks[f"ready{k}"] - marks["forward"]) / backward))),
        )
        for k, pack in enumerate(timeline.packs)
    ]
    # Half of the span in which two thirds are: a standard deviation that a rare long step, which no
    # normal distribution has, does not blow up.
    low, high = np.nanpercentile(phases["forward"] + phases["backward"], [16, 84], axis=1)
    return Step(
        forward=median(phases["forward"]),
        backward=median(phases["backward"]),
        apply=median(phases["apply"]),
        packs=tuple(packs),
        other=median(phases["input"] + phases["other"]),
        jitter=median((high - low) / 2),
        contention=contention,
    )
