"""SimCLR: a model learns, without labels, to tell which two views are of one image.

A view is a random crop with other brightness and contrast. The loss compares each view with those
of the global batch, also on other replicas, so N replicas equal one. A larger batch teaches more.
With ``--accumulate_steps``, which needs one replica, they are those of the micro-batch.

Chen, Kornblith, Norouzi and Hinton 2020, arXiv:2002.05709, equation 1 and algorithm 1. The defaults
are those for CIFAR-10 (appendix B.9); smaller images need larger crops. `Evaluation` logs how good
the representation is, which is the output of the first part of the model::

    python -m ctl.train --model_dir=/tmp/simclr --step=ctl.recipes.simclr:SimCLR \\
        --model=ctl.recipes.simclr:make_model --smallest_crop=0.3 --global_batch_size=256 \\
        --learning_rate=3e-3 --epochs=20
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

import ctl
from ctl import BaseStep, local_batch
from ctl.recipes.samples import SEED


def cosines(vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compares each vector of this replica with those of all replicas.

    Args:
        vectors: [n, size].

    Returns:
        Cosines, float32 [n, sum of all n], -1e9 for a vector and itself; and the columns of the n
        vectors, int32 [n].
    """
    unit = tf.math.l2_normalize(tf.cast(vectors, tf.float32), axis=-1)
    every = ctl.reduce.all_gather(unit)
    itself = ctl.reduce.first_row(unit) + tf.range(tf.shape(unit)[0])
    mask = tf.one_hot(itself, tf.shape(every)[0], on_value=1e9, off_value=0.0)
    return tf.matmul(unit, every, transpose_b=True) - mask, itself


def nt_xent(projections: tf.Tensor, temperature: float) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss of equation 1, and whether the partner is the nearest.

    Args:
        projections: of this replica's views, [2 n, size]. Rows 2 k and 2 k + 1 are partners.
        temperature: divides the cosines.

    Returns:
        The mean loss of both views of each example, float32 [n]; and bool [2 n].
    """
    alike, itself = cosines(projections)
    partner = tf.bitwise.bitwise_xor(itself, 1)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(partner, alike / temperature)
    nearest = tf.argmax(alike, axis=1, output_type=tf.int32)
    return tf.reduce_mean(tf.reshape(losses, [-1, 2]), axis=1), nearest == partner


def two_views(images: tf.Tensor, smallest_crop: float, seed: Any) -> tf.Tensor:
    """Makes two views of each image, as in appendix A, without changes of colour.

    Args:
        images: float [n, height, width, channels] in [0, 1].
        smallest_crop: part of the area. A crop has an aspect ratio of 3/4 to 4/3 if it fits; it is
            resized to the whole, and flipped or not. Brightness and contrast have strength 0.5.
        seed: of one replica and step.

    Returns:
        float32 [2 n, height, width, channels]. Rows 2 k and 2 k + 1 are views of image k.
    """
    images = tf.repeat(images, 2, axis=0)
    draws = tf.random.stateless_uniform([7, tf.shape(images)[0]], seed)
    area, ratio, y, x, flip, light, contrast = tf.unstack(draws[..., tf.newaxis])
    area = smallest_crop + (1.0 - smallest_crop) * area
    ratio = (4 / 3) ** (2.0 * ratio - 1.0)
    height = tf.minimum(tf.sqrt(area / ratio), 1.0)
    width = tf.minimum(tf.sqrt(area * ratio), 1.0)
    rows = y * (1.0 - height) + height * tf.linspace(0.0, 1.0, images.shape[1])
    columns = x * (1.0 - width) + width * tf.linspace(0.0, 1.0, images.shape[2])
    columns = tf.where(flip < 0.5, columns[:, ::-1], columns)
    # Not `tf.image.crop_and_resize`, which XLA cannot compile.
    views = tf.einsum("kyh,khwc,kxw->kyxc", _linear(rows), images, _linear(columns))
    light, contrast = (0.8 * tf.reshape(d - 0.5, [-1, 1, 1, 1]) for d in (light, contrast))
    mean = tf.reduce_mean(views, axis=[1, 2], keepdims=True)
    return tf.clip_by_value((1.0 + contrast) * (views - mean) + mean + light, 0.0, 1.0)


def _linear(places: tf.Tensor) -> tf.Tensor:
    """Weights of linear interpolation, from pixels in a row of ``size`` to ``places`` in [0, 1],
    [n, size]: [n, size, size]."""
    size = places.shape[1]
    distance = (size - 1.0) * places[..., tf.newaxis] - tf.range(size, dtype=tf.float32)
    return tf.nn.relu(1.0 - tf.abs(distance))


class Contrast(BaseStep):
    """What training and evaluation share. ``batch`` is ``(images, labels)``."""

    temperature: float = ctl.option(0.5, "Temperature: divides the cosines.", lower_bound=1e-3)
    smallest_crop: float = ctl.option(
        0.08, "Smallest part of an image in a crop.", lower_bound=0.01, upper_bound=1.0
    )

    def contrastive_loss(self, batch: Any, seed: Any) -> tf.Tensor:
        """The loss of each image, float32 [n]; logs how often the partner of a view is nearest."""
        images, _ = local_batch.pair(batch)
        views = two_views(self.preprocess(images), self.smallest_crop, seed)
        projections = self.model(views, training=self.training)
        losses, found = nt_xent(projections, self.temperature)
        self.log("contrastive_accuracy", tf.cast(found, tf.float32))
        return losses


class Evaluation(Contrast, ctl.EvalStep):
    """The loss, and how often the nearest other image of the batch has the same label, by the
    representation of whole images. Both depend on the size of the batch."""

    def loss(self, batch: Any) -> tf.Tensor:
        images, labels = local_batch.pair(batch)
        alike, _ = cosines(self.model.layers[0](self.preprocess(images), training=False))
        same = tf.gather(ctl.reduce.all_gather(labels), tf.argmax(alike, axis=1)) == labels
        self.log("neighbour_accuracy", tf.cast(same, tf.float32))
        return self.contrastive_loss(batch, SEED)


class SimCLR(Contrast, ctl.TrainStep):
    """Trains a `keras.Sequential` of two parts: from images to representations, and from these to
    the projections that are compared."""

    eval_step = Evaluation

    def loss(self, batch: Any) -> tf.Tensor:
        return self.contrastive_loss(batch, self.seed("views"))


def make_model() -> keras.Model:
    """For images of 28x28x1, like those of the embedded data set."""
    return simclr((28, 28, 1))


def simclr(image_shape: tuple[int, int, int], width: int = 32) -> keras.Model:
    """Three convolutions and a head of two dense layers. BatchNorm is over all replicas (section
    2.2): partners are on one replica, and its own mean and variance would give them away."""
    encoder = [keras.Input(image_shape)]
    for filters in (width, 2 * width, 4 * width):
        encoder += [layers.Conv2D(filters, 3, 2, "same", use_bias=False)]
        encoder += [layers.BatchNormalization(momentum=0.9, synchronized=True), layers.ReLU()]
    encoder += [layers.GlobalAveragePooling2D()]
    head = [keras.Input([4 * width]), layers.Dense(4 * width, "relu"), layers.Dense(128)]
    return keras.Sequential([keras.Sequential(encoder), keras.Sequential(head)])
