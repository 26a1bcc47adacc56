"""Low-rank updates: what trains, what stays, and what is exported."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import BATCH, CLASSES, FEATURES, examples, keras_loss

import ctl
from ctl.errors import UsageError
from ctl.recipes import lora

RANK, ALPHA, RATE, STEPS = 2, 6.0, 0.1, 4


def base() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(CLASSES),
        ]
    )


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples(STEPS * BATCH)).batch(BATCH)


def make(strategy, checkpoints=None, **options) -> ctl.Loop:
    with strategy.scope():
        model = lora.low_rank(base(), RANK, ALPHA)
        step = ctl.TrainStep(model, keras.optimizers.SGD(RATE), **options)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def reference(model: keras.Model) -> tuple[list[np.ndarray], float]:
    """Plain TensorFlow, of arrays: section 4.1, with BatchNorm as in inference. Returns A and B of
    both layers, and the mean loss."""
    w1, b1, gamma, beta, mean, variance, w2, b2 = (
        v.numpy() for v in model.variables if "lora" not in v.name
    )
    updates = [tf.Variable(v.numpy()) for v in model.variables if "lora" in v.name]
    a1, d1, a2, d2 = updates
    losses = []
    for features, labels in batches():
        with tf.GradientTape() as tape:
            h = tf.tanh(features @ w1 + ALPHA / RANK * (features @ a1) @ d1 + b1)
            h = gamma * (h - mean) / tf.sqrt(variance + 1e-3) + beta
            logits = h @ w2 + ALPHA / RANK * (h @ a2) @ d2 + b2
            loss = tf.reduce_mean(keras_loss(labels, logits))
        for variable, gradient in zip(updates, tape.gradient(loss, updates), strict=True):
            variable.assign_sub(RATE * gradient)
        losses.append(float(loss))
    return [v.numpy() for v in updates], float(np.mean(losses))


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    loop = make(mirrored(replicas))
    model = loop.step.model
    wanted, loss = reference(model)
    frozen = [v for v in model.variables if "lora" not in v.name]
    before = [v.numpy() for v in frozen]
    scalars = loop.train(STEPS)
    found = [v.numpy() for v in model.variables if "lora" in v.name]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(found[1]).max() > 1e-3  # B began at zero
    assert scalars["loss"] == pytest.approx(loss, rel=1e-5)
    for variable, value in zip(frozen, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


def test_only_the_updates_are_reduced(mirrored):
    loop = make(mirrored(2))
    (collective,) = loop.plan().collectives
    sizes = FEATURES * RANK + RANK * 8 + 8 * RANK + RANK * CLASSES
    assert collective.bytes - 4 * sizes in (0, 4)  # the number of examples may be among them


def test_begins_as_the_trained_model_and_exports_the_sums(tmp_path, monkeypatch):
    trained, path = base(), str(tmp_path / "model.keras")
    trained.save(path)
    features = examples(8)[0]
    monkeypatch.setattr(flags.FLAGS["lora_base"], "value", path)
    model = lora.make_model()
    np.testing.assert_array_equal(model(features), trained(features))
    for variable in model.trainable_variables:
        variable.assign(tf.ones(variable.shape) / 8.0)
    model.save(path)
    exported = keras.saving.load_model(path)
    np.testing.assert_allclose(exported(features), model(features), rtol=1e-5, atol=1e-6)
    assert np.abs(exported(features) - trained(features)).max() > 0.01
    with pytest.raises(UsageError, match="has low-rank updates already"):
        lora.make_model()


def test_the_projections_of_attention_are_updated():
    tokens = keras.Input([3, 8])
    outputs = keras.layers.MultiHeadAttention(2, 4)(tokens, tokens)
    model = lora.low_rank(keras.Model(tokens, outputs), RANK)
    names = [v.path.split("/")[-2] for v in model.trainable_variables]
    assert names == [p for p in ("query", "key", "value", "attention_output") for _ in "AB"]


def test_a_wrong_base_is_refused(tmp_path, monkeypatch):
    def refused(message: str) -> None:
        with pytest.raises(UsageError, match=message):
            lora.make_model()

    refused("^--lora_base is missing: give the .keras file")
    path = tmp_path / "model.keras"
    path.write_text("no archive")
    monkeypatch.setattr(flags.FLAGS["lora_base"], "value", str(path))
    refused("is not a Keras model that can be loaded: ")
    keras.Sequential([keras.Input([4, 4, 1]), keras.layers.Conv2D(1, 2)]).save(path)
    refused("has no dense layer to update")
