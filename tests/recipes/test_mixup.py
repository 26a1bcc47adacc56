"""mixup and CutMix equal plain TensorFlow that mixes the same examples by the same share."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_replicas_agree, keras_loss, largest_difference, make_loop

from ctl.errors import UsageError
from ctl.recipes.mixup import CutMix, Mixup, symmetric_beta

BATCH, SIZE, CLASSES, STEPS = 16, 6, 3, 5


def network() -> keras.Model:
    parts = [keras.layers.Flatten(), keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([SIZE, SIZE, 2]), *parts])


def examples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, SIZE, SIZE, 2)).astype("float32")
    return images, random.integers(0, CLASSES, BATCH)


def data(*more: np.ndarray) -> tf.data.Dataset:
    """The same batch again and again."""
    arrays = (*examples(), *more)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True).repeat()


def noting(kind, replicas):
    """A ``kind`` that keeps what each replica has drawn."""

    class Noting(kind):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            n = BATCH // replicas
            self.order = self.variable("order", [n], "int32", per_replica=True)
            self.share = self.variable("share", [], per_replica=True)
            self.second = self.variable("second", [n, SIZE, SIZE], "int32", per_replica=True)

        def draw(self, count):
            order, share = super().draw(count)
            self.order.assign(order)
            return order, share

        def mix(self, first, second, share):
            mixed, share = super().mix(first, second, share)
            self.share.assign(share)
            self.second.assign(tf.cast(tf.reduce_all(mixed == second, axis=-1), tf.int32))
            return mixed, share

    return Noting


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mixup, CutMix])
@pytest.mark.parametrize("replicas", [1, 2])
def test_equals_plain_tensorflow(mirrored, replicas, kind):
    strategy = mirrored(replicas)
    loop = make_loop(
        strategy,
        model=network,
        step_class=noting(kind, replicas),
        optimizer=lambda: keras.optimizers.SGD(0.5),
        data=data(),
        seed=1,
    )
    plain, optimizer = network(), keras.optimizers.SGD(0.5)
    plain.set_weights(loop.step.model.get_weights())
    images, labels = examples()
    shares = []
    for step in range(1, STEPS + 1):
        loop.train(step, total=STEPS)
        drawn = [
            [part.numpy() for part in strategy.experimental_local_results(variable)]
            for variable in (loop.step.order, loop.step.share, loop.step.second)
        ]
        with tf.GradientTape() as tape:
            losses = []
            parts = zip(np.split(images, replicas), np.split(labels, replicas), strict=True)
            for (x, y), order, share, second in zip(parts, *drawn, strict=True):
                assert sorted(order) == list(range(len(y)))
                if kind is Mixup:
                    mixed = share * x + (1 - share) * x[order]
                else:
                    mixed = np.where(second[..., None], x[order], x)
                    own = order == np.arange(len(y))
                    np.testing.assert_allclose(second[~own].mean(axis=(1, 2)), 1 - share, atol=1e-6)
                logits = plain(mixed)
                both = share * keras_loss(y, logits) + (1 - share) * keras_loss(y[order], logits)
                losses.append(both)
                shares.append(float(share))
            loss = tf.reduce_mean(tf.concat(losses, axis=0))
        gradients = tape.gradient(loss, [v.value for v in plain.trainable_variables])
        optimizer.apply(gradients, plain.trainable_variables)
    assert largest_difference(loop.step.model.get_weights(), plain.get_weights()) <= 1e-5
    assert_replicas_agree(strategy, loop.step.model.variables)
    assert len(set(shares)) > 3  # CutMix has few sizes


def make(strategy, **options):
    return make_loop(
        strategy, model=network, step_class=CutMix, data=data(), mix_alpha=0.5, **options
    )


def test_a_rectangle_is_cut():
    """As large as drawn, unless the border cuts it; at one place for all examples."""
    loop = make_loop(model=network, step_class=CutMix, data=data())
    first, second = tf.zeros([2, 40, 60, 1]), tf.ones([2, 40, 60, 1])
    share = tf.constant(0.2)
    cuts, shares = tf.function(lambda: loop.strategy.run(loop.step.mix, (first, second, share)))()
    cut = cuts.numpy()[0, :, :, 0]
    np.testing.assert_array_equal(cut, cuts.numpy()[1, :, :, 0])
    rows, columns = cut.any(axis=1), cut.any(axis=0)
    np.testing.assert_array_equal(cut, np.outer(rows, columns))
    for inside, most in ((rows, 34), (columns, 52)):
        (edges,) = np.nonzero(np.diff(inside, prepend=False, append=False))
        assert len(edges) == 2 and most // 2 <= edges[1] - edges[0] <= most
    assert float(shares) == pytest.approx(1 - cut.mean()) and float(shares) > 0.25


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_shares_have_the_beta_distribution(alpha):
    draw = tf.function(symmetric_beta, jit_compile=True)
    ours = np.sort(draw([50_000], tf.constant([1, 2]), alpha))
    assert ours[0] >= 0 and ours[-1] <= 1
    theirs = np.sort(np.random.default_rng(0).beta(alpha, alpha, 50_000))
    assert np.abs(ours - theirs).max() < 0.03


def test_weights_are_refused():
    loop = make_loop(model=network, step_class=Mixup, data=data(np.ones(BATCH, "float32")))
    with pytest.raises(UsageError, match=r"^this step accepts batches \(features, labels\) only"):
        loop.train(1)
