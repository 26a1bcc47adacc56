"""Learning rate schedules, and ``python -m ctl.schedule``, which prints and draws one.

    python -m ctl.schedule --schedule=cosine --warmup=0.5ep --epochs=12 --steps_per_epoch=156 \\
        --plot=rate.svg
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import hand_on

if TYPE_CHECKING:
    from ctl.schedule.schedules import *  # noqa: F403

__getattr__, __dir__ = hand_on("ctl.schedule.schedules")
