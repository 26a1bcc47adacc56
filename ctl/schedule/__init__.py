"""Learning rate schedules, and ``python -m ctl.schedule``, which prints and draws one.

    python -m ctl.schedule --schedule=cosine --warmup=0.5ep --epochs=12 --steps_per_epoch=156 \\
        --plot=rate.svg
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.schedule.schedules import (
        Constant,
        Cosine,
        Exponential,
        InverseSqrt,
        Piecewise,
        Plateau,
        Polynomial,
        Schedule,
        make_schedule,
    )

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "InverseSqrt",
    "Piecewise",
    "Plateau",
    "Polynomial",
    "Schedule",
    "make_schedule",
]

__getattr__, __dir__ = load_lazily(
    __name__, __all__, dict.fromkeys(__all__, "ctl.schedule.schedules")
)
