"""Bounds of the numbers that a step and a loop take, the same for flags and for arguments."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from ctl.errors import UsageError


class Bounds(NamedTuple):
    """The numbers that are allowed: from ``low`` to ``high``, or between them if ``open``; and None
    if ``optional``."""

    kind: type  # int or float
    low: float
    high: float = math.inf
    open: bool = False
    optional: bool = False

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if self.high < math.inf:
            words = ("between", "and") if self.open else ("from", "to")
            return f"{noun} {words[0]} {self.low} {words[1]} {self.high}"
        return f"{noun} above {self.low}" if self.open else f"{noun} of at least {self.low}"

    def hold(self, value: float) -> bool:
        """Whether ``value`` is allowed. Infinity and NaN never are."""
        inside = self.low < value < self.high if self.open else self.low <= value <= self.high
        return inside and math.isfinite(value)


BOUNDS = {
    "accumulate_steps": Bounds(int, 1),
    "bytes_per_pack": Bounds(int, 0),
    "class_weight": Bounds(float, 0, open=True),
    "clip_norm": Bounds(float, 0, open=True, optional=True),
    "ema_decay": Bounds(float, 0, 1, open=True, optional=True),
    "epochs": Bounds(float, 0, open=True),
    "evaluate_every": Bounds(int, 1),
    "steps_per_loop": Bounds(int, 1, optional=True),
    "total": Bounds(int, 0),
    "until": Bounds(int, 0),
}


def checked(name: str, value: Any, *, shown: str = "") -> Any:
    """Returns ``value`` as an int or a float of Python. Tensors and variables stay as they are.

    Args:
        name: the setting, one of `BOUNDS`.
        value: also a number of NumPy; not a bool.
        shown: what the error calls the setting, by default ``name``.

    Raises:
        UsageError: ``value`` is not a number of this kind, or out of bounds.
    """
    bounds = BOUNDS[name]
    is_tensor = hasattr(value, "dtype") and not isinstance(value, numbers.Number)
    if is_tensor or (value is None and bounds.optional):
        return value
    kind = numbers.Integral if bounds.kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not bounds.hold(float(value)):
        raise UsageError(f"{shown or name} must be {bounds}, not {value!r}")
    return bounds.kind(value)
