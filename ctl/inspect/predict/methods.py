"""Which way to communicate is the fastest on a slow link: from a plan and a measured step of each.

A step is measured where the link costs next to nothing, such as between processes of one machine.
What the slow link adds is computed from the plan. No transfer hides behind the backward pass, as
with a single pack. Pure Python.
"""

from __future__ import annotations

import dataclasses
import re

from ctl.errors import UsageError
from ctl.inspect.predict import cost
from ctl.inspect.predict.cost import Network
from ctl.phases.plan.plan import GATHERS, Collective, Plan

_CONDITIONAL = re.compile(r"(^|/)cond(_\d+)?/")


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
    """A step of a method on a link.

    Attributes:
        name: of the method.
        step: seconds of a step, in the mean.
        sent: bytes that a replica sends in a step, in the mean.
    """

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
        size = _known(collective, method.name)
        if collective.kind in GATHERS:
            seconds += share * cost.gather(network, replicas, size)
            sent += share * (replicas - 1) * size
        else:
            seconds += share * cost.ring(network, replicas, size)
            sent += share * cost.bus_factor(replicas) * size
    return MethodPrediction(method.name, method.seconds + seconds, sent)


def _known(collective: Collective, method: str) -> int:
    if collective.bytes is None:
        raise UsageError(f"the plan of {method}: the size of {collective.name} is not known")
    return collective.bytes


def table(predictions: list[MethodPrediction], replicas: int) -> list[str]:
    """The lines of a table, the fastest method first."""
    ordered = sorted(predictions, key=lambda each: each.step)
    width = max(len("method"), *(len(each.name) for each in ordered))
    lines = [f"{replicas} replicas", f"{'method':<{width}}{'sent KiB':>12}{'step ms':>12}"]
    for each in ordered:
        lines.append(f"{each.name:<{width}}{each.sent / 1024:12.1f}{each.step * 1e3:12.3f}")
    return lines
