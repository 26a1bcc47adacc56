"""Rounds of local training with ctl, and of models that are trained one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from helpers import BATCH, examples, keras_loss, largest_difference, make_loop, mlp
from references import descend

from ctl.recipes.diloco import DiLoCo
from ctl.recipes.local_sgd import LocalSGD
from ctl.step import TrainStep

ROUND, STEPS = 3, 8  # so the last round is cut off
OPTIMIZERS: dict[type, Callable] = {
    LocalSGD: lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    DiLoCo: lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


def make(strategy, kind, **options):
    if kind is not TrainStep:
        options = {"local_steps": ROUND, **options}
    data = tf.data.Dataset.from_tensor_slices(examples(BATCH * STEPS))
    return make_loop(
        strategy,
        optimizer=OPTIMIZERS.get(kind, OPTIMIZERS[LocalSGD]),
        step_class=kind,
        data=data.batch(BATCH, drop_remainder=True).repeat(),
        **options,
    )


def copies(loop) -> list[list[np.ndarray]]:
    """The weights of each replica."""
    weights = [loop.strategy.experimental_local_results(v) for v in loop.step.trainable_variables]
    return [[copy.numpy() for copy in one] for one in zip(*weights, strict=True)]


def mean_loss(model: keras.Model, features: np.ndarray, labels: np.ndarray) -> tf.Tensor:
    return tf.reduce_mean(keras_loss(labels, model(features)))


def reference(kind: type, replicas: int) -> list[list[np.ndarray]]:
    """The weights of each of so many models, each with an optimizer of its own."""
    models, optimizers = [], []
    for _ in range(replicas):
        keras.utils.set_random_seed(1)
        models.append(mlp())
        optimizers.append(OPTIMIZERS[kind]())
    start = models[0].get_weights()
    velocity = [0.0] * len(start)
    features, labels = examples(BATCH * STEPS)
    size = BATCH // replicas
    for step in range(STEPS):
        for number, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            part = slice(step * BATCH + number * size, step * BATCH + (number + 1) * size)
            descend(one, optimizer, partial(mean_loss, one), [(features[part], labels[part])])
        if (step + 1) % ROUND == 0:
            weights = zip(*(one.get_weights() for one in models), strict=True)
            means = [np.mean(of_all, axis=0) for of_all in weights]
            for i, mean in enumerate(means):
                gone = start[i] - mean
                velocity[i] = 0.9 * velocity[i] + gone
                outer = start[i] - 0.7 * (gone + 0.9 * velocity[i])
                start[i] = outer if kind is DiLoCo else mean
            for one in models:
                one.set_weights(start)
    return [one.get_weights() for one in models]


def assert_equals_reference(strategy, kind: type) -> None:
    loop = make(strategy, kind, seed=1)
    loop.train(STEPS)
    wanted = reference(kind, strategy.num_replicas_in_sync)
    for ours, theirs in zip(copies(loop), wanted, strict=True):
        assert largest_difference(ours, theirs) <= 1e-5
