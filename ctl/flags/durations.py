"""The only place that reads durations and rates from text, and scales a rate with the batch size.

Imports no TensorFlow: flags are checked before it is loaded. The schedules themselves, as functions
of the step, are in `ctl.schedule`; the checks below serve both.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from ctl.errors import UsageError
from ctl.flags.names import SCALING_RULES, SCHEDULES, check_name

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?|\.[0-9]+)(ep)?")


def steps_from(what: str, duration: int | float | str, steps_per_epoch: float | None) -> int:
    """A duration as a whole number of optimizer updates.

    ``"500"`` or ``500`` is 500 steps, ``"0.5ep"`` half an epoch. Epochs need ``steps_per_epoch``,
    which may be fractional because batches straddle epochs; the result is the first step that does
    not begin before that point of the data, ``ceil(epochs * steps_per_epoch)``. ``what`` is named
    in the `UsageError` for anything that is not such a duration.
    """
    match = _DURATION.fullmatch(str(duration).strip())
    if match is None:
        raise UsageError(
            f"{what}: {str(duration)!r} is not a duration: write a number of steps (500) or of "
            "epochs (0.5ep)"
        )
    amount, epochs = float(match[1]), match[2]
    if not epochs:
        if amount != int(amount):
            raise UsageError(
                f"{what}: steps are whole numbers, got {duration}: for a part of an epoch write ep "
                f"({duration}ep)"
            )
        return int(amount)
    if steps_per_epoch is None:
        raise UsageError(
            f"{what}: {duration} counts epochs, and the length of an epoch is unknown: give steps"
        )
    # The small number undoes the rounding of a product such as 97 * (60000 / 97) that is whole: it
    # lies between the error of float64 up to 1e9 steps and one example of a batch of 1e5.
    return math.ceil(amount * steps_per_epoch - 1e-6)


def rates_from(what: str, rates: Iterable[float | str]) -> tuple[float, ...]:
    """Learning rates as floats; `UsageError` for one that is not a finite number >= 0."""
    return tuple(check_rate(what, rate) for rate in rates)


def check_rate(what: str, rate: float | str) -> float:
    """``rate`` as a float; `UsageError` unless it is a finite number >= 0."""
    try:
        value = float(rate)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{what} must be a number of at least 0, got {rate}")
    return value


def check_positive(what: str, value: float) -> None:
    """`UsageError` unless ``value`` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{what} must be above 0, got {value:g}")


# The options that only some schedules use, by the name of their flag.
_USED_BY = {
    "learning_rate": tuple(name for name in SCHEDULES if name != "piecewise"),
    "boundaries": ("piecewise",),
    "rates": ("piecewise",),
    "end_learning_rate": ("cosine", "polynomial"),
    "power": ("polynomial",),
    "decay_rate": ("exponential",),
    "decay_steps": ("exponential",),
}


def check_unused(schedule: str, **options: object) -> None:
    """`UsageError` for an option that is given (not ``None``) but not used by ``schedule``."""
    for option, value in options.items():
        if value is not None and schedule not in _USED_BY[option]:
            instead = "; give --rates" if option == "learning_rate" else ""
            raise UsageError(
                f"--{option} is for --schedule={'|'.join(_USED_BY[option])}, not for {schedule}"
                f"{instead}"
            )


def check_pieces(boundaries: Sequence[int | str], values: Sequence[float | str]) -> None:
    """`UsageError` unless there is one rate before, between and after all boundaries."""
    if len(values) != len(boundaries) + 1:
        raise UsageError(
            "there must be one more rate than boundaries, "
            f"got {len(values)} rates and {len(boundaries)} boundaries"
        )


def check_increasing(boundaries: Sequence[int], written: Sequence[int | str]) -> None:
    """`UsageError` unless the boundaries, in steps, are positive and strictly increasing.
    ``written`` is how the user wrote them."""
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *boundaries))):
        raise UsageError(
            f"boundaries must be above 0 and increasing, got {','.join(map(str, written))}"
        )


def scale_learning_rate(
    base: float, global_batch_size: int, base_batch_size: int, rule: str
) -> float:
    """The rate for ``global_batch_size``, where ``base`` was found good for ``base_batch_size``.

    * ``linear``: times k = global / base batch size. Goyal et al., "Accurate, Large Minibatch SGD",
      2017, section 2.1, which wants it together with a warm-up of some epochs (section 2.2).
    * ``sqrt``: times the square root of k, which keeps the variance of the update. Krizhevsky, "One
      weird trick for parallelizing convolutional neural networks", 2014; Hoffer et al., "Train
      longer, generalize better", 2017. The usual choice for Adam.
    * ``none``: unchanged.

    Raises `UsageError` for another rule, a rate below 0 or a batch size that is not positive.
    """
    check_name("scaling rule", rule, SCALING_RULES)
    check_rate("learning rate", base)
    check_positive("the global batch size", global_batch_size)
    check_positive("the base batch size", base_batch_size)
    ratio = global_batch_size / base_batch_size
    return base * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
