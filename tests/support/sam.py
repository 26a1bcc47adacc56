"""Small trainings with `ctl.recipes.sam`, and the same in plain TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from helpers import BATCH, FEATURES, examples, keras_loss, make_loop, mlp

import ctl
from ctl.recipes.sam import SAM


class SharpnessOfEach(SAM):
    """Each replica moves along its own gradient: m-sharpness."""

    def direction(self, gradients, count):
        return gradients


def plain_sam(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    batches,
    parts: int = 1,
    rho: float = 0.05,
) -> None:
    """Foret et al. 2021, arXiv:2010.01412, algorithm 1, on one device; the weights are moved for
    each of so many parts of a batch."""
    variables = [v.value for v in model.trainable_variables]

    def gradients_of(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels, model(features, training=True)))
        return tape.gradient(loss, variables)

    for batch in batches:
        before, total = model.get_weights(), [0.0] * len(variables)
        for part in zip(*(tf.split(array, parts) for array in batch), strict=True):
            gradients = gradients_of(*part)
            scale = rho / tf.linalg.global_norm(gradients)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_add(scale * gradient)
            total = [t + g / parts for t, g in zip(total, gradients_of(*part), strict=True)]
            model.set_weights(before)
        optimizer.apply(total, model.trainable_variables)


def sam_loop(strategy, *, kind=SAM, sizes=(BATCH,), static=True, rate=0.1, **options) -> ctl.Loop:
    """A training on `sam_batches`, whose sizes are known while tracing or not."""
    size = sizes[0] if static else None
    signature = (tf.TensorSpec([size, FEATURES], tf.float32), tf.TensorSpec([size], tf.int64))
    batches = sam_batches(sizes, 1000)
    return make_loop(
        strategy,
        optimizer=lambda: keras.optimizers.SGD(rate, momentum=0.9),
        step_class=kind,
        data=tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature),
        seed=1,
        **options,
    )


def sam_batches(sizes: Sequence[int], steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    features, labels = examples()
    batches, at = [], 0
    for step in range(steps):
        end = at + sizes[step % len(sizes)]
        batches.append((features[at:end], labels[at:end]))
        at = end % 200
    return batches


def trained_plainly(
    steps: int, sizes: Sequence[int] = (BATCH,), parts: int = 1, rho: float = 0.05
) -> list[np.ndarray]:
    """The weights that `sam_loop` must have after so many steps."""
    keras.utils.set_random_seed(1)
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    plain_sam(model, optimizer, sam_batches(sizes, steps), parts, rho)
    return model.get_weights()
