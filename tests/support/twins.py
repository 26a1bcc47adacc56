"""Models of the same weights for a tutorial and for its port, and their comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from helpers import assert_replicas_agree


class Twins:
    """What ``make`` returns, a model or a tuple of models, made twice with the same weights.

    Attributes:
        theirs: for the loop of the tutorial.
        ours: for the port, in the scope of ``strategy``.
    """

    def __init__(self, strategy: tf.distribute.Strategy, make: Callable[[], Any], in_scope=False):
        """``in_scope``: the tutorial has the strategy, too."""
        scope = strategy.scope if in_scope else contextlib.nullcontext
        self.theirs, self.ours = _made(scope, make), _made(strategy.scope, make)
        self._strategy, self._before = strategy, self._weights(self.theirs)

    @staticmethod
    def _weights(models: Any) -> list[np.ndarray]:
        return [w.copy() for model in tf.nest.flatten(models) for w in model.get_weights()]

    def assert_equal(self, tolerance: float = 1e-6) -> None:
        """Both have trained, and have the same weights: up to ``tolerance``, and ten times of it
        relative to a weight."""
        theirs, ours = self._weights(self.theirs), self._weights(self.ours)
        moved = max(np.abs(a - b).max() for a, b in zip(theirs, self._before, strict=True))
        assert moved > 1000 * tolerance, f"the weights have moved by {moved} only"
        for mine, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=10 * tolerance, atol=tolerance)
        for model in tf.nest.flatten(self.ours):
            assert_replicas_agree(self._strategy, model.weights)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Inside, a ``tf.function`` runs as the Python function that it is: for a few steps of a small
    model, to trace it takes longer."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def _made(scope: Callable[[], Any], make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(1)
    with scope():
        return make()


def batches(size: int, *arrays: Any) -> tf.data.Dataset:
    """A dataset of global batches of ``arrays``, of one size."""
    arrays = arrays[0] if len(arrays) == 1 else arrays
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=True)


def images(count: int, size: int, channels: int, seed: int = 0) -> np.ndarray:
    """Images of noise in [-1, 1], float32 [count, size, size, channels]."""
    noise = np.random.default_rng(seed).uniform(-1, 1, (count, size, size, channels))
    return noise.astype("float32")
