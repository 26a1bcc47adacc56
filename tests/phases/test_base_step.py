"""What a step makes of features: images are scaled, tokens are not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.phases.base_step import scale_images

BYTES = np.array([[0, 255], [51, 102]], np.uint8)


def test_images_are_scaled_and_tokens_are_not():
    """Also where Keras gives the inputs of a list by name, in another order than a dict has."""
    tokens = keras.Input([2], dtype="int32", name="tokens")
    image = keras.Input([2], name="image")
    features = {"image": tf.constant(BYTES), "tokens": tf.constant(BYTES)}
    for inputs in ([tokens, image], [image, tokens]):
        scaled = scale_images(features, inputs)
        np.testing.assert_allclose(scaled["image"], BYTES / 255, rtol=1e-6)
        np.testing.assert_array_equal(scaled["tokens"], BYTES)
        assert scaled["image"].dtype == tf.float32 and scaled["tokens"].dtype == tf.uint8
    assert scale_images(features)["tokens"].dtype == tf.float32  # nothing is known of the model


def model(rows: int) -> keras.Model:
    layers = [keras.Input([2], dtype="int32"), keras.layers.Embedding(rows, 3)]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(2)])


def test_a_model_of_tokens_gets_bytes_as_they_are():
    made, labels = model(256), np.array([0, 1])
    results = ctl.Evaluator(ctl.EvalStep(made), (BYTES, labels)).run()
    losses = keras.losses.sparse_categorical_crossentropy(labels, made(BYTES), from_logits=True)
    assert results["loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-6)
    with pytest.raises(UsageError, match="^id 255 in example 0 is outside of layer e"):
        ctl.Loop(ctl.TrainStep(model(255), "sgd"), (BYTES, labels), global_batch_size=2)
