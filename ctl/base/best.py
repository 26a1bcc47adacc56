"""Whether the highest or the lowest value of a metric is the best."""

from __future__ import annotations

import difflib
from typing import Literal

from ctl.errors import UsageError

Mode = Literal["max", "min"]

KNOWN: dict[str, Mode] = {"accuracy": "max", "loss": "min"}


def known_mode(metric: str) -> Mode | None:
    """The mode of a loss or an accuracy; None for another ``metric``."""
    return KNOWN.get(metric.rpartition("/")[2])  # without the data, of --also_evaluate


def mode_of(metric: str, mode: str | None) -> Mode:
    """``mode``, or else that of ``metric``.

    Raises:
        UsageError: ``mode`` is neither "max" nor "min"; or it is None, and ``metric`` is neither a
            loss nor an accuracy.
    """
    found = mode or known_mode(metric)
    if found in ("max", "min"):
        return "max" if found == "max" else "min"
    if mode is None:
        close = difflib.get_close_matches(metric.removeprefix("val_"), KNOWN, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? Otherwise " if close else ""
        raise UsageError(
            f"cannot tell if a high or a low {metric} is better: {hint}set the mode to 'max' or "
            "'min'"
        )
    raise UsageError(f"the mode must be 'max' or 'min', not {mode!r}")
