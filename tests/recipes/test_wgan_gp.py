"""The Wasserstein GAN: a penalty on gradients, and a generator that learns at every third step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import assert_trains_as
from replica_noise import replica_noise, replica_seeds
from test_gan import BATCH, NOISE, RATE, STEPS, batches
from test_gan import model as models_of_gan

import ctl
from ctl.base.models import as_model
from ctl.recipes import wgan_gp

CRITIC_STEPS, WEIGHT = 3, 2.0


def model() -> dict[str, keras.Model]:
    models = models_of_gan()
    return {"generator": models["generator"], "critic": models["discriminator"]}


def parts_of(models) -> list[keras.Model]:
    return [models["generator"], models["critic"]]


def make(strategy, checkpoints=None, **options) -> ctl.Loop:
    options = {"critic_steps": CRITIC_STEPS, "gradient_penalty": WEIGHT, **options}
    with strategy.scope():
        optimizer = keras.optimizers.Adam(RATE, beta_1=0.0, beta_2=0.9)
        step = wgan_gp.WGANGP(model(), optimizer, random_seed=7, **options)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def losses_of(parts, images, noise: tf.Tensor, share: tf.Tensor) -> list[tf.Tensor]:
    """Equation 3, and what the generator makes smaller; means over the batch."""
    generator, critic = parts
    real, fake = tf.cast(images, tf.float32) / 255.0, generator(noise)
    between = share * real + (1.0 - share) * fake
    with tf.GradientTape() as tape:
        tape.watch(between)
        scores = critic(between)
    slopes = tf.sqrt(tf.reduce_sum(tape.gradient(scores, between) ** 2, [1, 2, 3]))
    distance = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real))
    penalty = WEIGHT * tf.reduce_mean((slopes - 1.0) ** 2)
    return [-tf.reduce_mean(critic(fake)), distance + penalty]


def plain_tensorflow(parts, replicas: int) -> list[float]:
    """On one device: the critic at each step, the generator at each third one, from the weights
    before it. Returns the means of the losses."""
    optimizers = [keras.optimizers.Adam(RATE, beta_1=0.0, beta_2=0.9) for _ in parts]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.build(part.trainable_variables)
    seen = []
    for step, (images, _) in enumerate(batches()):
        noise = replica_noise(7, "noise", step, replicas, BATCH, NOISE)
        each = [BATCH // replicas, 1, 1, 1]
        seeds = replica_seeds(7, "mixing", step, replicas)
        share = tf.concat([tf.random.stateless_uniform(each, seed) for seed in seeds], 0)
        with tf.GradientTape(persistent=True) as tape:
            losses = losses_of(parts, images, noise, share)
        for number, part in enumerate(parts):
            if number == 0 and step % CRITIC_STEPS != CRITIC_STEPS - 1:
                continue
            found = tape.gradient(losses[number], [v.value for v in part.trainable_variables])
            optimizers[number].apply(found, part.trainable_variables)
        seen.append([float(loss) for loss in losses])
    return np.mean(seen, axis=0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    loop = make(mirrored(replicas))
    scalars, losses = assert_trains_as(
        loop,
        as_model(model()),
        lambda plain: plain_tensorflow(parts_of(plain), replicas),
        steps=STEPS,
    )
    assert [scalars["generator"], scalars["critic"]] == pytest.approx(losses, rel=1e-5)
    assert loop.steps.run.experimental_get_tracing_count() == 2


def test_an_evaluation_has_both_losses():
    made = model()
    step = wgan_gp.Evaluation(made, gradient_penalty=WEIGHT)
    results = ctl.Evaluator(step, batches()).run()
    noise = tf.random.stateless_normal([BATCH, NOISE], [0, 0])
    share = tf.random.stateless_uniform([BATCH, 1, 1, 1], [0, 0])
    losses = [losses_of(parts_of(made), images, noise, share) for images, _ in batches()]
    found = [results["generator"], results["critic"]]
    assert found == pytest.approx(np.mean(losses, axis=0).tolist(), rel=1e-5)
