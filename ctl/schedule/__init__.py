"""Learning rate schedules, and ``python -m ctl.schedule``, which prints and draws one.

    python -m ctl.schedule --schedule=cosine --warmup=0.5ep --epochs=12 --steps_per_epoch=156 \\
        --plot=rate.svg
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily
from ctl.flags.durations import SCHEDULES

if TYPE_CHECKING:
    from ctl.schedule.schedules import *  # noqa: F403

# The classes are called as the schedules: ``inverse_sqrt`` is `InverseSqrt`.
_CLASSES = [name.title().replace("_", "") for name in SCHEDULES]
__all__ = sorted([*_CLASSES, "Schedule", "make_schedule"])

__getattr__, __dir__ = load_lazily(
    __name__, __all__, dict.fromkeys(__all__, "ctl.schedule.schedules")
)
