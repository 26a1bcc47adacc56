"""Sees through the all-reduce: what moves, how long it takes, who is late, where it hangs.

Nothing in ``ctl`` needs this package to train: it looks at the loop, the step and the graph from
outside, and through one hook, ``TrainStep.marks``, which is None when nobody looks. The names below
are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Collective": "ctl.inspect.plan",
    "Lint": "ctl.inspect.plan",
    "Plan": "ctl.inspect.plan",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ctl.inspect' has no attribute {name!r}")
