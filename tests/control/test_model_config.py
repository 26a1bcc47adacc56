"""The settings of layers and loss: what tells two models of the same variables apart."""

from __future__ import annotations

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop

from ctl.base.differences import differences
from ctl.control.agreement import agree
from ctl.control.model_config import global_settings, model_config
from ctl.distributed import workers
from ctl.phases.losses import cross_entropy


def sequential(*layers) -> keras.Model:
    return keras.Sequential([keras.Input([FEATURES]), *layers, keras.layers.Dense(CLASSES)])


def dense(**settings) -> keras.Model:
    return sequential(keras.layers.Dense(8, **settings))


class Scaled(keras.layers.Layer):
    """Keras makes a config of its arguments."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * self.factor


class Unserializable(Scaled):
    def __init__(self, factor, function, **kwargs):
        super().__init__(factor, **kwargs)
        self.function = function


class WithoutConfig(Scaled):
    def get_config(self):
        return None


class Subclassed(keras.Model):
    def __init__(self, activation):
        super().__init__()
        self.inner = [keras.layers.Dense(8, activation), keras.layers.Dense(CLASSES)]

    def call(self, x):
        return self.inner[1](self.inner[0](x))


def subclassed(activation: str) -> keras.Model:
    model = Subclassed(activation)
    model(np.zeros([2, FEATURES], "float32"))
    return model


def graph(other: int = 0, most: float = 1.0, outer: bool = False) -> keras.Model:
    inputs = keras.Input([FEATURES])
    first, second = (keras.layers.Dense(8) for _ in range(2))
    both = [first(inputs), second(inputs)]
    added = keras.layers.Add()([*both, both[other]])
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.ops.clip(added, -1.0, most)))
    return keras.Model(inputs, model(inputs)) if outer else model


def given_a_lambda(code: str, path: str) -> keras.Model:
    return sequential(keras.layers.Lambda(eval(compile(code, path, "eval"))))


def config(model, **options) -> dict:
    return model_config(make_loop(model=model, **options).step)


DIFFERENT = [
    (lambda: dense(activation="relu"), lambda: dense(activation="tanh"), "layer dense: activation"),
    (
        lambda: sequential(keras.layers.Dropout(0.1)),
        lambda: sequential(keras.layers.Dropout(0.6)),
        "layer dropout: rate",
    ),
    (
        lambda: dense(kernel_regularizer=keras.regularizers.L2(0.1)),
        lambda: dense(kernel_regularizer=keras.regularizers.L2(0.2)),
        "layer dense: kernel_regularizer: L2: l2",
    ),
    (lambda: sequential(Scaled(2)), lambda: sequential(Scaled(3)), "layer scaled: factor"),
    (
        lambda: sequential(Unserializable(2, object())),
        lambda: sequential(Unserializable(3, object())),
        "layer unserializable: factor",
    ),
    (
        lambda: sequential(WithoutConfig(2)),
        lambda: sequential(WithoutConfig(3)),
        "layer without_config: factor",
    ),
    (lambda: subclassed("relu"), lambda: subclassed("tanh"), "layer dense: activation"),
    (
        lambda: sequential(keras.layers.ReLU(), keras.layers.Softmax()),
        lambda: sequential(keras.layers.Softmax(), keras.layers.ReLU()),
        "layer sequential: layers",
    ),
    (lambda: graph(other=0), lambda: graph(other=1), "layer add: inputs"),
    (lambda: graph(outer=True), lambda: graph(other=1, outer=True), "layer add: inputs"),
    (lambda: graph(most=1.0), lambda: graph(most=2.0), "layer clip: x_max"),
    (
        lambda: given_a_lambda("lambda x: x * 2", "a.py"),
        lambda: given_a_lambda("lambda x: x * 3", "a.py"),
        "layer lambda: function",
    ),
]


@pytest.mark.parametrize(("one", "other", "name"), DIFFERENT)
def test_a_setting_that_differs_is_named(one, other, name):
    assert list(differences([config(one), config(other)])) == [name]


def test_the_values_of_a_setting():
    found = differences([config(one) for one in DIFFERENT[0][:2]])
    assert found == {"layer dense: activation": ["relu", "tanh"]}
    found = differences([config(dense), config(functools.partial(sequential))])
    assert found["layer dense#2"][0]["class"] == "Dense" and found["layer dense#2"][1] == "(absent)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((made, made) for pair in DIFFERENT for made in pair[:1]),  # Keras counts its names
        (dense, lambda: dense(kernel_initializer="zeros")),
        (
            lambda: sequential(keras.layers.Dropout(0.1, seed=1)),
            lambda: sequential(keras.layers.Dropout(0.1, seed=2)),
        ),
        (
            lambda: given_a_lambda("lambda x: x * 2", "a.py"),
            lambda: given_a_lambda("\nlambda x: x * 2", "/home/mine/b.py"),
        ),
    ],
)
def test_what_makes_no_difference(one, other):
    assert config(one) == config(other)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (
            functools.partial(cross_entropy, smoothing=0.1),
            functools.partial(cross_entropy, smoothing=0.2),
            "the loss: arguments",
        ),
        (
            keras.losses.CategoricalFocalCrossentropy(gamma=1.0, from_logits=True, reduction=None),
            keras.losses.CategoricalFocalCrossentropy(gamma=2.0, from_logits=True, reduction=None),
            "the loss: gamma",
        ),
    ],
)
def test_the_loss(one, other, name):
    assert list(differences([config(dense, loss_fn=loss) for loss in (one, other)])) == [name]


def of_environment(name):
    return f"the environment's {name}", lambda value: os.environ.update({name: value}), "", "9"


@pytest.mark.parametrize(
    ("name", "change", "usual", "other"),
    [
        ("keras.config.floatx()", keras.config.set_floatx, "float32", "float64"),
        ("keras.config.epsilon()", keras.config.set_epsilon, 1e-7, 1e-3),
        (
            "keras.config.image_data_format()",
            keras.config.set_image_data_format,
            "channels_last",
            "channels_first",
        ),
        (
            "TensorFloat-32",
            tf.config.experimental.enable_tensor_float_32_execution,
            True,
            False,
        ),
        of_environment("TF_ENABLE_ONEDNN_OPTS"),
        of_environment("TF_DETERMINISTIC_OPS"),
        of_environment("NVIDIA_TF32_OVERRIDE"),
    ],
)
def test_a_setting_of_the_process_that_differs_is_named(name, change, usual, other, monkeypatch):
    """Workers refuse it, and a resume warns of it: each changes the numbers of a step."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    change(usual)
    before = global_settings()
    change(other)
    try:
        assert list(differences([before, global_settings()])) == [name]
    finally:
        change(usual)


def test_workers_and_a_resume_compare_the_settings_of_the_process(tmp_path, monkeypatch):
    compared = {}
    monkeypatch.setattr(workers, "check_agreement", lambda _, facts, *__: compared.update(facts))
    loop = make_loop(directory=tmp_path)
    agree(loop.step, loop.dataset, lambda: None, lambda: None)
    assert compared.items() >= global_settings().items()
    assert loop.checkpoints.code["settings"] == global_settings()
