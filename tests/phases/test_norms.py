"""Norms of gradient, weights and update: N replicas log what one does, and what NumPy computes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, keras_loss, make_loop, mlp, precision, sgd

NORMS = ("gradient_norm", "weight_norm", "update_ratio")
STEPS = 3


def norms(strategy, steps=STEPS, **options):
    data = tf.data.Dataset.from_tensor_slices(examples(STEPS * 9)).batch(9)
    options = {"data": data, "optimizer": sgd(), **options}
    loop = make_loop(strategy, seed=3, log_norms=True, **options)
    scalars = loop.train(steps)
    return {name: scalars[name] for name in NORMS}, loop


def by_hand(clip_norm):
    """The means over the steps, with NumPy around the gradients of one device."""
    keras.utils.set_random_seed(3)
    model, rate, rows = mlp(), 0.1, []
    features, labels = examples(STEPS * 9)
    for start in range(0, len(labels), 9):
        part = slice(start, start + 9)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels[part], model(features[part])))
        variables = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        flat = np.concatenate([g.numpy().ravel() for g in gradients])
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        norm, size = np.linalg.norm(flat), np.linalg.norm(weights)
        rows.append((norm, size, rate * min(norm, clip_norm) / size))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(rate * min(1.0, clip_norm / norm) * gradient)
    return dict(zip(NORMS, np.mean(rows, axis=0), strict=True))


@pytest.mark.slow
def test_they_are_those_of_numpy_on_any_number_of_replicas(mirrored):
    """9 examples over 4 replicas are 3, 3, 3 and 0."""
    expected = by_hand(clip_norm=0.3)
    assert expected["update_ratio"] < 0.1 * expected["gradient_norm"] / expected["weight_norm"]
    for replicas in (1, 4):
        found, _ = norms(mirrored(replicas), clip_norm=0.3)
        assert found == pytest.approx(expected, rel=1e-5), replicas


def two_groups(model):
    first, second = model.layers
    return [(keras.optimizers.SGD(0.1), first), (keras.optimizers.Adam(0.01), second)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"accumulate_steps": 2}, {"jit_compile": True}, {"loss_scale": True}],
    ids=lambda options: next(iter(options)),
)
def test_two_replicas_are_as_one(mirrored, options):
    dtype = "mixed_float16" if "loss_scale" in options else "float32"
    features, labels = examples(STEPS * BATCH)
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH, drop_remainder=True)
    with precision(dtype):
        one, two = (norms(mirrored(n), data=data, **options)[0] for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-6 if dtype == "float32" else 2e-3)
    assert one["gradient_norm"] < 10  # without the loss scale


@pytest.mark.slow
def test_groups_count_together(mirrored):
    found = []
    for replicas in (1, 2):
        keras.utils.set_random_seed(3)
        with mirrored(replicas).scope():
            model = mlp()
        groups = {"model": lambda m=model: m, "optimizer": lambda m=model: two_groups(m)}
        found.append(norms(mirrored(replicas), **groups)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
def test_a_skipped_update_logs_none_and_off_adds_nothing(mirrored):
    features, labels = examples(2 * 9)
    features[9:, 0] = np.nan
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(9)
    first, _ = norms(mirrored(2), steps=1, data=data, on_nan="skip")
    both, loop = norms(mirrored(2), steps=2, data=data, on_nan="skip")
    assert both == first
    assert loop.scalars.read()["skipped_steps"] == 1
    assert not set(NORMS) & set(make_loop(mirrored(2)).train(1))
