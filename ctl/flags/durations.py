"""Parses durations and rates from text, and scales a rate with the batch size.

Imports no TensorFlow, because flags are checked before TensorFlow is loaded. `ctl.schedule` makes
the same checks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from ctl.base.names import SCALING_RULES, check_name
from ctl.errors import UsageError

# The schedules, and the flags that each uses beside --warmup; `make_schedule` makes them.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("learning_rate",),
    "piecewise": ("boundaries", "rates"),
    "cosine": ("learning_rate", "end_learning_rate"),
    "polynomial": ("learning_rate", "end_learning_rate", "power"),
    "exponential": ("learning_rate", "decay_rate", "decay_steps"),
    "inverse_sqrt": ("learning_rate",),
    "plateau": (
        *("learning_rate", "end_learning_rate", "decay_rate"),
        *("plateau_metric", "plateau_patience"),
    ),
}
OF_A_LENGTH = ("cosine", "polynomial")  # those that depend on the length of the training

_MOST = 1e15  # steps or epochs; NumPy and TensorFlow count in int64
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?|\.[0-9]+)(ep)?")


def steps_from(what: str, duration: int | float | str, steps_per_epoch: float | None) -> int:
    """Parses a duration as a whole number of optimizer updates.

    Args:
        what: names the duration in errors.
        duration: ``"500"`` or ``500`` is 500 steps, ``"0.5ep"`` is half an epoch.
        steps_per_epoch: may be fractional, because batches span the ends of epochs. Needed for a
            duration in epochs.

    Returns:
        The steps. For epochs, ``ceil(epochs * steps_per_epoch)``: the first step that does not
        begin before that point of the data.

    Raises:
        UsageError: ``duration`` has another form, or ``steps_per_epoch`` is missing.
    """
    # 1e-6 corrects rounding in whole products such as 97 * (60000 / 97): it is more than the error
    # of float64 up to 1e9 steps, and less than one example in a batch of 1e5.
    return math.ceil(length_from(what, duration, steps_per_epoch) - 1e-6)


def length_from(what: str, duration: int | float | str, steps_per_epoch: float | None) -> float:
    """As `steps_from`, but for epochs not rounded to a step."""
    match = _DURATION.fullmatch(str(duration).strip())
    if match is None or float(match[1]) > _MOST:
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
    return amount * steps_per_epoch


def rates_from(what: str, rates: Iterable[float | str]) -> tuple[float, ...]:
    """``rates`` as floats; `UsageError` unless each is a finite number >= 0."""
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


def check_unused(schedule: str, **options: object) -> None:
    """`UsageError` if an option is not ``None`` and ``schedule`` does not use it."""
    for option, value in options.items():
        if value is not None and option not in SCHEDULES[schedule]:
            users = "|".join(name for name, used in SCHEDULES.items() if option in used)
            instead = "; give --rates" if option == "learning_rate" else ""
            raise UsageError(f"--{option} is for --schedule={users}, not for {schedule}{instead}")


def check_pieces(boundaries: Sequence[int | str], values: Sequence[float | str]) -> None:
    """`UsageError` unless there is one rate more than boundaries."""
    if len(values) != len(boundaries) + 1:
        raise UsageError(
            "there must be one more rate than boundaries, "
            f"got {len(values)} rates and {len(boundaries)} boundaries"
        )


def check_increasing(boundaries: Sequence[int], written: Sequence[int | str]) -> None:
    """`UsageError` unless ``boundaries``, in steps, are positive and strictly increasing.

    ``written`` is the form in which the user wrote them, for the message.
    """
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *boundaries))):
        raise UsageError(
            f"boundaries must be above 0 and increasing, got {','.join(map(str, written))}"
        )


def scale_learning_rate(
    base: float, global_batch_size: int, base_batch_size: int, rule: str
) -> float:
    """Scales ``base``, a rate tuned for ``base_batch_size``, to ``global_batch_size``.

    With k = global / base batch size, the rules are:

    * ``linear``: base * k. Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1;
      section 2.2 combines it with a warm-up of some epochs.
    * ``sqrt``: base * sqrt(k), which keeps the variance of the update. Krizhevsky, "One weird trick
      for parallelizing convolutional neural networks", 2014; Hoffer et al., "Train longer,
      generalize better", 2017. The usual choice for Adam.
    * ``none``: base.

    Raises:
        UsageError: the rule is unknown, the rate is below 0 or a batch size is not positive.
    """
    check_name("scaling rule", rule, SCALING_RULES)
    check_rate("learning rate", base)
    check_positive("the global batch size", global_batch_size)
    check_positive("the base batch size", base_batch_size)
    ratio = global_batch_size / base_batch_size
    return base * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
