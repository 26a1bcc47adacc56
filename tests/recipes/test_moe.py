"""A mixture of experts equals plain TensorFlow that computes all experts for all tokens."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import cut, keras_loss, largest_difference, make_loop
from keras import layers
from references import assert_trains_as, descend

from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.recipes.moe import Balanced, Switch, make_model

STEPS, RATE, WEIGHT = 4, 0.5, 0.3
EXPERTS, TOKENS, WIDTH, CLASSES = 3, 5, 6, 4


def network(depth: int = 1) -> keras.Model:
    x = features = keras.Input([TOKENS, WIDTH])
    for _ in range(depth):
        y, _ = Switch(EXPERTS, 7)(x)
        x = x + y
    return keras.Model(features, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def sequences(count: int = 16 * STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Examples of two kinds in blocks of 8, so that experts have other loads on each replica."""
    random = np.random.default_rng(0)
    features = random.normal(size=(count, TOKENS, WIDTH))
    features += random.normal(size=(2, 1, WIDTH))[np.arange(count) // 8 % 2]
    return features.astype("float32"), random.integers(0, CLASSES, count)


def plain_switch(layer: Switch, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Fedus et al. 2021: the output, equation 4 divided by alpha, and equation 5."""
    probabilities = tf.nn.softmax(x @ layer.router.kernel)
    chosen = tf.one_hot(tf.argmax(probabilities, axis=-1), EXPERTS)
    every = []
    for network in layer.networks:
        inner, outer = network.layers
        every.append(tf.nn.relu(x @ inner.kernel + inner.bias) @ outer.kernel + outer.bias)
    y = tf.einsum("nte,nte,entd->ntd", chosen, probabilities, tf.stack(every))
    fractions = tf.reduce_mean(chosen, axis=[0, 1])
    means = tf.reduce_mean(probabilities, axis=[0, 1])
    return y, EXPERTS * tf.reduce_sum(fractions * means), fractions


def plain_pass(model: keras.Model, x: tf.Tensor) -> tuple[tf.Tensor, list, list]:
    """Logits, and what each `Switch` adds, on one device."""
    balances, fractions = [], []
    for layer in [layer for layer in model.layers if isinstance(layer, Switch)]:
        y, balance, fraction = plain_switch(layer, x)
        x, balances, fractions = x + y, [*balances, balance], [*fractions, fraction]
    return model.layers[-1](tf.reduce_mean(x, axis=1)), balances, fractions


def train_plainly(model: keras.Model, batches, weight: float = WEIGHT) -> None:
    """Gradient descent on one device."""

    def loss_of(features: np.ndarray, labels: np.ndarray) -> tf.Tensor:
        logits, balances, _ = plain_pass(model, tf.constant(features))
        return tf.reduce_mean(keras_loss(labels, logits)) + weight * tf.add_n(balances)

    descend(model, keras.optimizers.SGD(RATE), loss_of, batches)


def make(strategy=None, data=None, **options):
    return make_loop(
        strategy,
        optimizer=lambda: keras.optimizers.SGD(RATE),
        step_class=Balanced,
        data=data or InMemory(sequences(), global_batch_size=16),
        balance_weight=WEIGHT,
        **{"model": network, **options},
    )


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equals_plain_tensorflow(mirrored, replicas):
    arrays = sequences()
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(16, drop_remainder=True)
    loop, unbalanced = make(mirrored(replicas), data), network()
    unbalanced.set_weights(loop.step.model.get_weights())
    train_plainly(unbalanced, cut(arrays), 0.0)
    assert_trains_as(
        loop,
        network(),
        lambda plain: train_plainly(plain, cut(arrays)),
        steps=STEPS,
        tolerance=1e-6,
    )
    assert largest_difference(loop.step.model.get_weights(), unbalanced.get_weights()) > 1e-3


@pytest.mark.slow
def test_unequal_and_empty_parts(mirrored):
    """1 example over 2 replicas is 1 and 0."""
    arrays, sizes = sequences(), [9, 13, 1, 9]
    ends = np.cumsum(sizes)
    batches = [tuple(a[e - n : e] for a in arrays) for e, n in zip(ends, sizes, strict=True)]
    signature = tf.TensorSpec([None, TOKENS, WIDTH]), tf.TensorSpec([None], tf.int64)
    loop = make(
        mirrored(2),
        tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature),
    )
    assert_trains_as(
        loop, network(), lambda plain: train_plainly(plain, batches), steps=STEPS, tolerance=1e-6
    )


@pytest.mark.slow
def test_the_log_has_the_loads_of_the_global_batch(mirrored):
    features, labels = sequences(16)
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)
    loop = make(mirrored(2), data, model=lambda: network(depth=2))
    logits, balances, fractions = plain_pass(loop.step.model, tf.constant(features))
    scalars = loop.train(1)
    assert scalars["balance"] == pytest.approx(np.mean(balances), rel=1e-5)
    hard = np.mean(keras_loss(labels, logits))
    assert scalars["loss"] == pytest.approx(hard + WEIGHT * np.sum(balances), rel=1e-5)
    loads = [[scalars[f"load{layer}_{i}"] for i in range(EXPERTS)] for layer in (0, 1)]
    np.testing.assert_allclose(loads, fractions, rtol=1e-5)


def test_experts_without_tokens_do_not_move():
    """All probabilities are equal, so the first expert gets all tokens."""
    loop = make()
    for layer in loop.step.model.layers:
        if isinstance(layer, Switch):
            layer.router.kernel.assign(tf.zeros_like(layer.router.kernel))
    idle = [v for v in loop.step.model.variables if "sequential" in v.path]
    before = [v.numpy() for v in idle]
    assert loop.train(1)["balance"] == pytest.approx(1.0)
    moved = [(v.numpy() != old).any() for v, old in zip(idle, before, strict=True)]
    assert sum(moved) == len(idle) / EXPERTS
    assert all(np.isfinite(w).all() for w in loop.step.model.get_weights())


def test_the_model_of_the_command_is_saved_and_loaded(tmp_path):
    model = make_model((28, 28, 1), 10)
    model.save(tmp_path / "model.keras")
    images = np.random.default_rng(0).random((3, 28, 28, 1)).astype("float32")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(images), again(images))


def test_a_model_without_experts_is_refused():
    with pytest.raises(UsageError, match=r"^the model has no Switch: give --model=.*make_model$"):
        make_loop(step_class=Balanced)
