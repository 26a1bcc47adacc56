"""The generative adversarial network: two losses, two groups, and the noise of each replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import assert_trains_as, image_batches
from replica_noise import replica_noise

import ctl
from ctl.base.models import as_model
from ctl.errors import UsageError
from ctl.phases.optimizers import is_decayed
from ctl.recipes import gan

SHAPE, NOISE, BATCH, STEPS, RATE = (2, 3, 1), 5, 8, 4, 0.01


def model() -> dict[str, keras.Model]:
    """Parts of different sizes, so that one is not taken for the other."""
    generator = [
        keras.Input([NOISE]),
        keras.layers.Dense(6, "sigmoid"),
        keras.layers.Reshape(SHAPE),
    ]
    discriminator = [
        keras.Input(SHAPE),
        keras.layers.Flatten(),
        keras.layers.Dense(7, "tanh"),
        keras.layers.Dense(1),
    ]
    return {
        "generator": keras.Sequential(generator),
        "discriminator": keras.Sequential(discriminator),
    }


def parts_of(models) -> list[keras.Model]:
    return [models["generator"], models["discriminator"]]


def batches() -> tf.data.Dataset:
    return image_batches(SHAPE, BATCH, STEPS)


def make(strategy, checkpoints=None) -> ctl.Loop:
    with strategy.scope():
        step = gan.GAN(model(), keras.optimizers.Adam(RATE, beta_1=0.5), random_seed=7)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def losses_of(parts, images: tf.Tensor, noise: tf.Tensor) -> list[tf.Tensor]:
    """Section 3: what generator and discriminator make smaller, means over the batch."""
    generator, discriminator = parts
    on_real = tf.sigmoid(discriminator(tf.cast(images, tf.float32) / 255.0))
    on_fake = tf.sigmoid(discriminator(generator(noise)))
    value = tf.reduce_mean(tf.math.log(on_real)) + tf.reduce_mean(tf.math.log(1.0 - on_fake))
    return [-tf.reduce_mean(tf.math.log(on_fake)), -value]


def plain_tensorflow(parts, replicas: int) -> list[float]:
    """Trains on one device: both gradients of each batch, then both updates. Returns the means of
    the losses."""
    optimizers, seen = [keras.optimizers.Adam(RATE, beta_1=0.5) for _ in parts], []
    for step, (images, _) in enumerate(batches()):
        noise = replica_noise(7, "noise", step, replicas, BATCH, NOISE)
        with tf.GradientTape(persistent=True) as tape:
            losses = losses_of(parts, images, noise)
        gradients = [
            tape.gradient(loss, [v.value for v in part.trainable_variables])
            for part, loss in zip(parts, losses, strict=True)
        ]
        for optimizer, part, found in zip(optimizers, parts, gradients, strict=True):
            optimizer.apply(found, part.trainable_variables)
        seen.append([float(loss) for loss in losses])
    return np.mean(seen, axis=0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    scalars, losses = assert_trains_as(
        make(mirrored(replicas)),
        as_model(model()),
        lambda plain: plain_tensorflow(parts_of(plain), replicas),
        steps=STEPS,
    )
    assert [scalars["generator"], scalars["discriminator"]] == pytest.approx(losses, rel=1e-5)
    assert scalars["loss"] == pytest.approx(sum(losses), rel=1e-5)


def test_an_evaluation_draws_images(tmp_path):
    made = model()
    evaluator = ctl.Evaluator(gan.Evaluation(made, samples=str(tmp_path / "images.png")), batches())
    results = evaluator.run()
    noise = tf.random.stateless_normal([BATCH, NOISE], [0, 0])
    losses = [losses_of(parts_of(made), images, noise) for images, _ in batches()]
    found = [results["generator"], results["discriminator"]]
    assert found == pytest.approx(np.mean(losses, axis=0).tolist(), rel=1e-5)
    drawn = tf.io.decode_png((tmp_path / "images.png").read_bytes())
    assert drawn.shape == (8 * SHAPE[0], 8 * SHAPE[1], SHAPE[2])


def test_the_model_fits_the_embedded_images():
    generator, discriminator = parts_of(gan.make_model())
    assert generator.output_shape == discriminator.input_shape == (None, 28, 28, 1)
    assert discriminator.output_shape == (None, 1)


def test_what_is_no_gan_is_refused():
    one = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    with pytest.raises(UsageError, match="^GAN needs a dict of two models, generator and disc"):
        gan.GAN(one, keras.optimizers.Adam())
    with pytest.raises(UsageError, match="^GAN needs a dict of two models"):
        gan.GAN({"generator": one, "critic": one}, keras.optimizers.Adam())


def test_the_discriminator_has_the_settings_of_the_generator():
    optimizer = keras.optimizers.AdamW(RATE, weight_decay=0.25)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    step = gan.GAN(model(), optimizer)
    ctl.Loop(step, batches())
    for group in step.updater.groups:
        decayed = [is_decayed(group.optimizer, v) for v in group.variables]
        assert decayed == [v.name == "kernel" for v in group.variables]
    ctl.Loop(gan.GAN(model(), "adam"), batches()).train(1)
