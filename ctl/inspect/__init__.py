"""Sees through the all-reduce: what moved, how long it took, who was late, where it hangs.

`plan` is static: no step is run. The hot path (`ctl.loop`, `ctl.step`, `ctl.reduce`) imports none
of this but on request. The names below are loaded when they are first used.
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
