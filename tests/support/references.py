"""Plain training on one device, without ctl, and the comparison of a loop with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from helpers import assert_replicas_agree, largest_difference

from ctl.data import InMemory
from ctl.loop import Loop


def image_batches(shape: tuple[int, ...], size: int, steps: int) -> tf.data.Dataset:
    """So many batches of random images, uint8 [size, *shape], and labels of 0."""
    images = np.random.default_rng(0).integers(0, 256, (steps * size, *shape)).astype("uint8")
    arrays = images, np.zeros(len(images), "int64")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=True)


def global_batches(data: InMemory, steps: int) -> list[Any]:
    """The first ``steps`` global batches of ``data``."""
    return [
        tf.nest.map_structure(lambda array, at=at: tf.gather(array, at), data.arrays)
        for at in data.batches().take(steps)
    ]


def descend(
    model: keras.Model,
    optimizer: keras.Optimizer,
    loss_of: Callable[..., tf.Tensor],
    batches: Iterable[tuple],
) -> list[float]:
    """Applies the gradient of ``loss_of(*batch)``, batch after batch. Returns the losses."""
    losses = []
    for batch in batches:
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], model.trainable_variables)
        losses.append(float(loss))
    return losses


def assert_trains_as(
    loop: Loop,
    plain: keras.Model,
    reference: Callable[[keras.Model], Any],
    *,
    steps: int,
    tolerance: float = 1e-5,
) -> tuple[dict[str, float], Any]:
    """From the same weights, ``loop`` trains all replicas as ``reference`` trains ``plain``.

    Returns:
        The scalars of the loop, and what the reference has returned.
    """
    plain.set_weights(loop.step.model.get_weights())
    returned = reference(plain)
    scalars = loop.train(steps)
    assert largest_difference(loop.step.model.get_weights(), plain.get_weights()) <= tolerance
    assert_replicas_agree(loop.strategy, loop.step.model.variables)
    return scalars, returned
