"""A diffusion model: it learns which noise was added to an image, and makes images from noise by
removing a little of it, many times.

Ho, Jain and Abbeel 2020, arXiv:2006.11239: the loss is L_simple of equation 14, as the mean over
the pixels of an image; section 4 has the variances of the noise, appendix B the U-Net, which here
is small and without attention. Averaged weights make better images. An evaluation writes
``samples.png``, see `ctl.recipes.samples`::

    python -m ctl.train --model_dir=/tmp/ddpm --step=ctl.recipes.ddpm:DDPM \\
        --model=ctl.recipes.ddpm:make_model --ema_decay=0.995 --diffusion_steps=250 \\
        --learning_rate=2e-3 --evaluate_every=4ep
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import ctl
from ctl import BaseStep, local_batch
from ctl.recipes.samples import SEED, Sampling


class Diffusion(BaseStep):
    """What training and evaluation share."""

    diffusion_steps: int = ctl.option(1000, "Number of diffusion steps.", lower_bound=25)

    def levels(self) -> tuple[np.ndarray, np.ndarray]:
        """The variance ``beta`` of the noise that each step adds, and the part ``alpha_bar`` of the
        image that is left, both float32 [diffusion_steps + 1]; at time 0 all is left. With fewer
        steps than the 1000 of the paper, each adds more."""
        beta = np.linspace(1e-4, 0.02, self.diffusion_steps) * 1000 / self.diffusion_steps
        beta = np.concatenate([[0.0], beta])
        return beta.astype("float32"), np.cumprod(1.0 - beta).astype("float32")

    def simple_loss(self, batch: Any, times: tf.Tensor, seed: Any) -> tf.Tensor:
        """The mean squared error of the noise in each image, float32 [n].

        Args:
            batch: ``(images, labels)``.
            times: of each image, from 1 to ``diffusion_steps``, int32 [n].
            seed: of the noise.
        """
        images, _ = local_batch.pair(batch)
        images = 2.0 * self.preprocess(images) - 1.0
        noise = tf.random.stateless_normal(tf.shape(images), seed)
        left = tf.reshape(tf.gather(self.levels()[1], times), [-1, 1, 1, 1])
        noisy = tf.sqrt(left) * images + tf.sqrt(1.0 - left) * noise
        found = self.model([noisy, times], training=self.training)
        return tf.reduce_mean(tf.math.squared_difference(noise, found), axis=[1, 2, 3])


class Evaluation(Diffusion, Sampling):
    """The loss at times that are spread evenly over a replica's part of a batch, with the same
    noise for each part. So it depends a little on the number of replicas."""

    def loss(self, batch: Any) -> tf.Tensor:
        count = tf.shape(batch[1])[0]
        times = 1 + (2 * tf.range(count) + 1) * self.diffusion_steps // (2 * count)
        return self.simple_loss(batch, times, SEED)

    @tf.function(autograph=False)
    def sampled(self, count: int) -> tf.Tensor:
        """Algorithm 2, as a loop in the graph."""
        noise = tf.random.stateless_normal([count, *self.model.inputs[0].shape[1:]], SEED)
        images = tf.foldl(self.denoised, tf.range(self.diffusion_steps, 0, -1), noise)
        return tf.clip_by_value((images + 1.0) / 2.0, 0.0, 1.0)

    def denoised(self, images: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        """A step from ``time`` to the one before, with the variance of equation 7, which adds no
        noise in the last step."""
        beta, left = (tf.constant(level) for level in self.levels())
        times = tf.fill([tf.shape(images)[0]], time)
        found = self.model([images, times], training=False)
        mean = images - beta[time] / tf.sqrt(1.0 - left[time]) * found
        mean /= tf.sqrt(1.0 - beta[time])
        variance = (1.0 - left[time - 1]) / (1.0 - left[time]) * beta[time]
        noise = tf.random.stateless_normal(tf.shape(images), [1, time])
        return mean + tf.sqrt(variance) * noise


class DDPM(Diffusion, ctl.TrainStep):
    """Trains a model like that of `unet`."""

    eval_step = Evaluation

    def loss(self, batch: Any) -> tf.Tensor:
        times = tf.random.stateless_uniform(
            tf.shape(batch[1])[:1], self.seed("time"), 1, self.diffusion_steps + 1, tf.int32
        )
        return self.simple_loss(batch, times, self.seed("noise"))


def make_model() -> keras.Model:
    """For images of 28x28x1, like those of the embedded data set."""
    return unet((28, 28, 1))


def unet(image_shape: tuple[int, int, int], width: int = 32) -> keras.Model:
    """From images, and times int32 [n], to the noise in the images, float32. It works on patches of
    2x2 pixels. Height and width are multiples of 4, ``width`` is a multiple of 8."""
    images = keras.Input(image_shape, name="image")
    times = keras.Input([], dtype="int32", name="time")
    frequencies = 10_000.0 ** -np.linspace(0.0, 1.0, width, dtype="float32")
    angles = ops.expand_dims(ops.cast(times, "float32"), axis=1) * frequencies
    time = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)
    time = layers.Dense(4 * width, "swish")(layers.Dense(4 * width, "swish")(time))

    def normal(x: Any) -> Any:
        return ops.swish(layers.GroupNormalization(8)(x))

    def block(x: Any, filters: int) -> Any:
        y = layers.Conv2D(filters, 3, padding="same")(normal(x))
        y += layers.Dense(filters)(time)[:, None, None]
        y = layers.Conv2D(filters, 3, padding="same")(normal(y))
        return y + layers.Conv2D(filters, 1)(x)

    fine = block(layers.Conv2D(width, 2, 2)(images), width)
    x = layers.Conv2D(2 * width, 3, 2, padding="same")(fine)
    x = layers.UpSampling2D()(block(block(x, 2 * width), 2 * width))
    x = normal(block(layers.Concatenate()([x, fine]), width))
    outputs = layers.Conv2DTranspose(image_shape[-1], 2, 2, dtype="float32")(x)
    return keras.Model([images, times], outputs, name="ddpm")
