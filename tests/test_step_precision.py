"""Steps in float16 and bfloat16: loss scale, infinities, sums that must not overflow."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    adam,
    assert_replicas_agree,
    both,
    examples,
    largest_difference,
    mlp,
    network,
    precision,
    sgd,
    train,
)

from ctl.step import TrainStep

pytestmark = pytest.mark.compiled_update


@pytest.mark.slow
def test_float16_with_loss_scale_equals_keras(mirrored):
    with precision("mixed_float16"):
        ours, theirs, loop, reference = both(
            mirrored(2),
            adam(),
            reference=lambda: keras.optimizers.LossScaleOptimizer(adam()(), initial_scale=2.0**15),
            loss_scale=True,
        )
    # Rounding to float16 differs with the split of the batch: 2^-11 relative per operation.
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 5e-3
    scales = loop.step.updater.loss_scale.scale, reference.dynamic_scale
    assert [float(scale.numpy()) for scale in scales] == [2.0**15] * 2


@pytest.mark.slow
def test_bfloat16_equals_keras(mirrored):
    with precision("mixed_bfloat16"):
        ours, theirs, *_ = both(mirrored(2), adam())
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 3e-2  # 2^-8 relative


class InfinityOnLastReplica(TrainStep):
    """The gradient of the second step is infinite, on the last replica only."""

    def backward(self, tape, loss, variables=None):
        context = tf.distribute.get_replica_context()
        last = tf.equal(context.replica_id_in_sync_group, context.num_replicas_in_sync - 1)
        bad = tf.logical_and(last, tf.equal(self.global_step, 1))
        return [g + tf.where(bad, np.inf, 0.0) for g in super().backward(tape, loss, variables)]


@pytest.mark.parametrize("options", [{"loss_scale": True}, {"on_nan": "skip"}], ids=str)
def test_an_infinity_on_one_replica_skips_the_update_on_all(mirrored, options):
    strategy = mirrored(2)
    options = {"step_class": InfinityOnLastReplica, "steps": 2, **options}
    loop = train(strategy, mlp, adam(), examples(), **options)
    assert_replicas_agree(strategy, loop.step.model.trainable_variables)
    assert int(loop.step.updater.skipped.numpy()) == 1
    assert int(loop.step.optimizer.iterations.numpy()) == 1
    if "loss_scale" in options:
        assert float(loop.step.updater.loss_scale.scale.numpy()) == 2.0**14
    weights = loop.step.model.get_weights()
    assert all(np.isfinite(w).all() for w in weights)
    assert loop.history.scalars["skipped_steps"][-1] == 1
    scalars = loop.train(3)  # and the third goes on
    assert scalars["skipped_steps"] == 0 and np.isfinite(scalars["loss"])
    assert largest_difference(loop.step.model.get_weights(), weights) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "replicas", "jit_compile", "accumulate_steps"),
    [
        ("mixed_float16", 2, False, 3),
        ("float16", 2, False, 1),
        ("float16", 1, True, 3),
    ],
)
def test_counted_batches_do_not_overflow(mirrored, policy, replicas, jit_compile, accumulate_steps):
    """The sum of the gradients of 16 examples is more than float16 can hold, their mean is not."""
    features, labels = examples(4 * BATCH)
    arrays = 2e4 * np.sign(features), labels

    def model():
        dense = keras.layers.Dense(CLASSES, kernel_initializer="zeros")
        return keras.Sequential([keras.Input([FEATURES]), dense])

    weights = []
    for constant in (True, False):  # sample weights are counted
        with precision(policy):
            loop = train(
                mirrored(replicas),
                model,
                sgd(1e-4),
                arrays if constant else (*arrays, np.ones(len(labels), "float32")),
                steps=1,
                on_nan="skip",
                jit_compile=jit_compile,
                accumulate_steps=accumulate_steps,
            )
        assert loop.step.updater.skipped_so_far() == 0
        weights.append(loop.step.model.get_weights())
    assert np.abs(weights[0][0]).max() > 0
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_counted_gradients_are_sums_until_they_are_reduced(dtype):
    """A step of one's own may override either side of it."""
    with precision(dtype):
        model = network()
        step = TrainStep(model, keras.optimizers.SGD(0.1))
    strategy = tf.distribute.get_strategy()
    step.build(strategy)
    features, labels = examples(7)
    batch = tf.constant(features), tf.constant(labels), tf.ones([7])

    @tf.function
    def both_sides():
        def replica():
            loss, sums = step.forward_backward(batch, tf.constant(7.0))
            before = step.statistics.snapshot(batch)
            return sums, step.reduce(loss, tf.constant(7.0), sums, before)[2]

        return strategy.run(replica)

    sums, means = both_sides()
    logits = model(features).numpy().astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected[np.arange(7), labels] -= 1
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(sums[-1], expected.sum(0), atol=tolerance)  # of the bias
    np.testing.assert_allclose(means[-1], expected.mean(0), atol=tolerance)
    assert sums[-1].dtype == "float32" and means[-1].dtype == dtype


def test_float16_without_a_loss_scale_is_warned_of(caplog):
    said = "computes in float16, in which small gradients are 0: give TrainStep(loss_scale=True)"
    for policy, options, warns in (
        ("mixed_float16", {}, True),
        ("mixed_float16", {"loss_scale": True}, False),
        ("mixed_bfloat16", {}, False),
    ):
        caplog.clear()
        with precision(policy):
            step = TrainStep(network(), keras.optimizers.SGD(0.1), **options)
        step.build(tf.distribute.get_strategy())
        assert (said in caplog.text) == warns
