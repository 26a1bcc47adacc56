"""Losses of each example: functions of labels and outputs that return float32 [n]."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl.errors import UsageError


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Softmax cross-entropy of each example, float32 [n].

    Args:
        labels: classes, integers [n]; or their probabilities, float [n, classes].
        logits: float [n, classes].
        smoothing: weight in [0, 1] of the uniform distribution over the classes, which is mixed
            into the one-hot target (Szegedy et al. 2016, arXiv:1512.00567, section 7).
    """
    logits = tf.cast(logits, tf.float32)
    if are_probabilities(labels, logits):
        losses = tf.nn.softmax_cross_entropy_with_logits(tf.cast(labels, tf.float32), logits)
    else:  # as int32, a label of 2**32 + 1 would be class 1
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int64), logits)
    if smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses


def are_probabilities(labels: Any, outputs: Any) -> bool:
    """Whether labels are probabilities of the outputs, float [n, classes], rather than classes."""
    return (
        isinstance(labels, tf.Tensor)
        and isinstance(outputs, tf.Tensor)
        and labels.dtype.is_floating
        and labels.shape.rank == outputs.shape.rank == 2
        and labels.shape[1] == outputs.shape[1]
    )


def binary_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Sigmoid cross-entropy of each example, float32 [n]: the mean over its logits.

    Args:
        labels: 0 or 1, or probabilities, of the shape of ``logits`` or [n].
        logits: [n, 1] or [n, ...].
    """
    labels, logits = _alike(labels, logits)
    return _mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def mean_squared_error(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Squared error of each example, float32 [n]: the mean over its outputs.

    Args:
        labels: of the shape of ``outputs``, or [n].
        outputs: [n, 1] or [n, ...].
    """
    labels, outputs = _alike(labels, outputs)
    return _mean(tf.math.squared_difference(labels, outputs))


def _alike(labels: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns both as float32 of one shape; [n] and [n, 1] would be broadcast to [n, n]."""
    if labels.shape.rank == 1 and outputs.shape.rank == 2 and outputs.shape[1] == 1:
        labels = labels[:, tf.newaxis]
    if labels.shape.rank != outputs.shape.rank or not labels.shape.is_compatible_with(
        outputs.shape
    ):
        raise UsageError(
            f"labels of shape {labels.shape} do not fit outputs of shape {outputs.shape}: the loss "
            "needs one label for each output"
        )
    return tf.cast(labels, tf.float32), tf.cast(outputs, tf.float32)


def _mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))
