"""Losses that layers add count once per global batch, whatever the shares and their weights."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, examples, keras_loss, largest_difference, make_loop
from keras import layers

from ctl.errors import UsageError
from ctl.step import TrainStep

STEPS, BATCH, RATE = 3, 13, 0.5


class Spread(layers.Layer):
    """Adds a loss of the user's own."""

    def call(self, x):
        self.add_loss(0.3 * keras.ops.mean(x**4))
        return x


def model() -> keras.Model:
    parts = [layers.Dense(6, "tanh", activity_regularizer="l2", kernel_regularizer="l1"), Spread()]
    return keras.Sequential([keras.Input([FEATURES]), *parts, layers.Dense(CLASSES)])


def batches(weigh) -> list[tuple]:
    features, labels = examples(STEPS * BATCH)
    batches = []
    for part in np.split(np.arange(STEPS * BATCH), STEPS):
        weights = np.random.default_rng(len(batches)).uniform(0.2, 2.0, BATCH).astype(np.float32)
        batches.append((features[part], labels[part], weigh(weights)))
    return batches


def plainly_trained(weigh) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    trained = model()
    for features, labels, weights in batches(weigh):
        with tf.GradientTape() as tape:
            losses = keras_loss(labels, trained(features, training=True))
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
            loss += tf.add_n(trained.losses)
        variables = [v.value for v in trained.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
    return trained.get_weights()


def loop_of(strategy, weigh, *, static=False, model=model, **options):
    made = batches(weigh)
    size = BATCH if static else None
    signature = [tf.TensorSpec([size, *part.shape[1:]], part.dtype) for part in made[0]]
    data = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=tuple(signature))
    given = {"model": model, "optimizer": lambda: keras.optimizers.SGD(RATE), "seed": 1}
    return make_loop(strategy, data=data, **given, **options)


def first_half_without_weight(weights):
    """A share may weigh nothing; its activities count all the same."""
    return weights * (np.arange(BATCH) >= BATCH / 2)


@pytest.mark.slow
@pytest.mark.parametrize("weigh", [lambda w: w, first_half_without_weight], ids=["all", "half"])
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {}),
        (1, {"accumulate_steps": 3}),
        (1, {"static": True, "jit_compile": True}),
        (2, {}),
        (4, {"accumulate_steps": 2}),
        (2, {"loss_scale": True}),
    ],
)
def test_any_shares_equal_the_whole_batch(mirrored, replicas, options, weigh):
    loop = loop_of(mirrored(replicas), weigh, **options)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plainly_trained(weigh)) <= 2e-6


def test_a_call_may_be_decorated(mirrored):
    def decorated(call):
        return functools.wraps(call)(lambda *arguments: call(*arguments))

    class Decorated(layers.Layer):
        call = decorated(Spread.call)

    def model():
        return keras.Sequential([keras.Input([FEATURES]), Decorated(), layers.Dense(CLASSES)])

    one, two = (loop_of(mirrored(n), first_half_without_weight, model=model) for n in (1, 2))
    one.train(STEPS)
    two.train(STEPS)
    weights = [loop.step.model.get_weights() for loop in (one, two)]
    assert largest_difference(*weights) <= 2e-6


def test_a_loss_that_is_added_elsewhere_is_refused(mirrored):
    def hidden(layer, x):
        getattr(layer, "add_" + "loss")(keras.ops.mean(x**2))
        return x

    class Hidden(layers.Layer):
        def call(self, x):
            return hidden(self, x)

    def model():
        return keras.Sequential([keras.Input([FEATURES]), Hidden(), layers.Dense(CLASSES)])

    with pytest.raises(
        UsageError, match=r"^a layer adds a loss \(add_loss\), and .* of TrainStep$"
    ):
        loop_of(mirrored(2), lambda w: w, model=model).train(1)


class Doubled(TrainStep):
    """Each example counts 2, by a count of its own."""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return 2.0 * losses, outputs

    def count(self, batch):
        return 2 * super().count(batch)


@pytest.mark.parametrize("static", [True, False])
def test_a_count_of_ones_own(mirrored, static):
    """An integer costs no collective: with a static shape it is the same on every replica."""
    weigh = np.ones_like
    plain = plainly_trained(weigh)
    made = [batch[:2] for batch in batches(weigh)]
    size = BATCH if static else None
    signature = [tf.TensorSpec([size, *part.shape[1:]], part.dtype) for part in made[0]]
    data = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=tuple(signature))
    given = {"model": model, "optimizer": lambda: keras.optimizers.SGD(RATE), "seed": 1}
    loop = make_loop(mirrored(1 if static else 2), data=data, step_class=Doubled, **given)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plain) <= 2e-6
