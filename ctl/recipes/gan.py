"""A generative adversarial network: a generator makes images from noise, and a discriminator learns
to tell them from the images of the data.

Goodfellow et al. 2014, arXiv:1406.2661: equation 1, with the loss of section 3 for the generator,
which does not saturate. Both take one step on each batch, from the weights before it. Each is a
model of the step, with its own optimizer. An evaluation writes ``samples.png``, see
`ctl.recipes.samples`::

    python -m ctl.train --model_dir=/tmp/gan --step=ctl.recipes.gan:GAN \\
        --model=ctl.recipes.gan:make_model --learning_rate=5e-4 --schedule=constant --epochs=20
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

import ctl
from ctl import BaseStep, UsageError, local_batch, optimizers
from ctl.recipes.samples import SEED, Sampling


def adversarial(step: BaseStep, batch: Any, seed: Any) -> dict[str, tf.Tensor]:
    """The losses of generator and discriminator for each image, float32 [n]. ``batch`` is
    ``(images, labels)``."""
    generator, discriminator = step.model["generator"], step.model["discriminator"]
    images, _ = local_batch.pair(batch)
    real = step.preprocess(images)
    noise = tf.random.stateless_normal([tf.shape(real)[0], generator.input_shape[1]], seed)
    fake = generator(noise, training=step.training)
    on_fake = discriminator(fake, training=step.training)[:, 0]
    on_real = discriminator(real, training=step.training)[:, 0]
    losses = {"generator": tf.nn.softplus(-on_fake)}
    losses["discriminator"] = tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake)
    for name, each in losses.items():
        step.log(name, each)
    return losses


class Evaluation(Sampling):
    """Both losses on the data to evaluate on."""

    def loss(self, batch: Any) -> dict[str, tf.Tensor]:
        return adversarial(self, batch, SEED)

    def sampled(self, count: int) -> tf.Tensor:
        generator = self.model["generator"]
        return generator(tf.random.stateless_normal([count, generator.input_shape[1]], SEED))


class GAN(ctl.TrainStep):
    """Trains a generator and a discriminator.

    Args:
        model: a dict of two: ``generator``, from noise to images in [0, 1], and ``discriminator``,
            from images to logits [n, 1].
        optimizer: of the generator. The other model gets a second one with the same settings.
    """

    eval_step = Evaluation
    other = "discriminator"  # the name of the second model

    def __init__(self, model: Any, optimizer: Any, *args: Any, **options: Any):
        if not hasattr(model, "keys") or {*model} != {"generator", self.other}:
            raise UsageError(
                f"{type(self).__name__} needs a dict of two models, generator and {self.other}: "
                f"give --model={type(self).__module__}:make_model"
            )
        optimizer = optimizers.from_name(optimizer)
        other = type(optimizer).from_config(optimizer.get_config())
        for name, value in vars(optimizer).items():
            if name.startswith("_exclude_from_weight_decay"):  # not in the configuration
                setattr(other, name, value)
        super().__init__(model, {"generator": optimizer, self.other: other}, *args, **options)

    def loss(self, batch: Any) -> dict[str, tf.Tensor]:
        return adversarial(self, batch, self.seed("noise"))


def make_model() -> dict[str, keras.Model]:
    """For images of 28x28x1, like those of the embedded data set: dense layers and Dropout, as in
    the paper. BatchNorm in the generator (Radford et al. 2016, arXiv:1511.06434) and a smaller
    discriminator keep one from winning: the images would become noise, or black."""
    generator = [keras.Input([64])]
    for units in (256, 512):
        generator += [layers.Dense(units, use_bias=False), layers.BatchNormalization(momentum=0.9)]
        generator += [layers.ReLU()]
    generator += [layers.Dense(28 * 28, "sigmoid", dtype="float32"), layers.Reshape([28, 28, 1])]
    discriminator = [
        keras.Input([28, 28, 1]),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(128, "leaky_relu"),
        layers.Dropout(0.5),
        layers.Dense(1, dtype="float32"),
    ]
    made = {"generator": generator, "discriminator": discriminator}
    return {name: keras.Sequential(parts) for name, parts in made.items()}
