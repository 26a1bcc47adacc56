"""Losses that layers add count once per global batch, whatever the shares and their weights."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    batches_of,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    network,
    sgd,
)
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
    penalties = {"activity_regularizer": "l2", "kernel_regularizer": "l1"}
    return network(layers.Dense(6, "tanh", **penalties), Spread())


def batches(weigh) -> list[tuple]:
    features, labels = examples(STEPS * BATCH)
    batches = []
    for part in np.split(np.arange(STEPS * BATCH), STEPS):
        weights = np.random.default_rng(len(batches)).uniform(0.2, 2.0, BATCH).astype(np.float32)
        batches.append((features[part], labels[part], weigh(weights)))
    return batches


@functools.cache
def plainly_trained(weigh, weighting: str = "examples") -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    trained = model()
    for features, labels, weights in batches(weigh):
        with tf.GradientTape() as tape:
            losses = keras_loss(labels, trained(features, training=True))
            counted = weights if weighting == "sum_of_weights" else weights != 0
            loss = tf.reduce_sum(losses * weights) / np.sum(counted, dtype=np.float32)
            loss += tf.add_n(trained.losses)
        variables = [v.value for v in trained.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
    return trained.get_weights()


def loop_of(strategy, weigh, *, static=False, model=model, parts=3, **options):
    """``parts`` of a batch: features, labels and weights."""
    data = batches_of([batch[:parts] for batch in batches(weigh)], BATCH if static else None)
    return make_loop(strategy, data=data, model=model, optimizer=sgd(RATE), seed=1, **options)


def whole(weights):
    return weights


def first_half_without_weight(weights):
    """A share may weigh nothing; its activities count all the same."""
    return weights * (np.arange(BATCH) >= BATCH / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options", "weigh"),
    [
        (1, {"static": True, "jit_compile": True}, first_half_without_weight),
        (2, {"accumulate_steps": 2}, first_half_without_weight),
        (2, {"loss_scale": True}, first_half_without_weight),
        (2, {"weighting": "sum_of_weights"}, first_half_without_weight),
        (2, {"weighting": "sum_of_weights"}, whole),
    ],
)
def test_any_shares_equal_the_whole_batch(mirrored, replicas, options, weigh):
    loop = loop_of(mirrored(replicas), weigh, **options)
    loop.train(STEPS)
    plain = plainly_trained(weigh, options.get("weighting", "examples"))
    assert largest_difference(loop.step.model.get_weights(), plain) <= 2e-6


@pytest.mark.slow
def test_a_call_may_be_decorated(mirrored):
    def decorated(call):
        return functools.wraps(call)(lambda *arguments: call(*arguments))

    class Decorated(layers.Layer):
        call = decorated(Spread.call)

    weights = []
    for replicas in (1, 2):
        model = lambda: network(Decorated())  # noqa: E731
        loop = loop_of(mirrored(replicas), first_half_without_weight, model=model)
        loop.train(STEPS)
        weights.append(loop.step.model.get_weights())
    assert largest_difference(*weights) <= 2e-6


def test_a_loss_that_is_added_elsewhere_is_refused(mirrored):
    def hidden(layer, x):
        getattr(layer, "add_" + "loss")(keras.ops.mean(x**2))
        return x

    class Hidden(layers.Layer):
        def call(self, x):
            return hidden(self, x)

    reason = r"^a layer adds a loss \(add_loss\), and .* of TrainStep$"
    with pytest.raises(UsageError, match=reason):
        loop_of(mirrored(2), lambda w: w, model=lambda: network(Hidden())).train(1)


class Doubled(TrainStep):
    """Each example counts 2, by a count of its own."""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return 2.0 * losses, outputs

    def count(self, batch):
        return 2 * super().count(batch)


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False])
def test_a_count_of_ones_own(mirrored, static):
    """An integer costs no collective: with a static shape it is the same on every replica."""
    strategy = mirrored(1 if static else 2)
    loop = loop_of(strategy, np.ones_like, static=static, parts=2, step_class=Doubled)
    loop.train(STEPS)
    plain = plainly_trained(np.ones_like)
    assert largest_difference(loop.step.model.get_weights(), plain) <= 2e-6
