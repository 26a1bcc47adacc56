"""Epochs, counted in steps: batches may span their ends."""

from __future__ import annotations

import math
from typing import Any

from ctl.base.bounds import checked
from ctl.errors import UsageError
from ctl.flags.durations import length_from

# Corrects rounding in whole products such as 97 * (60000 / 97): it is more than the error of
# float64 up to 1e9 steps, and less than one example in a batch of 1e5.
_ROUNDING = 1e-6


def steps_per_epoch(dataset: Any) -> float | None:
    """Batches of an epoch of ``dataset``, which may be fractional; None if unknown.

    A dataset has ``batches_per_epoch``, or ``num_examples`` and ``global_batch_size``.
    """
    if batches := getattr(dataset, "batches_per_epoch", None):
        return float(batches)
    examples, batch = dataset.num_examples, dataset.global_batch_size
    return examples / batch if examples and batch else None


def end_of(epochs: float, steps: float) -> int:
    """The first step that does not begin before the end of so many ``epochs`` of ``steps``."""
    return math.ceil(epochs * steps - _ROUNDING)


def completed(step: int, steps: float) -> int:
    """How many epochs of ``steps`` have ended at ``step``."""
    return math.floor((step + _ROUNDING) / steps)


def end_of_training(until: int | None, epochs: float | None, dataset: Any) -> int:
    """The step at which a training ends: ``until``, or after ``epochs``, both counted from its
    start. Raises `UsageError` unless one of them is given, and if epochs have no known length."""
    if until is epochs is None:
        raise UsageError("until must be a number of steps, not None; or give epochs=")
    if epochs is None:
        return checked("until", until)
    if until is not None:
        raise UsageError(f"until={until} and epochs={epochs} are both given: leave out one of them")
    return max(1, end_of(checked("epochs", epochs), _length_of_epoch(dataset, "until=STEPS")))


def evaluation_interval(evaluate_every: int | str | None, dataset: Any) -> float:
    """Steps between two evaluations, from 1 on: ``evaluate_every``, or those of an epoch. Of epochs
    (``"0.5ep"``), they need not be whole, so that evaluations stay at their ends. Raises
    `UsageError` if it is no whole number from 1, or epochs have no known length."""
    if evaluate_every is None:
        return _length_of_epoch(dataset, "evaluate_every=STEPS")
    if isinstance(evaluate_every, str):
        epoch = steps_per_epoch(dataset)
        return max(1.0, length_from("evaluate_every", evaluate_every, epoch))
    return checked("evaluate_every", evaluate_every)


def _length_of_epoch(dataset: Any, instead: str) -> float:
    """`steps_per_epoch`. Raises `UsageError`, which names what to give ``instead``, if unknown."""
    if (steps := steps_per_epoch(dataset)) is None:
        raise UsageError(
            f"the length of an epoch of {dataset.info.name} is unknown: give {instead}, or data "
            "of a known length: a tf.data.Dataset without .repeat(), since the loop repeats it, "
            "and with .apply(tf.data.experimental.assert_cardinality(BATCHES)) if it cannot tell"
        )
    return steps
