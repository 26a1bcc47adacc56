"""What flags name: steps, losses, metrics and data, of ctl, of Keras and of the user."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.jobs import named
from ctl.phases.base_step import BaseStep
from ctl.phases.losses import binary_cross_entropy, cross_entropy

OWN = """
import keras, numpy as np, tensorflow as tf
import ctl

class Mine(ctl.TrainStep):
    def loss(self, batch):
        return super().loss(batch)

def loss(labels, outputs):
    return outputs[:, 0]

def one():
    return keras.metrics.MeanSquaredError()

def several():
    return [keras.metrics.MeanSquaredError(), keras.metrics.Mean("mean")]

def wrong():
    return ["accuracy"]

def pair(global_batch_size, seed=None, other=3):
    assert (seed, other) == (7, 3)
    arrays = np.zeros([20, 4]), np.zeros([20])
    train = ctl.data.InMemory(arrays, global_batch_size=global_batch_size)
    return train, tf.data.Dataset.from_tensor_slices(arrays).batch(6)

def anything(**keywords):
    return pair(8, 7)

def of_eight():
    batches = tf.data.Dataset.range(20).batch(8, drop_remainder=True)
    return batches, batches

def of_any_size():
    batches = tf.data.Dataset.range(20).batch(8)
    return batches, batches

def demanding(batch_size):
    pass

def single(seed):
    return pair(8, seed)[0]

def arrays():
    return np.zeros([20]), np.zeros([20])
