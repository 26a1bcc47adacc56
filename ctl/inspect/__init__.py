"""Inspects the all-reduce: what it moves, how long it takes, which worker is late.

It stands above the loop, and measures a step through ``TrainStep.observer``; see `ctl.Inspection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.phases.plan.plan import Collective, Lint, Plan

__all__ = ["Collective", "Lint", "Plan"]

__getattr__, __dir__ = load_lazily(
    __name__, __all__, dict.fromkeys(__all__, "ctl.phases.plan.plan")
)
