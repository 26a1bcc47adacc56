"""Sums of low rank equal a reference in numpy, on any number of replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, cut, examples, keras_loss, make_loop
from references import assert_trains_as

from ctl.errors import UsageError
from ctl.recipes.powersgd import PowerSGD

STEPS, RANK, RUN = 5, 2, 7


def model() -> keras.Model:
    """Its last kernel is too thin for a rank of 2."""
    parts = [keras.layers.Conv1D(9, 2, activation="tanh"), keras.layers.Flatten()]
    parts += [keras.layers.Dense(3, "tanh"), keras.layers.Dense(CLASSES, use_bias=False)]
    return keras.Sequential([keras.Input([FEATURES // 3, 3]), *parts])


def make(strategy, checkpoints=None, **options):
    features, labels = examples(BATCH * STEPS)
    data = tf.data.Dataset.from_tensor_slices((features.reshape([-1, FEATURES // 3, 3]), labels))
    return make_loop(
        strategy,
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        step_class=PowerSGD,
        data=data.batch(BATCH, drop_remainder=True).repeat(),
        checkpoints=checkpoints,
        random_seed=RUN,
        powersgd_rank=RANK,
        **options,
    )


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Gram and Schmidt, as in the paper; TensorFlow's columns may have the other sign."""
    columns: list[np.ndarray] = []
    for column in matrix.T:
        column = column - sum((c @ column) * c for c in columns)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def reference(trained: keras.Model, batches) -> None:
    variables = [v.value for v in trained.trainable_variables]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    left, thin = {}, {}
    for features, labels in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels, trained(features)))
        gradients = [g.numpy() for g in tape.gradient(loss, variables)]
        for i in (0, 2):  # the kernels [6, 9] and [27, 3]
            m = gradients[i].reshape([-1, gradients[i].shape[-1]]) + left.get(i, 0.0)
            if i not in thin:
                thin[i] = tf.random.stateless_normal([m.shape[1], RANK], [RUN, i]).numpy()
            tall = orthogonal(m @ thin[i])
            thin[i] = m.T @ tall
            left[i] = m - tall @ thin[i].T
            gradients[i] = (tall @ thin[i].T).reshape(gradients[i].shape)
        optimizer.apply([tf.constant(g) for g in gradients], trained.trainable_variables)


@pytest.mark.parametrize(
    ("replicas", "tolerance"), [(1, 1e-6), pytest.param(4, 1e-5, marks=pytest.mark.slow)]
)
def test_replicas_equal_a_reference(mirrored, replicas, tolerance):
    features, labels = examples(BATCH * STEPS)
    batches = cut((features.reshape([-1, FEATURES // 3, 3]), labels))
    assert_trains_as(
        make(mirrored(replicas)),
        model(),
        lambda plain: reference(plain, batches),
        steps=STEPS,
        tolerance=tolerance,
    )


def test_how_many_bytes_move(ring2):
    loop = make(ring2)
    plan = loop.plan()
    tall = 4 * RANK * (6 + 27) + 4 * (9 + 3 + 3 * CLASSES)
    thin = 4 * RANK * (9 + 3)
    moved = [c.bytes for c in (*plan.collectives, *plan.other) if c.in_loop]
    assert sorted(moved) == [4, thin, tall]  # 4 say whether a gradient is finite


def test_a_gradient_that_is_missing(mirrored):
    loop = make(mirrored(1))
    loop.train_only([loop.step.model.layers[-1]])
    with pytest.raises(UsageError, match="^PowerSGD needs gradients of exactly the variables"):
        loop.train(1)
