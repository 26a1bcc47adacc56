"""The model, the data and the optimizer of a case, for ctl and for the oracle alike."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from helpers import precision
from keras import layers

from .cases import CLASSES, Case

HIDDEN, WORDS, LENGTH = 5, 7, 5
MOMENTUM = 0.8  # of moving statistics

# Rates at which a few steps move the weights by much more than rounding.
_RATES = {"SGD": 0.1, "Momentum": 0.05, "Adadelta": 1.0, "Ftrl": 0.05, "Adagrad": 0.05}
_RATES |= {"Lion": 1e-3}


class Counter(layers.Layer):
    """State of a user's own: counts its calls, and adds a hundredth of the number."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x + keras.ops.cast(self.calls, x.dtype) * 0.01


class Cap(layers.Layer):
    """A constant Inf, as masks have it."""

    def build(self, shape: Any) -> None:
        self.cap = self.add_weight(
            shape=shape[-1:],
            initializer=keras.initializers.Constant(np.inf),
            trainable=False,
            name="cap",
        )

    def call(self, x: Any) -> Any:
        return keras.ops.minimum(x, keras.ops.cast(self.cap, x.dtype))


class Penalty(layers.Layer):
    """Adds a loss of the user's own: a mean over the examples."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.cast(x, "float32") ** 2))
        return x


class Idle(layers.Layer):
    """Has a trainable variable that nothing uses."""

    def build(self, shape: Any) -> None:
        self.add_weight(shape=(3,), initializer="ones", name="idle")

    def call(self, x: Any) -> Any:
        return x


def make_model(case: Case) -> keras.Model:
    """The model of ``case``, with the weights of its seed."""
    keras.utils.set_random_seed(case.seed)
    with precision(case.policy):
        return _make_model(case)


def _make_model(case: Case) -> keras.Model:
    inputs = _inputs(case)
    x = _entry(case, inputs)
    regularizer = getattr(keras.regularizers, case.regularizer)(0.01) if case.regularizer else None
    activity = keras.regularizers.L2(0.1) if case.penalty == "activity" else None
    hidden = layers.Dense(
        HIDDEN, kernel_regularizer=regularizer, activity_regularizer=activity, name="hidden"
    )
    hidden.trainable = case.frozen != "hidden"
    x = hidden(x)
    if case.norm != "none":
        norm = layers.BatchNormalization(
            momentum=MOMENTUM,
            renorm=case.norm == "renorm",
            renorm_clipping={"rmax": 1.5, "rmin": 0.7, "dmax": 0.5},
            renorm_momentum=0.7,
            synchronized=case.norm == "synchronized",
            name="norm",
        )
        norm.trainable = case.frozen != "norm"
        x = norm(x)
    x = keras.ops.relu(x) if case.relu else keras.ops.tanh(x)
    x = layers.LeakyReLU(0.3, name="slope")(x) if case.change == "slope" else x
    if case.shared:
        again = layers.Dense(HIDDEN, "tanh", name="shared")
        x = again(again(x))
    x = Penalty(name="penalty")(x) if case.penalty == "layer" else x
    for used, kind in ((case.state, Counter), (case.infinite, Cap), (case.idle, Idle)):
        x = kind(name=kind.__name__.lower())(x) if used else x
    dtype = "float32" if case.float32_head else None
    logits = layers.Dense(CLASSES, dtype=dtype, name="logits")(x)
    if case.heads == 1:
        return keras.Model(inputs, logits)
    return keras.Model(inputs, {"class": logits, "value": layers.Dense(1, name="value")(x)})


def _inputs(case: Case) -> Any:
    numbers = keras.Input([6], name="numbers")
    words = keras.Input([LENGTH], dtype="int32", name="words")
    image = keras.Input([4, 4, 2], name="image")
    kinds = {"image": image, "bytes": image, "ids": words, "ragged": words}
    return (
        {"numbers": numbers, "words": words}
        if case.features == "two"
        else kinds.get(case.features, numbers)
    )


def _entry(case: Case, inputs: Any) -> Any:
    if case.features in ("image", "bytes"):
        return layers.Flatten()(layers.Conv2D(3, 2, activation="tanh", name="conv")(inputs))
    if case.features in ("ids", "ragged"):
        return layers.Flatten()(layers.Embedding(WORDS, 3, name="embedding")(inputs))
    if case.features == "two":
        words = layers.Flatten()(layers.Embedding(WORDS, 3, name="embedding")(inputs["words"]))
        return layers.Concatenate()([layers.Dense(4, name="dense")(inputs["numbers"]), words])
    return inputs


def make_optimizer(case: Case) -> keras.optimizers.Optimizer:
    options = {} if case.weight_decay is None else {"weight_decay": case.weight_decay}
    kind = case.optimizer
    if kind == "Momentum":
        kind, options = "SGD", options | {"momentum": 0.9, "nesterov": True}
    # ctl refuses defaults that are 1 or 0 in the type of the weights.
    if case.policy == "bfloat16" and kind in (
        "Adam",
        "AdamW",
        "Lamb",
        "Nadam",
        "ScheduleFreeAdamW",
    ):
        options |= {"beta_2": 0.99}
    if case.policy == "float16" and kind in ("Adamax", "ScheduleFreeAdamW"):
        options |= {"epsilon": 1e-6 if kind == "Adamax" else 1e-7}
    return getattr(keras.optimizers, kind)(rate_of(case), **options)


def change_model(case: Case, model: keras.Model, changed: bool) -> None:
    """Makes or undoes the change of ``case``, if it is one of the model."""
    if case.change == "slope":
        model.get_layer("slope").negative_slope = 0.1 if changed else 0.3
    if case.change == "activation":
        names = keras.activations.linear, keras.activations.tanh
        model.get_layer("hidden").activation = names[changed]
    if case.change == "trainable":
        model.get_layer("hidden").trainable = not changed


def scale_of(case: Case, changed: bool) -> float:
    """The factor of the losses, a Python value of the step."""
    return 0.5 if case.change == "scale" and changed else 1.0


def rate_of(case: Case) -> float:
    """The learning rate at step 0."""
    return _RATES.get(case.optimizer, 0.01)


def arrays_of(case: Case) -> tuple[Any, ...]:
    """Features, labels and perhaps weights of all examples, NumPy arrays with the fault in them.

    Ragged features are padded with zeros, and sparse ones are dense.
    """
    random = np.random.default_rng(case.seed)
    rows = sum(case.sizes)
    numbers = random.normal(size=(rows, 6)).astype(np.float32)
    words = random.integers(0, WORDS, (rows, LENGTH)).astype(np.int32)
    image = random.normal(size=(rows, 4, 4, 2)).astype(np.float32)
    if case.features == "sparse":
        numbers *= random.integers(0, 2, numbers.shape)
    if case.features == "ragged":
        words[np.arange(LENGTH) >= random.integers(0, LENGTH + 1, (rows, 1))] = 0
    if case.fault == "nan":
        numbers[case.fault_row, 1] = image[case.fault_row, 1, 2, 0] = np.nan
    features = {
        "image": image,
        "bytes": (np.nan_to_num(image) * 40 + 128).clip(0, 255).astype(np.uint8),
        "ids": words,
        "ragged": words,
        "two": {"numbers": numbers, "words": words},
    }.get(case.features, numbers)
    labels = random.integers(0, CLASSES, rows).astype(case.labels)
    if case.fault == "label":
        labels[case.fault_row] = case.bad_label
    if case.heads == 2:
        labels = {"class": labels, "value": random.normal(size=(rows, 1)).astype(np.float32)}
    if not case.weights:
        return features, labels
    weights = random.uniform(0.2, 2.0, rows).astype(np.float32)
    if case.weights == "zeros":
        weights *= random.integers(0, 2, rows).astype(np.float32)
    if case.weights == "signed":
        weights *= random.choice([-1.0, 1.0], rows)
        weights[0] -= weights[: case.sizes[0]].sum()
    if case.weights == "integers":
        weights = np.arange(rows)
    if case.weights == "nothing":
        weights[: case.sizes[0]] = 0.0
    return features, labels, weights[:, None] if case.weights == "column" else weights


CLASS_WEIGHT = {0: 0.5, 2: 4.0}


def weights_of(case: Case, batch: Any, trains: bool = True) -> np.ndarray:
    """The weight of each example, float32 [n]; with those of the classes if ``trains``."""
    features, labels, *rest = batch
    rows = tf.nest.flatten(features)[0].shape[0]
    weights = rest[0].reshape(-1) if rest else np.ones(rows, np.float32)
    if not (case.class_weight and trains):
        return weights
    return weights * np.array([CLASS_WEIGHT.get(int(k), 1.0) for k in labels], np.float32)


def counted(case: Case, weights: np.ndarray) -> float:
    """By what the losses of these weights are divided; 0 if no example is there."""
    return float((weights != 0).sum() if case.weighting == "examples" else weights.sum())


def cut(case: Case, arrays: Any) -> list[Any]:
    """The global batches of ``arrays``, in their order."""
    ends = np.cumsum(case.sizes)
    return [
        tf.nest.map_structure(lambda a, e=end, n=size: a[e - n : e], arrays)
        for end, size in zip(ends, case.sizes, strict=True)
    ]


def losses_of(labels: Any, outputs: Any) -> tf.Tensor:
    """The loss of each example, float32 [n], of a model with two heads."""
    classes = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(labels["class"], tf.int64), tf.cast(outputs["class"], tf.float32)
    )
    errors = tf.cast(outputs["value"], tf.float32) - labels["value"]
    return classes + tf.reduce_sum(errors**2, axis=1)
