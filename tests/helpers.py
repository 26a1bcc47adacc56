"""Small models, data and comparisons that the tests of the hot path share."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

BATCH = 16
CLASSES = 5
FEATURES = 12


def examples(count: int = 20 * BATCH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, FEATURES)).astype(np.float32)
    return features, random.integers(0, CLASSES, count)


def mlp(**kwargs) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(8, activation="tanh", **kwargs),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def adam(**kwargs):
    return lambda: keras.optimizers.Adam(0.01, **kwargs)


def largest_difference(ours, theirs) -> float:
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(ours, theirs, strict=True)
    )


def assert_replicas_agree(strategy, variables) -> None:
    for variable in variables:
        values = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        for value in values[1:]:
            np.testing.assert_array_equal(values[0], value, err_msg=variable.path)


@contextlib.contextmanager
def precision(name: str):
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)
