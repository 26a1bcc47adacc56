"""A contrastive step, for the tests of `ctl.reduce.all_gather`."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from helpers import FEATURES, batches_of, make_loop, sgd

import ctl
from ctl.recipes.simclr import nt_xent

RATE, TEMPERATURE = 0.5, 0.5


class Contrastive(ctl.TrainStep):
    """NT-Xent with the negatives of all replicas. A batch has two views of each example."""

    def loss(self, batch):
        views = tf.reshape(tf.stack(batch, axis=1), [-1, FEATURES])
        return nt_xent(self.model(views, training=True), TEMPERATURE)[0]


def encoder() -> keras.Model:
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(4, dtype="float32")]
    return keras.Sequential([keras.Input([FEATURES]), *layers])


def views(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of two views, float32 [size, FEATURES]."""
    random = np.random.default_rng(0)
    batches = []
    for size in sizes:
        one = random.normal(size=(size, FEATURES)).astype("float32")
        batches.append((one, one + 0.3 * random.normal(size=one.shape).astype("float32")))
    return batches


def plain_tensorflow(batches) -> list[np.ndarray]:
    """NT-Xent (Chen et al. 2020, arXiv:2002.05709, equation 1) on one device: all 2n views, less
    the view itself, in one softmax."""
    keras.utils.set_random_seed(1)
    model, optimizer = encoder(), keras.optimizers.SGD(RATE)
    variables = model.trainable_variables
    for one, two in batches:
        with tf.GradientTape() as tape:
            z = tf.math.l2_normalize(model(tf.concat([one, two], 0), training=True), -1)
            n = len(one)
            similar = tf.matmul(z, z, transpose_b=True) / TEMPERATURE
            similar = tf.linalg.set_diag(similar, tf.fill([2 * n], -1e9))
            partner = [*range(n, 2 * n), *range(n)]
            chosen = tf.gather(tf.nn.log_softmax(similar), partner, batch_dims=1)
            loss = -tf.reduce_mean(chosen)
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)
    return model.get_weights()


def contrastive(strategy, batches, static=False, **options) -> ctl.Loop:
    return make_loop(
        strategy,
        model=encoder,
        optimizer=sgd(RATE),
        step_class=Contrastive,
        data=batches_of(batches, len(batches[0][0]) if static else None),
        seed=1,
        **options,
    )
