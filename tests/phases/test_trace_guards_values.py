"""Values that a trace reads beside attributes of the step: traced again, or refused."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop

from ctl.errors import UsageError
from ctl.phases.losses import cross_entropy
from ctl.step import TrainStep

FACTOR = 1.0
TABLE = {"factor": 1.0}


def factor_of_the_module():
    return FACTOR * TABLE["factor"]


class Scaled(keras.layers.Layer):
    """A layer of the user's, with private values and containers."""

    def __init__(self):
        super().__init__(name="scaled")
        self._beta, self.betas, self.named, self.function = 1.0, [1.0], {"beta": 1.0}, tf.identity

    def call(self, inputs):
        return self.function(inputs) * self._beta * self.betas[0] * self.named["beta"]


class OfAClass(TrainStep):
    halves = 1.0

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses * self.halves * factor_of_the_module(), outputs


class Limited(keras.constraints.Constraint):
    def __init__(self, most):
        self.most = most

    def __call__(self, weight):
        return tf.clip_by_value(weight, -self.most, self.most)


def wide_model():
    l2, limited = keras.regularizers.L2(0.1), Limited(9.0)
    dense = keras.layers.Dense(
        8, "tanh", name="first", kernel_regularizer=l2, kernel_constraint=limited
    )
    return keras.Sequential(
        [keras.Input([FEATURES]), dense, Scaled(), keras.layers.Dense(CLASSES, name="last")]
    )


def closure():
    factor = 1.0

    def loss(*arguments):
        return factor * cross_entropy(*arguments)

    def change():
        nonlocal factor
        factor = 0.1

    loss.change = change
    return loss


def weights(loop):
    return np.concatenate([v.numpy().ravel() for v in loop.step.model.trainable_variables])


def with_dropout():
    parts = keras.layers.Dropout(0.1, seed=1), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def layer_of(loop, name):
    return loop.step.model.get_layer(name)


TRACED = {
    "an activation": lambda loop, _: setattr(
        layer_of(loop, "first"), "activation", keras.activations.relu
    ),
    "a regularizer": lambda loop, _: setattr(layer_of(loop, "first").kernel_regularizer, "l2", 0.9),
    "a regularizer of a variable": lambda loop, _: setattr(
        layer_of(loop, "first").kernel, "regularizer", None
    ),
    "a constraint": lambda loop, _: setattr(
        layer_of(loop, "first").kernel, "constraint", Limited(0.1)
    ),
    "a constraint in place": lambda loop, _: setattr(
        layer_of(loop, "first").kernel.constraint, "most", 0.1
    ),
    "a private number": lambda loop, _: setattr(layer_of(loop, "scaled"), "_beta", 0.1),
    "a list": lambda loop, _: layer_of(loop, "scaled").betas.__setitem__(0, 0.1),
    "a list as a whole": lambda loop, _: setattr(layer_of(loop, "scaled"), "betas", [0.1]),
    "a dict": lambda loop, _: layer_of(loop, "scaled").named.__setitem__("beta", 0.1),
    "a function": lambda loop, _: setattr(layer_of(loop, "scaled"), "function", tf.nn.relu),
    "a method": lambda loop, _: setattr(
        layer_of(loop, "last"), "call", lambda x, **_: tf.zeros([tf.shape(x)[0], CLASSES])
    ),
    "an excluded weight": lambda loop, _: loop.step.optimizer.exclude_from_weight_decay(
        var_names=["kernel"]
    ),
    "a class": lambda loop, monkeypatch: monkeypatch.setattr(OfAClass, "halves", 0.1),
    "a global": lambda loop, monkeypatch: monkeypatch.setitem(globals(), "FACTOR", 0.1),
    "a global dict": lambda loop, monkeypatch: monkeypatch.setitem(TABLE, "factor", 0.1),
    "a closure": lambda loop, _: loop.step.loss_fn.change(),
}


def trained(change=None):
    """The weights after four steps, of which ``change`` comes after the second, and the traces."""
    loop = make_loop(
        model=wide_model,
        step_class=OfAClass,
        optimizer=lambda: keras.optimizers.SGD(0.1, weight_decay=0.5),
        loss_fn=closure(),
        seed=0,
    )
    loop.train(2)
    if change:
        change(loop)
    loop.train(3)
    loop.train(4)
    return weights(loop), loop.steps.run.experimental_get_tracing_count()


