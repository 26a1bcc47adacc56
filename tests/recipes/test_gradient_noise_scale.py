"""The noise scale equals the formulas of the paper, and does not depend on how batches are cut."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import examples, keras_loss, make_loop

from ctl.errors import UsageError
from ctl.recipes.gradient_noise_scale import NoiseScale
from ctl.step import TrainStep

STEPS, BATCH = 5, 16


def squares_of(model, features, labels, parts: int) -> list[float]:
    """The squared norms of the gradients of the mean losses of so many equal parts, in NumPy."""
    found = []
    for x, y in zip(np.split(features, parts), np.split(labels, parts), strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(y, model(x)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        found.append(sum(float(np.sum(g.numpy().astype("float64") ** 2)) for g in gradients))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {"accumulate_steps": 4}),
        (2, {"accumulate_steps": 2}),
        (2, {"jit_compile": True}),
    ],
    ids=str,
)
def test_equals_the_formulas_of_the_paper(mirrored, replicas, options):
    """Appendix A.1, with means over steps; clipping comes after."""
    loop = make_loop(
        mirrored(replicas),
        step_class=NoiseScale,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        data=tf.data.Dataset.from_tensor_slices(examples(BATCH * STEPS)).batch(
            BATCH, drop_remainder=True
        ),
        clip_norm=1e-3,
        **options,
    )
    parts = replicas * options.get("accumulate_steps", 1)
    small, big = [], []
    for batch in zip(*(np.split(array, STEPS) for array in examples(BATCH * STEPS)), strict=True):
        small += squares_of(loop.step.model, *batch, parts)
        big += squares_of(loop.step.model, *batch, 1)
    b, large = BATCH / parts, float(BATCH)
    square = (large * np.mean(big) - b * np.mean(small)) / (large - b)
    variance = (np.mean(small) - np.mean(big)) / (1 / b - 1 / large)
    found = loop.train(STEPS)
    assert found["gradient_square"] == pytest.approx(square, rel=1e-3)
    assert found["gradient_variance"] == pytest.approx(variance, rel=1e-4)
    assert found["noise_scale"] == pytest.approx(variance / square, rel=1e-3)


class Distance(NoiseScale):
    """Half of the squared distance from the one bias of the model: its gradient is that bias minus
    the example, so the variance of the data is that of the gradient."""

    def loss(self, batch):
        centre = self.model(tf.zeros_like(batch[0]))
        return 0.5 * tf.reduce_sum((centre - batch[0]) ** 2, axis=-1)


@pytest.mark.slow
def test_the_estimates_are_unbiased(mirrored):
    """For batches of unequal parts, the last of them empty, and a scaled loss."""
    random, sizes = np.random.default_rng(0), [9, 14] * 200

    def batches():
        for size in sizes:
            yield random.normal(0.5, 2.0, size=(size, 3)).astype("float32"), np.zeros(size)

    signature = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64))
    loop = make_loop(
        mirrored(4),
        model=lambda: keras.Sequential([keras.Input([3]), keras.layers.Dense(3)]),
        step_class=Distance,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        data=tf.data.Dataset.from_generator(batches, output_signature=signature),
        loss_scale=True,
    )
    found = loop.train(len(sizes))
    assert found["gradient_variance"] == pytest.approx(3 * 2.0**2, rel=0.05)
    assert found["gradient_square"] == pytest.approx(3 * 0.5**2, rel=0.2)


@pytest.mark.slow
def test_trains_as_a_step_without_it(mirrored):
    bits = []
    for kind in (TrainStep, NoiseScale):
        loop = make_loop(mirrored(2), step_class=kind, seed=1, clip_norm=0.1)
        loop.train(3)
        bits.append([w.tobytes() for w in loop.step.model.get_weights()])
    assert bits[0] == bits[1]


def test_one_size_of_batches_is_refused():
    with pytest.raises(UsageError, match="^the noise scale compares two sizes .*_steps=2, or"):
        make_loop(step_class=NoiseScale)