"""


@pytest.fixture(autouse=True)
def users_own(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_own", None)


def test_the_class_of_the_step():
    assert named.step_class(None) is ctl.TrainStep
    assert issubclass(named.step_class("users_own:Mine"), ctl.TrainStep)
    for name in ("users_own:loss", "ctl:EvalStep"):
        with pytest.raises(UsageError, match=f"--step={name} is not a subclass of ctl.TrainStep"):
            named.step_class(name)


def test_losses_by_name():
    assert named.loss_function("cross_entropy") is cross_entropy
    assert named.loss_function("users_own:loss").__name__ == "loss"
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(3)])
    assert named.loss_function("sparse_categorical_crossentropy", model) is cross_entropy
    for name, meant in (("cross_entropi", "cross_entropy"), ("msee", "mse")):
        with pytest.raises(UsageError, match=f"unknown loss '{name}': did you mean '{meant}'"):
            named.loss_function(name)
    assert named.loss_function("keras.losses:Huber").reduction == "none"


@pytest.mark.parametrize("shape", [(6, 1), (6, 3), (6, 2, 3)])
@pytest.mark.parametrize("flat", [False, True])
def test_losses_equal_those_of_keras(shape, flat):
    random = np.random.default_rng(0)
    outputs = random.normal(size=shape).astype("float32")
    labels = random.integers(0, 2, shape)
    given = labels[:, 0] if flat and shape == (6, 1) else labels

    def mean(losses):
        return np.asarray(losses).reshape(6, -1).mean(axis=1)

    squared = named.loss_function("mean_squared_error")(tf.constant(given), tf.constant(outputs))
    assert squared.shape == (6,) and squared.dtype == tf.float32
    expected = mean(keras.losses.mean_squared_error(labels.astype("float32"), outputs))
    np.testing.assert_allclose(squared, expected, rtol=1e-6)
    binary = named.loss_function("binary_cross_entropy")(tf.constant(given), tf.constant(outputs))
    expected = keras.losses.binary_crossentropy(labels.astype("float32"), outputs, True)
    np.testing.assert_allclose(binary, mean(expected), rtol=1e-5)


@pytest.mark.parametrize(("labels", "outputs"), [([6], [6, 3]), ([6, 1], [6, 3]), ([6, 2], [6])])
def test_labels_that_would_be_broadcast_are_refused(labels, outputs):
    for name in ("mean_squared_error", "binary_cross_entropy"):
        with pytest.raises(UsageError, match="do not fit outputs of shape"):
            named.loss_function(name)(tf.zeros(labels), tf.zeros(outputs))


def names_of(*arguments) -> list[str]:
    return [metric.name for metric in named.make_metrics(*arguments)]


def test_accuracy_is_the_default_where_it_means_something():
    mine = named.step_class("users_own:Mine")
    for loss in map(named.loss_function, ("cross_entropy", "binary_cross_entropy")):
        assert names_of(None, loss, ctl.TrainStep) == names_of(None, loss, BaseStep) == ["accuracy"]
        assert names_of(None, loss, mine) == []  # it may not classify
        assert names_of("accuracy", loss, mine) == ["accuracy"]
    for loss in map(named.loss_function, ("mean_squared_error", "users_own:loss", "mae")):
        assert names_of(None, loss, ctl.TrainStep) == []
    (binary,) = named.make_metrics(None, binary_cross_entropy, BaseStep)
    binary.update_state([[0.0], [1.0], [1.0]], [[-0.1], [0.1], [-0.1]])  # logits
    assert float(binary.result()) == pytest.approx(2 / 3)


def test_metrics_by_name():
    arguments = ("mse, auc,SparseTopKCategoricalAccuracy", cross_entropy, BaseStep)
    for _ in range(2):  # Keras would number them
        assert names_of(*arguments) == ["mse", "auc", "SparseTopKCategoricalAccuracy"]
    assert names_of("", cross_entropy, BaseStep) == []
    assert names_of("users_own:one", cross_entropy, BaseStep) == ["mean_squared_error"]
    assert names_of("users_own:several", cross_entropy, BaseStep)[1] == "mean"
    for names, message in {
        "mse,bogus": "Keras has no metric 'bogus'",
        "MeanIoU": "MeanIoU needs arguments: give .*package.module:function",
        "users_own:wrong": "must be a function that returns Keras metrics, it returned str",
    }.items():
        with pytest.raises(UsageError, match=message):
            named.make_metrics(names, cross_entropy, BaseStep)
    with pytest.raises(UsageError, match="Keras has no metric 'bogus'"):
        named.check_metrics("mse,bogus")
    named.check_metrics("users_own:wrong")  # a function is not called before it is needed


def datasets(name, data_dir=None):
    return named.datasets(f"users_own:{name}", global_batch_size=8, seed=7, data_dir=data_dir)


def test_a_function_gets_the_keywords_that_it_declares():
    train, evaluation = datasets("pair")
    assert (train.num_examples, train.global_batch_size) == (20, 8)
    sizes = [len(labels) for _, labels in evaluation.batches()]
    assert sizes == [6, 6, 6, 2]
    assert datasets("anything")[0].num_examples == 20
    train, _ = datasets("of_any_size")
    assert (train.num_examples, train.global_batch_size) == (None, 8)  # it is as the flag says


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demanding", "'batch_size'; it may take global_batch_size, seed, data_dir"),
        (
            "single",
            r"must return two datasets, \(training, evaluation\), such .* returned InMemory",
        ),
        ("arrays", r"\(\(x, y\), \(x_test, y_test\)\); it returned two arrays"),
        ("gone", "has no class or function 'gone'"),
    ],
)
def test_functions_that_give_no_data(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        datasets(name)
    assert "\n" not in str(caught.value)


def test_a_directory_for_a_function_that_takes_none():
    with pytest.raises(UsageError, match="^--data_dir has no effect with --dataset=users_own:pair"):
        datasets("pair", data_dir="photos")


def test_batches_of_another_size_are_refused_or_said(caplog):
    assert datasets("of_eight")[0].global_batch_size == 8
    with pytest.raises(UsageError, match="batches of 8 examples: give --global_batch_size=8, or"):
        named.datasets("users_own:of_eight", global_batch_size=16, seed=7, data_dir=None)
    with caplog.at_level("WARNING"):  # no earlier run was refused for it
        name, options = "users_own:of_any_size", {"seed": 7, "data_dir": None}
        train, _ = named.datasets(name, global_batch_size=16, **options)
    assert train.global_batch_size == 8
    assert "makes batches of 8 examples, not of --global_batch_size=16" in caplog.text
