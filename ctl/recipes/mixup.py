"""mixup and CutMix: each example is mixed with another of its batch, and learns both labels.

mixup blends whole images; CutMix pastes a rectangle of the other image. The share of the first
image is drawn from Beta(alpha, alpha), once for each micro-batch of a replica. An example is mixed
with one of the same micro-batch, so N replicas do not equal one.

mixup: Zhang, Cisse, Dauphin and Lopez-Paz 2018, arXiv:1710.09412, section 2. CutMix: Yun et al.
2019, arXiv:1905.04899, section 3.1. The default of ``mix_alpha`` is that of both on CIFAR-10; mixup
takes 0.2 on ImageNet::

    python -m ctl.train --model_dir=/tmp/mixup --step=ctl.recipes.mixup:Mixup --mix_alpha=1
    python -m ctl.train --model_dir=/tmp/cutmix --step=ctl.recipes.mixup:CutMix --mix_alpha=1
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

import ctl
from ctl import local_batch


class Mixup(ctl.TrainStep):
    """Trains with mixup."""

    mix_alpha: float = ctl.option(1.0, "Parameter of the Beta distribution.", lower_bound=1e-3)

    def loss(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses for both labels, each times its share, [n], and the outputs.

        Raises:
            UsageError: the batch is not ``(features, labels)``.
        """
        images, labels = local_batch.pair(batch)
        images = self.preprocess(images)
        order, share = self.draw(tf.shape(labels)[0])
        mixed, share = self.mix(images, tf.gather(images, order), share)
        outputs = self.model(mixed, training=True)
        first = self.loss_fn(labels, outputs)
        second = self.loss_fn(tf.gather(labels, order), outputs)
        return share * first + (1.0 - share) * second, outputs

    def draw(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the example that each of ``count`` is mixed with, int32 [count], and the share of
        the first, float32 scalar."""
        order = tf.argsort(tf.random.stateless_uniform([count], self.seed("mix order")))
        return order, symmetric_beta([], self.seed("mix share"), self.mix_alpha)

    def mix(
        self, first: tf.Tensor, second: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mixed examples, [n, ...], and the share of ``first`` that they have."""
        part = tf.cast(share, first.dtype)
        return part * first + (1.0 - part) * second, share


class CutMix(Mixup):
    """Trains with CutMix, on images [n, height, width, channels]."""

    def mix(
        self, first: tf.Tensor, second: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The rectangle ends at the border of the image, so it may be smaller than drawn."""
        side = tf.sqrt(1.0 - share)
        rows = _span(first.shape[1], side, self.seed("cut row"))
        columns = _span(first.shape[2], side, self.seed("cut column"))
        cut = rows[:, tf.newaxis, tf.newaxis] & columns[:, tf.newaxis]
        return tf.where(cut, second, first), 1.0 - tf.reduce_mean(tf.cast(cut, tf.float32))


def _span(size: int, part: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Which of ``size`` pixels are less than half of ``part`` from a random centre, bool [size]."""
    centre = tf.random.stateless_uniform([], seed, maxval=size, dtype=tf.int32)
    half = tf.cast(size * part, tf.int32) // 2
    distance = tf.range(size) - centre
    return (-half <= distance) & (distance < half)


def symmetric_beta(shape: Any, seed: tf.Tensor, alpha: float) -> tf.Tensor:
    """Draws from Beta(alpha, alpha), float32 of ``shape``; Devroye 1996, "Random variate generation
    in one line of code". XLA can compile this, but not `tf.random.stateless_gamma`."""
    uniform, angle = tf.unstack(tf.random.stateless_uniform([2, *shape], seed))
    cosine = tf.cos(2.0 * math.pi * angle)
    power = uniform ** (1.0 / alpha)
    drawn = 0.5 + 0.5 * cosine / tf.sqrt(cosine**2 + power / (1.0 - power))
    return tf.clip_by_value(drawn, 0.0, 1.0)  # it rounds to less than 0
