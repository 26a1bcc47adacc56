"""Predictions: the numbers of a plain model, one for each example, in order, on any replicas."""

from __future__ import annotations

import csv

import keras
import numpy as np
import pytest

from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.inspect import predictions
from ctl.phases.base_step import EvalStep

COUNT = 29


def made(strategy, loss, outputs, activation=None):
    """Outputs for 29 examples in batches of 9: on 4 replicas 3, 3, 3, 0, and at last 1, 1, 0, 0."""
    features = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
    data = InMemory((features, np.zeros(COUNT)), global_batch_size=9, training=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input([3]), keras.layers.Dense(outputs, activation)]
        step = EvalStep(keras.Sequential(layers), loss)
    return step, predictions.collect(step, data, strategy), step.model(features)


def rows_of(step, outputs, classes=(), labels=()):
    named = "path", [f"{n}.png" for n in range(COUNT)]
    lines = predictions.table(step, outputs, classes, labels, named).splitlines()
    rows = list(csv.DictReader(lines))
    assert [row.pop("path") for row in rows] == named[1]
    return rows


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        ("cross_entropy", None),
        ("categorical_crossentropy", None),
        ("sparse_categorical_crossentropy", "softmax"),
    ],
)
def test_classes(mirrored, replicas, loss, activation):
    step, outputs, plain = made(mirrored(replicas), loss, 3, activation)
    probabilities = np.array(plain if activation else keras.ops.softmax(plain))
    np.testing.assert_allclose(outputs, probabilities, rtol=1e-5)
    rows = rows_of(step, outputs, ["oak", "a,sh"], ["kind"])
    names = ["oak", "a,sh", "2"]  # a class without a name has a number
    assert [row["kind"] for row in rows] == [names[n] for n in probabilities.argmax(axis=1)]
    found = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(found, probabilities.max(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "activation"), [("binary_cross_entropy", None), ("binary_crossentropy", "sigmoid")]
)
def test_two_classes_of_one_output(mirrored, loss, activation):
    step, outputs, plain = made(mirrored(2), loss, 1, activation)
    of_yes = np.array(plain if activation else keras.ops.sigmoid(plain))[:, 0]
    rows = rows_of(step, outputs, ["no", "yes"])
    assert [row["class"] == "yes" for row in rows] == (of_yes > 0.5).tolist()
    found = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(found, np.maximum(of_yes, 1 - of_yes), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "columns"),
    [
        ("mse", 1, ["price"], ["price"]),
        ("mse", 1, [], ["prediction"]),
        ("mae", 2, ["x", "y"], ["x", "y"]),
        ("mae", 2, [], ["output0", "output1"]),
        ("binary_cross_entropy", 2, ["sun", "rain"], ["sun", "rain"]),
    ],
)
def test_numbers(mirrored, loss, outputs, labels, columns):
    step, found, plain = made(mirrored(4), loss, outputs)
    plain = np.array(keras.ops.sigmoid(plain) if "binary" in loss else plain)
    rows = rows_of(step, found, labels=labels)
    assert [*rows[0]] == columns
    numbers = [[float(row[name]) for name in columns] for row in rows]
    np.testing.assert_allclose(numbers, plain, rtol=1e-5)


def test_outputs_that_are_no_rows_are_refused(mirrored):
    model = keras.Sequential([keras.Input([3]), keras.layers.Reshape([3, 1])])
    data = InMemory((np.ones([4, 3], "float32"), np.ones(4)), global_batch_size=4, training=False)
    with pytest.raises(UsageError, match=r"^--predictions needs a model with outputs of shape \[n"):
        predictions.collect(EvalStep(model, "mse"), data, mirrored(1))
