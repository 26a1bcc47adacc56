"""What the weights of examples mean: who counts, by what a loss is divided, weights of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.base.bounds import checked
from ctl.base.names import WEIGHTINGS, check_name
from ctl.distributed import local_batch
from ctl.errors import UsageError


def present(weights: tf.Tensor) -> tf.Tensor:
    """1 where ``weights`` are not 0, float32 of their shape: what has the weight 0 is not there."""
    return tf.cast(tf.not_equal(tf.cast(weights, tf.float32), 0.0), tf.float32)


def number(weights: tf.Tensor, weighting: str) -> tf.Tensor:
    """By what the sum of weighted losses is divided, float32 scalar.

    Args:
        weights: of the examples, or of elements of them.
        weighting: ``"examples"`` for the number of weights that are not 0, ``"sum_of_weights"`` for
            their sum. A sum that nearly cancels would be no divisor, so the running graph fails at
            a weight below 0, see `local_batch.translate_graph_checks`; the sum is NaN under XLA,
            which has no such checks.

    Raises:
        UsageError: ``weighting`` is neither of these.
    """
    check_name("weighting", weighting, WEIGHTINGS)
    if weighting == "examples":
        return tf.reduce_sum(present(weights))
    weights = tf.cast(weights, tf.float32)
    negative = tf.reduce_any(weights < 0.0)
    local_batch.refuse_negative_weights(negative)
    return tf.where(negative, math.nan, tf.reduce_sum(weights))


def describe(weighting: str) -> str:
    """The rule, for the log."""
    divisor = "number of weights that are not 0" if weighting == "examples" else "sum of weights"
    return (
        f"batches have weights: losses are divided by the {divisor} (weighting={weighting}), "
        "metrics count examples whose weight is not 0 once, weighted_metrics by their weight"
    )


def checked_classes(class_weight: Any) -> dict[int, float]:
    """Returns ``class_weight`` as integers and floats.

    Raises:
        UsageError: it is not a mapping of classes from 0 to numbers above 0.
    """
    if not isinstance(class_weight, Mapping):
        raise UsageError(f"class_weight must be a dict such as {{0: 1.0, 1: 5.0}}: {class_weight}")
    classes = {}
    for label, weight in class_weight.items():
        if not isinstance(label, int | np.integer) or label < 0:
            raise UsageError(f"class_weight has the class {label!r}: classes are integers from 0")
        shown = f"class_weight of class {label}"
        classes[int(label)] = float(checked("class_weight", weight, shown=shown))
    return classes


def with_classes(batch: Any, class_weight: Mapping[int, float]) -> tuple[Any, Any, tf.Tensor]:
    """Returns ``batch`` with weights [n]: its own, or 1, times those of the classes. Classes that
    ``class_weight`` does not name weigh 1.

    Labels of a type that is no integer may be 0 and 1, as those of binary_cross_entropy are. The
    running graph fails at others; under XLA, which has no such checks, the weights are NaN.

    Raises:
        UsageError: the labels are neither numbers nor bools [n] or [n, 1], or `checked_classes`.
    """
    features, labels, weights = local_batch.unpack(batch)
    classes = checked_classes(class_weight)
    shape = getattr(labels, "shape", tf.TensorShape(None))
    of_classes = shape.rank == 1 or (shape.rank == 2 and shape[1] == 1)
    if not isinstance(labels, tf.Tensor) or labels.dtype == tf.string or not of_classes:
        kind = f"{labels.dtype.name} {shape}" if isinstance(labels, tf.Tensor) else type(labels)
        raise UsageError(
            f"class_weight needs labels that are classes, integers [n], not {kind}: give weights "
            "of examples instead, as the third part of a batch"
        )
    table = np.ones([max(classes, default=0) + 2], np.float32)  # the last is of all other labels
    table[[*classes]] = [*classes.values()]
    # In int64, no label of another type turns into one of the classes.
    values = tf.reshape(labels, [-1])
    places = tf.cast(values, tf.int64)
    last = len(table) - 1
    places = tf.where((places >= 0) & (places < last), places, last)
    factors = tf.gather(tf.constant(table), places)
    if labels.dtype.is_floating:
        other = (values != 0) & (values != 1)
        local_batch.refuse_other_than_0_and_1(tf.reduce_any(other))
        factors = tf.where(other, math.nan, factors)
    return features, labels, factors if weights is None else factors * tf.cast(weights, tf.float32)
