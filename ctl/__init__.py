"""Custom training loops for TensorFlow: an explicit loop that owns its all-reduce.

The hot path is three files: `ctl.loop`, `ctl.step`, `ctl.reduce`. The names below are loaded when
they are first used, so that ``import ctl`` and every ``--help`` stay fast: TensorFlow takes
seconds to load.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "CheckpointManager": "ctl.checkpoint",
    "EvalStep": "ctl.step",
    "Evaluator": "ctl.evaluator",
    "Every": "ctl.actions",
    "Loop": "ctl.loop",
    "TrainStep": "ctl.step",
    "make_strategy": "ctl.strategy",
}
_MODULES = {
    *("actions", "checkpoint", "cluster", "data", "errors", "models", "schedule", "strategy"),
    "workers",
}
__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"ctl.{name}")
    raise AttributeError(f"module 'ctl' has no attribute {name!r}")
