"""The GAN is trained as a plain loop of TensorFlow trains it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference
from references import global_batches
from replica_noise import replica_noise

from ctl.examples import gan

pytestmark = pytest.mark.slow
STEPS = 3


def plain_tensorflow(generator: keras.Model, discriminator: keras.Model, batches: list) -> list:
    """Both gradients of each batch, then both updates. Returns the losses of the steps."""
    parts = generator, discriminator
    optimizers, seen = [keras.optimizers.Adam(5e-4, beta_1=0.5) for _ in parts], []
    for step, (images, _) in enumerate(batches):
        noise = replica_noise(0, "noise", step, 1, gan.BATCH, gan.NOISE)
        with tf.GradientTape(persistent=True) as tape:
            fake = tf.sigmoid(discriminator(generator(noise, training=True), training=True))
            real = tf.sigmoid(discriminator(tf.cast(images, tf.float32) / 255, training=True))
            value = tf.reduce_mean(tf.math.log(real)) + tf.reduce_mean(tf.math.log(1 - fake))
            losses = -tf.reduce_mean(tf.math.log(fake)), -value
        gradients = [
            tape.gradient(loss, [v.value for v in part.trainable_variables])
            for part, loss in zip(parts, losses, strict=True)
        ]
        for optimizer, part, found in zip(optimizers, parts, gradients, strict=True):
            optimizer.apply(found, part.trainable_variables)
        seen.append(losses)
    return seen


def test_it_equals_plain_tensorflow():
    """Dropout draws the same, since the layers are made in the same order from the same seed."""
    keras.utils.set_random_seed(1)
    loop = gan.make_loop()
    keras.utils.set_random_seed(1)
    plain = gan.make_generator(), gan.make_discriminator()
    losses = plain_tensorflow(*plain, global_batches(loop.dataset, STEPS))
    scalars = loop.train(STEPS)
    for name, theirs in zip(("generator", "discriminator"), plain, strict=True):
        ours = loop.step.model[name]
        assert largest_difference(ours.get_weights(), theirs.get_weights()) < 1e-5
    found = [scalars["generator"], scalars["discriminator"]]
    assert found == pytest.approx(np.mean(losses, axis=0).tolist(), rel=1e-5)


def test_the_program_draws_three_images(monkeypatch, capsys):
    monkeypatch.setattr(gan, "STEPS", 2)
    gan.main()
    drawn = capsys.readouterr().out.splitlines()[1:]
    assert [len(line) for line in drawn] == [3 * 28] * 14
    assert gan.draw(tf.reshape([0.0, 1.0] * 2, [1, 2, 2, 1])) == " @"
