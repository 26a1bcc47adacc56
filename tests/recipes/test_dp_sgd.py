"""DP-SGD equals a loop over examples, adds its noise once, and reports bounds of the literature."""

from __future__ import annotations

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_replicas_agree,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
)
from references import assert_trains_as

from ctl.data import InMemory, mix
from ctl.errors import UsageError
from ctl.recipes.dp_sgd import DPSGD

STEPS, CLIP, RATE = 4, 2.5, 0.1


def make(strategy=None, checkpoints=None, data=None, noise=0.0, rate=None, **options):
    """With momentum, unless there is a ``rate``."""
    sgd = keras.optimizers.SGD
    return make_loop(
        strategy,
        optimizer=lambda: sgd(rate) if rate else sgd(RATE, momentum=0.9),
        step_class=DPSGD,
        data=data or InMemory(examples(4 * BATCH), global_batch_size=BATCH),
        checkpoints=checkpoints,
        dp_clip=CLIP,
        dp_noise=noise,
        **options,
    )


def reference(trained: keras.Model, batches) -> None:
    """Algorithm 1 without noise."""
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    variables, norms = trained.trainable_variables, []
    for features, labels in batches:
        total = [np.zeros(v.shape) for v in variables]
        for x, y in zip(features, labels, strict=True):
            with tf.GradientTape() as tape:
                loss = keras_loss(y[None], trained(x[None]))[0]
            gradients = [g.numpy() for g in tape.gradient(loss, [v.value for v in variables])]
            norms.append(math.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in gradients)))
            total = [
                t + g / max(1.0, norms[-1] / CLIP) for t, g in zip(total, gradients, strict=True)
            ]
        means = [tf.constant(t / len(labels), tf.float32) for t in total]
        optimizer.apply(means, variables)
    assert min(norms) < CLIP < max(norms)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "options"), [(2, {"jit_compile": True}), (2, {})], ids=str)
def test_replicas_equal_a_reference(mirrored, replicas, options):
    loop = make(mirrored(replicas), **options)
    orders = itertools.islice(loop.dataset.batches(), STEPS)
    batches = [tuple(tf.gather(a, order) for a in loop.dataset.arrays) for order in orders]
    assert_trains_as(
        loop, mlp(), lambda plain: reference(plain, batches), steps=STEPS, tolerance=1e-6
    )


def wide() -> keras.Model:
    """With 9,005 weights, for statistics."""
    parts = [keras.layers.Dense(500), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def moves(loop, steps: int) -> list[np.ndarray]:
    """How far each step has moved the weights, times the global batch."""
    found = []
    for step in range(steps):
        before = loop.step.model.get_weights()
        loop.train(step + 1)
        after = loop.step.model.get_weights()
        found.append(
            BATCH * np.concatenate([np.ravel(a - b) for a, b in zip(after, before, strict=True)])
        )
    return found


@pytest.mark.slow
def test_the_noise_is_added_once(mirrored):
    """Of one deviation on any number of replicas; other numbers in each step and variable."""
    loops = [make(mirrored(n), noise=3.0, rate=1.0, seed=1) for n in (1, 2)]
    one, two = (moves(loop, 1)[0] for loop in loops)
    assert np.std(one) > CLIP and largest_difference(two, one) <= 1e-5
    assert_replicas_agree(loops[1].strategy, loops[1].step.model.variables)
    loop = make(model=wide, noise=3.0, rate=1e-3)
    first, second = (move / 1e-3 for move in moves(loop, 2))
    for noise in (first[: FEATURES * 500], first[-500 * CLASSES :], second):
        # CLIP bounds the norm of a sum of BATCH gradients, which hides in so many numbers.
        assert np.std(noise) == pytest.approx(3.0 * CLIP, rel=0.05)
        assert abs(np.mean(noise)) < 0.5
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[: 500 * CLASSES], first[-500 * CLASSES :])[0, 1]) < 0.08


@pytest.mark.slow
def test_one_example_moves_the_weights_by_twice_the_bound_at_most(mirrored):
    found = []
    for scale in (1.0, -1e4):
        features, labels = examples(BATCH)
        features[3] *= scale
        data = InMemory((features, labels), global_batch_size=BATCH)
        found.append(moves(make(mirrored(2), data=data, rate=1.0, seed=1), 1)[0])
    assert 0.5 * CLIP < np.linalg.norm(found[0] - found[1]) <= 2 * CLIP * (1 + 1e-4)


def test_the_bounds():
    """Of Abadi et al. 2016, section 3.2: 1.26 with q = 0.01, noise 4, delta 1e-5 after 10,000
    steps; newer conversions are a little tighter. And of Mironov 2017, arXiv:1702.07476,
    proposition 3, for a Gaussian without sampling, as the accountant knows no less."""
    data = InMemory(examples(1600), global_batch_size=BATCH)
    loop = make(data=data, noise=4.0)
    step = loop.step
    found = step.privacy(10_000)
    assert 1.0 < found["epsilon_poisson"] < 1.27
    orders = np.linspace(1.01, 60, 10_000)
    mironov = (100 * orders / (2 * 4.0**2) - np.log(1e-5) / (orders - 1)).min()
    assert 0.8 * mironov < found["epsilon"] <= mironov
    assert step.privacy(10_001)["epsilon"] > found["epsilon"] == step.privacy(9_901)["epsilon"]


@pytest.mark.slow
def test_the_log_has_them():
    loop = make(noise=1.0)
    found = loop.train(5)
    assert found["epsilon"] == loop.step.privacy(8)["epsilon"] > found["epsilon_poisson"] > 0


def test_what_it_refuses(mirrored, monkeypatch):
    def normalized():
        parts = [keras.layers.BatchNormalization(), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input([FEATURES]), *parts])

    with pytest.raises(UsageError, match="^DPSGD supports no BatchNormalization"):
        make(model=normalized)
    with pytest.raises(UsageError, match="^DPSGD supports .* on_nan=skip"):
        make(on_nan="skip")
    with pytest.raises(
        UsageError, match="^DPSGD needs batches of one size: .*=16 does not divide 20"
    ):
        make(data=InMemory(examples(20), global_batch_size=BATCH))
    parts = [(InMemory(examples(n * BATCH), global_batch_size=BATCH), 0.5) for n in (1, 3)]
    with pytest.raises(UsageError, match="^DPSGD needs each example once per epoch, but a mixture"):
        make(data=mix(parts))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="^DPSGD needs dp-accounting: pip install"):
        make()
