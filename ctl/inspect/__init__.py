"""Sees through the all-reduce: what moves, how long it takes, who is late.

The core opens this package through two doors only, `ctl.TrainStep.plan` and
`ctl.TrainStep.inspect`. The other direction is free: it looks at the loop, the step and the graph
from outside, and through one hook, ``TrainStep.observer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl import load_lazily

if TYPE_CHECKING:
    from ctl.inspect.plan.plan import Collective, Lint, Plan

__all__ = ["Collective", "Lint", "Plan"]

__getattr__, __dir__ = load_lazily(
    __name__, __all__, dict.fromkeys(__all__, "ctl.inspect.plan.plan")
)
