"""A variational autoencoder: an encoder proposes a distribution over latent vectors for each image,
and a decoder reconstructs the image from a draw; new images come from the decoder alone.

Kingma and Welling 2014, arXiv:1312.6114: the loss is the negative of equation 10 with L = 1 and the
KL of appendix B, in nats for each image. Pixels are the means of Bernoulli variables (appendix
C.1). An evaluation writes ``samples.png``, see `ctl.recipes.samples`::

    python -m ctl.train --model_dir=/tmp/vae --step=ctl.recipes.vae:VAE \\
        --model=ctl.recipes.vae:make_model --latent_size=20
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from absl import flags
from keras import layers, ops

import ctl
from ctl import BaseStep, local_batch
from ctl.recipes.samples import SEED, Sampling

flags.DEFINE_integer("latent_size", 20, "Size of the latent vector.", lower_bound=1)


def negative_bound(step: BaseStep, batch: Any, seed: Any) -> tf.Tensor:
    """Reconstruction and KL of each image, float32 [n]. ``batch`` is ``(images, labels)``."""
    images, _ = local_batch.pair(batch)
    images = step.preprocess(images)
    noise = tf.random.stateless_normal([tf.shape(images)[0], step.model.inputs[1].shape[1]], seed)
    logits, mean, log_variance = step.model([images, noise], training=step.training)
    errors = tf.nn.sigmoid_cross_entropy_with_logits(images, logits)
    reconstruction = tf.reduce_sum(errors, axis=[1, 2, 3])
    kl = tf.reduce_sum(mean**2 + tf.exp(log_variance) - 1.0 - log_variance, axis=1) / 2.0
    step.log("reconstruction", reconstruction)
    step.log("kl", kl)
    return reconstruction + kl


class Evaluation(Sampling):
    """The bound with one draw for each image, of the same seed in each batch."""

    def loss(self, batch: Any) -> tf.Tensor:
        return negative_bound(self, batch, SEED)

    def sampled(self, count: int) -> tf.Tensor:
        noise = tf.random.stateless_normal([count, self.model.inputs[1].shape[1]], SEED)
        return tf.sigmoid(self.model.get_layer("decoder")(noise))


class VAE(ctl.TrainStep):
    """Trains a model like that of `vae`."""

    eval_step = Evaluation

    def loss(self, batch: Any) -> tf.Tensor:
        return negative_bound(self, batch, self.seed("noise"))


def make_model() -> keras.Model:
    """For the images of the embedded data set."""
    size: Any = flags.FLAGS["latent_size"].value
    return vae((28, 28, 1), size)


def vae(image_shape: tuple[int, int, int], latent_size: int, hidden: int = 500) -> keras.Model:
    """From images, and noise [n, latent_size], to the logits of the reconstruction, and mean and
    log variance of the latent vectors. Appendix C.1 and C.2, with ReLU in place of tanh."""
    images = keras.Input(image_shape, name="image")
    noise = keras.Input([latent_size], name="noise")
    x = layers.Dense(hidden, "relu", name="hidden")(layers.Flatten()(images))
    mean = layers.Dense(latent_size, dtype="float32", name="mean")(x)
    log_variance = layers.Dense(latent_size, dtype="float32", name="log_variance")(x)
    decoder = [
        keras.Input([latent_size]),
        layers.Dense(hidden, "relu"),
        layers.Dense(images.shape[1] * images.shape[2] * images.shape[3], dtype="float32"),
        layers.Reshape(image_shape),
    ]
    latent = mean + ops.exp(log_variance / 2.0) * noise  # equation 10
    outputs = [keras.Sequential(decoder, name="decoder")(latent), mean, log_variance]
    return keras.Model([images, noise], outputs, name="vae")
