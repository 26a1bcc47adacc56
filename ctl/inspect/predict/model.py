"""Predicts the time of a step on other replicas or links, and how much of it is communication.

The step is simulated. Packs become ready during the backward pass, as a plan or marks say, and go
through the network one after the other, each in the time that `ctl.inspect.predict.cost` gives.

Of several methods to communicate, each has a plan and a step that was measured where the link costs
next to nothing, such as between processes of one machine. What a slow link adds is computed from
the plan. No transfer hides behind the backward pass, as with a single pack.

Pure Python, except for `measured_step`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ctl.errors import UsageError
from ctl.inspect.measure.link import bus_factor
from ctl.inspect.predict import cost
from ctl.inspect.predict.cost import Network
from ctl.phases.plan.plan import GATHERS, Plan

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import Timeline

_CONDITIONAL = re.compile(r"(^|/)cond(_\d+)?/")


@dataclasses.dataclass(frozen=True)
class Pack:
    """One all-reduce of a step.

    Attributes:
        bytes: its size on each replica.
        ready: the share of the backward pass that must be done before it can start, in [0, 1].
    """

    bytes: float
    ready: float


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one replica, without communication; seconds.

    Attributes:
        forward, backward, apply: the phases.
        packs: in the order in which they are reduced; each waits for the one before it.
        other: the rest: input, metrics, the host.
        jitter: the standard deviation of the compute time from step to step.
        contention: the factor by which a transfer takes longer while the backward pass runs; 1 if
            they share nothing.
    """

    forward: float
    backward: float
    apply: float
    packs: tuple[Pack, ...]
    other: float = 0.0
    jitter: float = 0.0
    contention: float = 1.0

    @property
    def bytes(self) -> float:
        """Bytes of all packs on each replica."""
        return sum(pack.bytes for pack in self.packs)

    @property
    def alone(self) -> float:
        """Seconds of a step without any communication."""
        return self.forward + self.backward + self.apply + self.other

    def with_share(self, share: float) -> Step:
        """The step with this share of the examples, for strong scaling; apply and other stay."""
        return dataclasses.replace(
            self, forward=self.forward * share, backward=self.backward * share
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step on several replicas; seconds.

    Attributes:
        replicas: their number n.
        step: the whole step.
        communication: all transfers, hidden or not.
        exposed: the part of the transfers that the backward pass does not hide.
        wait: the wait for the slowest replica.
        efficiency: the step of one replica alone over this step (weak scaling), or over n times
            this step (strong scaling).
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
    """Predicts the step on ``replicas`` replicas.

    Args:
        step: on one replica.
        replicas: their number n.
        seconds: bytes -> seconds of an all-reduce on that many replicas.
        strong: strong scaling: n replicas share the batch of one, so each has 1/n of its examples.
            By default each replica has a whole batch: weak scaling.

    The times of replicas are normal and independent, see `largest_of`.
    """
    share = step.with_share(1 / replicas) if strong else step
    useful = step.alone / (replicas if strong else 1)
    if replicas == 1:
        return Prediction(1, step.alone, 0.0, 0.0, 0.0, 1.0)
    wait = share.jitter * largest_of(replicas)
    backward_end = share.forward + share.backward
    free = communication = 0.0
    for pack in share.packs:
        start = max(free, share.forward + pack.ready * share.backward)
        free = _end(start, seconds(pack.bytes), backward_end, share.contention)
        communication += free - start
    exposed = max(0.0, free - backward_end)
    total = share.alone + exposed + wait
    return Prediction(replicas, total, communication, exposed, wait, useful / total)


@functools.cache
def largest_of(count: int) -> float:
    """The mean of the largest of ``count`` independent values of the standard normal distribution.

    The integral over z > 0 of 1 - F(z)^n - F(-z)^n, F the distribution function (David and Nagaraja
    2003, "Order Statistics", section 3.1), by the trapezoidal rule, which is exact to rounding for
    an even function that decays so fast.
    """
    step = 1 / 64

    def integrand(z: float) -> float:
        above = math.erfc(z / math.sqrt(2)) / 2
        return 1 - (1 - above) ** count - above**count

    return step * (integrand(0.0) / 2 + sum(integrand(step * k) for k in range(1, 640)))


def _end(start: float, seconds: float, backward_end: float, contention: float) -> float:
    """When a transfer ends that is ``contention`` times as slow until ``backward_end``."""
    beside = max(0.0, backward_end - start)
    if seconds * contention <= beside:
        return start + seconds * contention
    return start + beside + seconds - beside / contention


def measured_step(timeline: Timeline, contention: float = 1.0) -> Step:
    """The step that ``python -m ctl.inspect run`` measured: medians over replicas and steps.

    Raises:
        UsageError: the timeline has no forward pass or no packs.
    """
    import numpy as np

    phases, marks = timeline.phases, timeline.marks
    if not timeline.packs or np.isnan(phases["forward"]).all():
        raise UsageError(
            "the windows have no packs or no forward pass: measure with several replicas, "
            "--jit_compile=off and --accumulate_steps=1"
        )

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
    # Half of the span that holds two thirds of the values: a standard deviation that is robust
    # against rare long steps, which a normal distribution does not have.
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


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to communicate.

    Attributes:
        name: for the table.
        plan: of its step.
        seconds: of a step where the link costs next to nothing.
        every: the number of steps from one use of its conditional collectives to the next, as the
            ``local_steps`` of `ctl.recipes.local_sgd`.
    """

    name: str
    plan: Plan
    seconds: float
    every: int = 1


@dataclasses.dataclass(frozen=True)
class MethodPrediction:
    """A step of a method on a link: its seconds, and the bytes that a replica sends in it, both in
    the mean."""

    name: str
    step: float
    sent: float


def predict_method(method: Method, network: Network, replicas: int) -> MethodPrediction:
    """Predicts a step of ``method``.

    Raises:
        UsageError: the plan has a collective of unknown size.
    """
    seconds = sent = 0.0
    for collective in (*method.plan.collectives, *method.plan.other):
        if not collective.in_loop:  # once for each call from Python, not for each step
            continue
        share = 1 / method.every if _CONDITIONAL.search(collective.name) else 1.0
        size = collective.bytes
        if size is None:
            raise UsageError(f"the plan of {method.name}: the size of {collective.name} is unknown")
        if collective.kind in GATHERS:
            seconds += share * cost.gather(network, replicas, size)
            sent += share * (replicas - 1) * size
        else:
            seconds += share * cost.ring(network, replicas, size)
            sent += share * bus_factor(replicas) * size
    return MethodPrediction(method.name, method.seconds + seconds, sent)


def table_of_methods(predictions: list[MethodPrediction], replicas: int) -> list[str]:
    """The lines of a table, the fastest first."""
    ordered = sorted(predictions, key=lambda each: each.step)
    width = max(len("method"), *(len(each.name) for each in ordered))
    lines = [f"{replicas} replicas", f"{'method':<{width}}{'sent KiB':>12}{'step ms':>12}"]
    for each in ordered:
        lines.append(f"{each.name:<{width}}{each.sent / 1024:12.1f}{each.step * 1e3:12.3f}")
    return lines
