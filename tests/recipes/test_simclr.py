"""SimCLR: its loss over all replicas, its two views, and what an evaluation says of the model."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import assert_trains_as, descend
from replica_noise import replica_seeds

import ctl
from ctl.recipes import simclr

SHAPE, BATCH, STEPS, RATE = (5, 6, 2), 8, 3, 0.1
OPTIONS = {"temperature": 0.5, "smallest_crop": 0.4}


def model() -> keras.Model:
    encoder = [
        keras.Input(SHAPE),
        keras.layers.Flatten(),
        keras.layers.Dense(6, "tanh"),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
    ]
    head = [keras.Input([6]), keras.layers.Dense(4)]
    return keras.Sequential([keras.Sequential(encoder), keras.Sequential(head)])


def arrays(count: int = STEPS * BATCH) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (count, *SHAPE)).astype("uint8"), random.integers(0, 3, count)


def batches(size: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(size, drop_remainder=True)


def make(strategy, checkpoints=None) -> ctl.Loop:
    with strategy.scope():
        step = simclr.SimCLR(model(), keras.optimizers.SGD(RATE), random_seed=7, **OPTIONS)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def views_of(images: np.ndarray, seeds: list) -> tf.Tensor:
    """Those of replicas with these seeds, in the order of the replicas."""
    parts = zip(np.split(images / np.float32(255.0), len(seeds)), seeds, strict=True)
    return tf.concat([simclr.two_views(p, OPTIONS["smallest_crop"], s) for p, s in parts], axis=0)


def loss_of(projections: tf.Tensor) -> tuple[tf.Tensor, float]:
    """Equation 1 for all pairs; and how often the partner of a view is the nearest."""
    rows = np.arange(len(projections))
    pairs = np.stack([rows, rows + 1 - 2 * (rows % 2)], axis=1)  # (1, 2), (2, 1), (3, 4), ...
    length = tf.sqrt(tf.reduce_sum(projections**2, axis=1, keepdims=True))
    similar = tf.tensordot(projections / length, projections / length, [1, 1])
    terms = tf.exp(similar / OPTIONS["temperature"]) * (1.0 - np.eye(len(rows), dtype="float32"))
    losses = -tf.math.log(tf.gather_nd(terms, pairs) / tf.reduce_sum(terms, axis=1))
    nearest = terms.numpy().argmax(axis=1) == pairs[:, 1]
    return tf.reduce_mean(losses), nearest.mean()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas):
    accuracies = []

    def train(plain: keras.Model) -> list[float]:
        def mean_loss(step: int, batch: tuple) -> tf.Tensor:
            views = views_of(batch[0].numpy(), replica_seeds(7, "views", step, replicas))
            loss, accuracy = loss_of(plain(views, training=True))
            accuracies.append(accuracy)
            return loss

        return descend(plain, keras.optimizers.SGD(RATE), mean_loss, enumerate(batches()))

    scalars, losses = assert_trains_as(make(mirrored(replicas)), model(), train, steps=STEPS)
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scalars["contrastive_accuracy"] == pytest.approx(np.mean(accuracies), rel=1e-5)


@pytest.mark.parametrize("replicas", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_an_evaluation_looks_for_neighbours_on_all_replicas(mirrored, replicas):
    """The last of its batches has no example for one replica."""
    strategy, sizes = mirrored(replicas), [8, 9]
    images, labels = arrays(sum(sizes))
    cuts = [slice(0, 8), slice(8, 17)]
    dataset = tf.data.Dataset.from_generator(
        lambda: ((images[cut], labels[cut]) for cut in cuts),
        output_signature=(tf.TensorSpec([None, *SHAPE], tf.uint8), tf.TensorSpec([None], tf.int64)),
    )
    with strategy.scope():
        step = simclr.Evaluation(model(), **OPTIONS)
    results = ctl.Evaluator(step, dataset, strategy=strategy).run()
    same = []
    for cut in cuts:
        found = step.model.layers[0](images[cut] / np.float32(255.0)).numpy()
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        cosines = found @ found.T - 9.0 * np.eye(len(found))
        same += (labels[cut][cosines.argmax(axis=1)] == labels[cut]).tolist()
    assert 0.0 < np.mean(same) < 1.0
    assert results["neighbour_accuracy"] == pytest.approx(np.mean(same), rel=1e-6)
    if replicas == 1:
        first, second = (loss_of(step.model(views_of(images[c], [(0, 0)])))[0] for c in cuts)
        assert results["loss"] == pytest.approx(float(8 * first + 9 * second) / 17, rel=1e-5)


def test_no_warning_says_that_one_of_both_losses_does_not_scale_images(caplog):
    step = simclr.SimCLR(model(), keras.optimizers.SGD(RATE), **OPTIONS)
    evaluator = ctl.Evaluator(simclr.Evaluation(step.model, **OPTIONS), batches())
    ctl.Loop(step, batches(), evaluator=evaluator)
    assert "preprocess" not in caplog.text


def test_views_are_crops_of_their_image():
    """Of images with a slope: a crop has that slope, times its size and the contrast."""
    count, slope = 200, 0.05
    y, x = (tf.linspace(0.0, slope, n) for n in SHAPE[:2])
    slopes = [tf.broadcast_to(y[:, tf.newaxis], SHAPE[:2]), tf.broadcast_to(x, SHAPE[:2])]
    images = tf.tile(0.475 + tf.stack(slopes, axis=-1)[tf.newaxis], [count, 1, 1, 1])

    def sizes(smallest_crop):
        views = simclr.two_views(images, smallest_crop, (1, 2)).numpy()
        assert views.shape == (2 * count, *SHAPE)
        assert views.min() > 0.0 and views.max() < 1.0
        down, right = np.diff(views[..., 0], axis=1), np.diff(views[..., 1], axis=2)
        assert np.ptp(down, axis=(1, 2)).max() < 1e-5 > np.ptp(right, axis=(1, 2)).max()
        height = down[:, :, 0].sum(axis=1) / slope
        width = right[:, 0].sum(axis=1) / slope
        assert height.min() > 0.0 and 0.4 < np.mean(width < 0.0) < 0.6  # flipped
        return height, np.abs(width)

    contrast = np.maximum(*sizes(1.0))  # at least one side of such a crop is whole
    assert 0.6 <= contrast.min() < 0.65 and 1.35 < contrast.max() <= 1.4
    height, width = sizes(0.3) / contrast
    assert 0.3 <= (height * width).min() < 0.33 and max(height.max(), width.max()) < 1.0 + 1e-4
    ratio = (width / height)[np.maximum(height, width) < 0.999]
    assert 0.75 <= ratio.min() < 0.8 and 1.28 < ratio.max() <= 1.3334


def test_views_are_of_their_own_image():
    """2 k and 2 k + 1 of image k, of one grey each."""
    images = tf.reshape(tf.linspace(0.41, 0.59, 100), [-1, 1, 1, 1]) * tf.ones(SHAPE)
    light = simclr.two_views(images, 0.1, (1, 2)).numpy() - np.repeat(images, 2, axis=0)
    assert -0.4 <= light.min() < -0.35 and 0.35 < light.max() <= 0.4
    assert np.abs(light - light[:, :1, :1, :1]).max() < 1e-6
