"""The diffusion model: its loss, the noise of each replica, and the images it makes."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from references import assert_trains_as, descend, image_batches
from replica_noise import replica_noise, replica_seeds

import ctl
from ctl.recipes import ddpm

SHAPE, BATCH, STEPS, RATE, TIMES = (2, 3, 1), 8, 4, 0.1, 30


def model() -> keras.Model:
    """It finds about the noise in images of grey, so that what it makes is not black or white."""
    images, times = keras.Input(SHAPE), keras.Input([], dtype="int32")
    when = layers.Embedding(TIMES + 1, 5)(times)
    x = layers.Concatenate()([layers.Flatten()(images), when])
    x = layers.Dense(6)(layers.Dense(7, "tanh")(x))
    return keras.Model([images, times], images + 0.3 * layers.Reshape(SHAPE)(x))


def batches() -> tf.data.Dataset:
    return image_batches(SHAPE, BATCH, STEPS)


def make(strategy, checkpoints=None) -> ctl.Loop:
    with strategy.scope():
        step = ddpm.DDPM(model(), keras.optimizers.SGD(RATE), random_seed=7, diffusion_steps=TIMES)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def levels() -> tuple[np.ndarray, np.ndarray]:
    """beta and alpha_bar of times 1, 2, ... at index 0, 1, ...; of an image that ends as noise."""
    beta = np.array([1e-4 + (0.02 - 1e-4) * t / (TIMES - 1) for t in range(TIMES)]) * 1000 / TIMES
    return beta, np.array([np.prod(1.0 - beta[: t + 1]) for t in range(TIMES)])


def loss_of(network, images: tf.Tensor, times: np.ndarray, noise: np.ndarray) -> tf.Tensor:
    """Equation 14."""
    left = levels()[1][times - 1].astype("float32")
    image_part, noise_part = (np.sqrt(part)[:, None, None, None] for part in (left, 1.0 - left))
    noisy = image_part * (tf.cast(images, tf.float32) / 127.5 - 1.0) + noise_part * noise
    return tf.reduce_mean((noise - network([noisy, tf.constant(times)])) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    drawn = []
    for step, (images, _) in enumerate(batches()):
        times = [
            tf.random.stateless_uniform([BATCH // replicas], seed, 1, TIMES + 1, tf.int32)
            for seed in replica_seeds(7, "time", step, replicas)
        ]
        noise = replica_noise(7, "noise", step, replicas, BATCH, *SHAPE).numpy()
        drawn.append((images, np.concatenate(times), noise))
    assert len(np.unique([times for _, times, _ in drawn])) > STEPS * BATCH / 3
    scalars, losses = assert_trains_as(
        make(mirrored(replicas)),
        model(),
        lambda plain: descend(
            plain, keras.optimizers.SGD(RATE), functools.partial(loss_of, plain), drawn
        ),
        steps=STEPS,
    )
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_an_evaluation_makes_the_same_images_of_the_same_weights(tmp_path):
    made, path = model(), tmp_path / "images.png"
    step = ddpm.Evaluation(made, diffusion_steps=TIMES, samples=str(path))
    evaluator = ctl.Evaluator(step, batches())
    first = evaluator.run(), path.read_bytes()
    assert (evaluator.run(), path.read_bytes()) == first
    times = np.array([2, 6, 10, 14, 17, 21, 25, 29])  # the middles of eighths of 30
    noise = tf.random.stateless_normal([BATCH, *SHAPE], (0, 0)).numpy()
    losses = [float(loss_of(made, images, times, noise)) for images, _ in batches()]
    assert first[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert tf.io.decode_png(first[1]).shape == (8 * SHAPE[0], 8 * SHAPE[1], SHAPE[2])
    made.set_weights([0.5 * weights for weights in made.get_weights()])  # not a constant of a graph
    evaluator.run()
    assert path.read_bytes() != first[1]


def test_sampling_is_algorithm_2():
    made = model()
    step = ddpm.Evaluation(made, diffusion_steps=TIMES)
    found = step.sampled(4)
    beta, left = levels()
    images = tf.random.stateless_normal([4, *SHAPE], (0, 0)).numpy()
    for time in range(TIMES, 0, -1):
        b, a = beta[time - 1], left[time - 1]
        noise = tf.random.stateless_normal([4, *SHAPE], (1, time)).numpy()
        guess = made([tf.constant(images), tf.fill([4], time)]).numpy()
        images = (images - b / np.sqrt(1.0 - a) * guess) / np.sqrt(1.0 - b)
        if time > 1:
            images += np.sqrt(b * (1.0 - left[time - 2]) / (1.0 - a)) * noise
    wanted = np.clip(images / 2.0 + 0.5, 0.0, 1.0)
    assert np.mean((wanted > 0.0) & (wanted < 1.0)) > 0.9 and np.std(wanted) > 0.02
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_a_perfect_model_finds_the_image_in_the_noise():
    """One that knows the only image there is: the noise is what is not that image."""
    image = np.random.default_rng(1).uniform(size=SHAPE).astype("float32")
    left = tf.constant(np.concatenate([[1.0], levels()[1]]).astype("float32"))

    class Oracle(keras.Model):
        inputs = [tf.zeros([1, *SHAPE])]

        def call(self, inputs):
            noisy, times = inputs
            part = tf.reshape(tf.gather(left, times), [-1, 1, 1, 1])
            return (noisy - tf.sqrt(part) * (2.0 * image - 1.0)) / tf.sqrt(1.0 - part)

    step = ddpm.Evaluation(Oracle(), diffusion_steps=TIMES)
    images = step.sampled(3)
    np.testing.assert_allclose(images, np.stack([image] * 3), atol=1e-3)


def test_the_model_fits_the_embedded_images():
    made = ddpm.make_model()
    images = tf.random.stateless_normal([2, 28, 28, 1], (0, 0))
    early, late = (made([images, tf.fill([2], time)]) for time in (1, 1000))
    assert early.shape == images.shape
    assert float(tf.reduce_max(tf.abs(early - late))) > 1e-3  # it looks at the time
