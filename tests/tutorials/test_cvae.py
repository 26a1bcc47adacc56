"""https://www.tensorflow.org/tutorials/generative/cvae"""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from replica_noise import replica_noise
from twins import Twins, batches, eagerly, images

import ctl

STEPS, BATCH, LATENT = 3, 4, 2


class CVAE(keras.Model):
    """The model of the tutorial, which draws no numbers itself."""

    def __init__(self):
        super().__init__()
        convolution = layers.Conv2D(3, 3, strides=2, activation="relu")
        code = [layers.Flatten(), layers.Dense(2 * LATENT)]
        self.encoder = keras.Sequential([keras.Input([8, 8, 1]), convolution, *code])
        start = [layers.Dense(4 * 4 * 2, activation="relu"), layers.Reshape([4, 4, 2])]
        up = layers.Conv2DTranspose(1, 3, strides=2, padding="same")
        self.decoder = keras.Sequential([keras.Input([LATENT]), *start, up])

    def encode(self, x):
        return tf.split(self.encoder(x), num_or_size_splits=2, axis=1)

    def reparameterize(self, mean, logvar, eps):
        return eps * tf.exp(logvar * 0.5) + mean

    def decode(self, z):
        return self.decoder(z)


def log_normal_pdf(sample, mean, logvar):
    log2pi = math.log(2.0 * math.pi)
    of_each = -0.5 * ((sample - mean) ** 2 * tf.exp(-logvar) + logvar + log2pi)
    return tf.reduce_sum(of_each, axis=1)


def tutorial_cvae(model, train_dataset, eps_of) -> list[float]:
    optimizer = keras.optimizers.Adam(1e-3)

    def compute_loss(model, x, eps):
        mean, logvar = model.encode(x)
        z = model.reparameterize(mean, logvar, eps)
        x_logit = model.decode(z)
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
        logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
        logpz = log_normal_pdf(z, 0.0, 0.0)
        logqz_x = log_normal_pdf(z, mean, logvar)
        return -tf.reduce_mean(logpx_z + logpz - logqz_x)

    @tf.function
    def train_step(model, x, eps):
        with tf.GradientTape() as tape:
            loss = compute_loss(model, x, eps)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return [float(train_step(model, x, eps_of(step))) for step, x in enumerate(train_dataset)]


class CVAEStep(ctl.TrainStep):
    def loss(self, x):
        mean, logvar = self.model.encode(x)
        eps = tf.random.stateless_normal(tf.shape(mean), self.seed("eps"))
        z = self.model.reparameterize(mean, logvar, eps)
        x_logit = self.model.decode(z)
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
        kl = log_normal_pdf(z, mean, logvar) - log_normal_pdf(z, 0.0, 0.0)
        return tf.reduce_sum(cross_ent, axis=[1, 2, 3]) + kl


def port_cvae(model, train_dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = CVAEStep(model, keras.optimizers.Adam(1e-3))
    return ctl.Loop(step, train_dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_cvae(mirrored):
    twins = Twins(mirrored(2), CVAE)
    data = batches(BATCH, (images(STEPS * BATCH, 8, 1) > 0).astype("float32"))
    with eagerly():
        losses = tutorial_cvae(
            twins.theirs, data, lambda step: replica_noise(0, "eps", step, 2, BATCH, LATENT)
        )
    scalars = port_cvae(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
