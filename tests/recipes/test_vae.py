"""The variational autoencoder: its bound, the noise of each replica, and the images it draws."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import assert_trains_as, descend, image_batches
from replica_noise import replica_noise

import ctl
from ctl.recipes import samples, vae

SHAPE, LATENT, BATCH, STEPS = (4, 5, 1), 3, 8, 4


def batches() -> tf.data.Dataset:
    return image_batches(SHAPE, BATCH, STEPS)


def make(strategy, checkpoints=None) -> ctl.Loop:
    with strategy.scope():
        model = vae.vae(SHAPE, LATENT, hidden=6)
        step = vae.VAE(model, keras.optimizers.SGD(0.01), random_seed=7)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def plain_tensorflow(model: keras.Model, replicas: int) -> list[float]:
    """Trains on one device, with the noise of so many replicas. Returns the losses."""
    hidden, mean_of, log_variance_of, decoder = map(
        model.get_layer, ("hidden", "mean", "log_variance", "decoder")
    )

    def loss_of(step: int, batch: tuple) -> tf.Tensor:
        x = tf.cast(batch[0], tf.float32) / 255.0
        noise = replica_noise(7, "noise", step, replicas, BATCH, LATENT)
        h = hidden(tf.reshape(x, [BATCH, -1]))
        mean, log_variance = mean_of(h), log_variance_of(h)
        deviation = tf.sqrt(tf.exp(log_variance))
        chance = tf.sigmoid(decoder(mean + deviation * noise))
        likely = x * tf.math.log(chance) + (1.0 - x) * tf.math.log(1.0 - chance)
        kl = (deviation**2 + mean**2 - 1.0) / 2.0 - tf.math.log(deviation)
        return (tf.reduce_sum(kl) - tf.reduce_sum(likely)) / BATCH

    return descend(model, keras.optimizers.SGD(0.01), loss_of, enumerate(batches()))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    scalars, losses = assert_trains_as(
        make(mirrored(replicas)),
        vae.vae(SHAPE, LATENT, hidden=6),
        lambda plain: plain_tensorflow(plain, replicas),
        steps=STEPS,
    )
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scalars["loss"] == pytest.approx(scalars["reconstruction"] + scalars["kl"], rel=1e-5)


def test_an_evaluation_draws_the_same_images_of_the_same_weights(tmp_path):
    model = vae.vae(SHAPE, LATENT, hidden=6)
    path = tmp_path / "new" / "images.png"
    evaluator = ctl.Evaluator(vae.Evaluation(model, samples=str(path)), batches())
    first = evaluator.run(), path.read_bytes()
    assert (evaluator.run(), path.read_bytes()) == first
    assert first[0]["loss"] == pytest.approx(first[0]["reconstruction"] + first[0]["kl"], rel=1e-5)
    drawn = tf.io.decode_png(first[1])
    assert drawn.shape == (8 * SHAPE[0], 8 * SHAPE[1], SHAPE[2])
    noise = tf.random.stateless_normal([64, LATENT], samples.SEED)
    second = tf.sigmoid(model.get_layer("decoder")(noise))[1]
    there = drawn[: SHAPE[0], SHAPE[1] : 2 * SHAPE[1]]  # right of the first
    np.testing.assert_allclose(there, 255.0 * second, atol=0.51)


def test_without_a_run_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ctl.Evaluator(vae.Evaluation(vae.vae(SHAPE, LATENT, hidden=6)), batches()).run()
    assert not list(tmp_path.iterdir())