unchanged = functools.cache(trained)


@pytest.mark.parametrize("name", TRACED)
def test_what_a_trace_has_read_is_traced_again(name, monkeypatch):
    plain, once = unchanged()
    changed, twice = trained(lambda loop: TRACED[name](loop, monkeypatch))
    assert (once, twice) == (1, 2)
    assert np.abs(changed - plain).max() > 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layer first.kernel_regularizer", keras.regularizers.L2(0.9)),
        ("layer first.kernel_constraint", None),
        ("layer first._dtype_policy", keras.DTypePolicy("mixed_bfloat16")),
        ("layer first.units", None),
    ],
)
def test_what_a_layer_has_used_up_is_refused(name, change):
    loop = make_loop(model=wide_model)
    setattr(layer_of(loop, "first"), name.rpartition(".")[2], change)
    with pytest.raises(UsageError, match=f"{name} was changed from .*, which would have no effect"):
        loop.train(1)


def test_dropout_may_be_turned_off():
    loop = make_loop(model=with_dropout)
    loop.train(1)
    layer = loop.step.model.layers[0]
    assert layer.rate == 0.1
    layer.rate = 0.0
    loop.train(2)
    assert loop.steps.run.experimental_get_tracing_count() == 2


def test_a_norm_that_is_frozen_too_late_is_refused():
    """It has no gamma and beta, so its trainable variables stay the same: none."""
    norm = keras.layers.BatchNormalization(center=False, scale=False, name="norm")
    loop = make_loop(
        model=lambda: keras.Sequential([keras.Input([FEATURES]), norm, keras.layers.Dense(CLASSES)])
    )
    loop.train(1)
    norm.trainable = False
    with pytest.raises(UsageError, match="norm.trainable was changed after the step was built"):
        loop.train(2)


@pytest.mark.parametrize("name", ["schedule", "steps_per_loop"])
def test_an_argument_of_the_loop_is_not_an_attribute(name):
    loop = make_loop()
    setattr(loop, name, 3)
    with pytest.raises(UsageError, match=f"loop.{name} was set, which has no effect"):
        loop.train(1)


# What is no change of what a trace reads.

loss = hits = mean = 0.0
RATE = float("nan")


class Noting(keras.layers.Layer):
    """Keeps values of the call in Python, which differ between training and evaluation."""

    def __init__(self):
        super().__init__(name="noting")
        self.calls, self.was_training, self.shapes = 0, None, []

    def call(self, inputs, training=False):
        self.calls += 1
        self.was_training = bool(training)
        self.shapes = [inputs.shape]
        return inputs


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.noting, self.last = Noting(), keras.layers.Dense(CLASSES)
        self(np.zeros([1, FEATURES], np.float32))

    def call(self, inputs, training=False):
        return self.last(self.noting(inputs, training=training))


class Reads(OfAClass):
    unread = 0

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses + (0.0 if RATE != RATE else RATE), outputs


@pytest.mark.slow
@pytest.mark.parametrize("model", [wide_model, Subclassed])
def test_what_a_trace_does_not_read_is_not_traced_again(model, monkeypatch):
    """Globals that are called like an attribute; what `fit`, `predict` and evaluations leave."""
    loop = make_loop(model=model, step_class=Reads, evaluate=32)
    evaluations = loop.evaluator._eval_steps.experimental_get_tracing_count
    features = np.zeros([4, FEATURES], np.float32)
    for number in range(1, 4):
        loop.train(number)
        loop.evaluate()
        loop.plan()
        loop.step.model.predict(features, verbose=0)
        loop.step.model.compile("sgd", "mse")
        loop.step.model.evaluate(features, np.zeros([4, CLASSES]), verbose=0)
        monkeypatch.setitem(globals(), "loss", float(number))
        monkeypatch.setitem(globals(), "RATE", float("nan"))
        monkeypatch.setattr(Reads, "unread", number)
    assert loop.steps.run.experimental_get_tracing_count() == 1 and evaluations() == 1
