"""Whether the highest or the lowest value of a metric is the best."""

from __future__ import annotations

import difflib
import re
from typing import Literal

from ctl.errors import UsageError

Mode = Literal["max", "min"]

KNOWN: dict[str, Mode] = {"accuracy": "max", "loss": "min"}


def known_mode(metric: str) -> Mode | None:
    """The mode of a loss or an accuracy; None for another ``metric``."""
    return KNOWN.get(metric.rpartition("/")[2])  # without the data, of --also_evaluate


# Names of metrics of which the highest, or the lowest, is usually the best.
_HIGH = re.compile(r"acc|auc|precision|recall|iou|io_u$|(?<![a-z])(f1|fbeta|r2|top_?[k\d])")
_LOW = re.compile(
    r"loss|error|entropy|perplexity|nll|divergence|(?<![a-z])[rs]?(ms|ma)(e|le|pe)(?![a-z])"
)


def usual_mode(metric: str) -> Mode | None:
    """The mode of a ``metric`` for which no other was given: `known_mode`, or what its name says;
    None if that says nothing."""
    name = metric.rpartition("/")[2].lower()
    is_high, is_low = bool(_HIGH.search(name)), bool(_LOW.search(name))
    return known_mode(metric) or (None if is_high == is_low else "max" if is_high else "min")


def mode_of(metric: str, mode: str | None) -> Mode:
    """``mode``, or else that of ``metric``.

    Raises:
        UsageError: ``mode`` is neither "max" nor "min"; or it is None, and the name of the metric
            does not say it.
    """
    of_keras = metric.startswith("val_")  # a name that no result has
    found = mode or (None if of_keras else usual_mode(metric))
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
