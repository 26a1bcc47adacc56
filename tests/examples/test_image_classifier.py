"""The image classifier is trained as a plain loop of TensorFlow trains it."""

from __future__ import annotations

import math

import keras
import pytest
import tensorflow as tf
from references import descend

from ctl.examples import image_classifier
from ctl.testing import check_reference

pytestmark = pytest.mark.slow


def plain_tensorflow(model: keras.Model, batches: list) -> None:
    """Adam, whose rate grows in 50 steps, and then falls along half a cosine."""
    optimizer = keras.optimizers.Adam()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(images, labels):
        return cross_entropy(labels, model(tf.cast(images, "float32") / 255, training=True))

    for step, batch in enumerate(batches):
        cosine = (1 + math.cos(math.pi * max(0, step - 50) / (625 - 50))) / 2
        optimizer.learning_rate = 2e-3 * min((step + 1) / 51, cosine)
        descend(model, optimizer, loss_of, [batch])


def test_it_equals_plain_tensorflow():
    check_reference(lambda *_: image_classifier.make_loop(), plain_tensorflow)


def test_it_evaluates_all_examples(capsys):
    loop = image_classifier.make_loop()
    results = loop.train_and_evaluate(3, evaluate_every=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 2", "step 3"]
    images, labels = loop.evaluator.dataset.arrays
    found = loop.step.model.predict(images / 255, verbose=0).argmax(axis=-1)
    assert results["accuracy"] == pytest.approx((found == labels).mean())
