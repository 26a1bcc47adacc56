"""Augmentation: each operation against a reference in plain Python, and images that depend on
nothing but the run's seed, the epoch and the index of the example."""

from __future__ import annotations

import math
from fractions import Fraction
from operator import itemgetter

import keras
import numpy as np
import pytest
import tensorflow as tf
from augment_reference import REFERENCE, draws, nearest, splitmix, with_factor
from batches import seen

import ctl
from ctl.data import Augmented, DatasetInfo, InMemory, Streaming, augment
from ctl.errors import UsageError
from ctl.flags.augmentation import parse

ALL = "crop:2,flip,color:0.4,randaugment:1:9"


def pictures(count: int, channels: int = 3, size: tuple[int, int] = (17, 20)) -> np.ndarray:
    """Noise; some images have few values, and some are of one colour."""
    images = np.random.default_rng(0).integers(256, size=(count, *size, channels), dtype=np.uint8)
    images[::3] = images[::3] // 16 + 100
    images[1::11] = 77
    return images


def test_random_numbers_are_those_of_splitmix64():
    """The first ones of seed 1234567, as its authors and others publish them."""
    assert splitmix(1234567, 2) == [6457827717110365317, 3203168211198807973]
    seeds = augment.example_seeds(7, tf.range(5, dtype=tf.int64))
    found = augment.uniform(seeds, 4)
    assert found.numpy().tolist() == [draws(seed, 4) for seed in seeds.numpy().tolist()]
    many = augment.uniform(augment.example_seeds(7, tf.range(20_000)), 4).numpy()
    assert len(np.unique(augment.example_seeds(7, tf.range(20_000)))) == 20_000
    np.testing.assert_allclose(many.mean(axis=0), 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(many.T), np.eye(4), atol=0.03)
    np.testing.assert_allclose(np.corrcoef(many[1:, 0], many[:-1, 0]), np.eye(2), atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "channels"),
    [("crop:4", 3), ("flip", 3), ("color:0.4", 1), ("color:1", 3)]
    + [("randaugment:1:9", 1), ("randaugment:2:30", 3)],
)
def test_equals_the_reference(operation, channels):
    """In a graph and compiled by XLA: the same bits."""
    [(name, arguments)] = parse(operation)
    function = {"randaugment": "rand_augment"}.get(name, name)
    apply = getattr(augment, function)
    images = pictures(30, channels)
    seeds = augment.example_seeds(3, tf.range(30))
    pairs = zip(images, seeds.numpy().tolist(), strict=True)
    expected = np.stack([REFERENCE[name](image, seed, *arguments) for image, seed in pairs])
    assert (expected != images).any()
    for jit_compile in (False, True):
        found = tf.function(lambda i, s: apply(i, s, *arguments), jit_compile=jit_compile)(
            tf.constant(images), seeds
        )
        assert found.dtype == tf.uint8 and found.shape == images.shape
        np.testing.assert_array_equal(found, expected)


def test_randaugment_has_each_operation_in_both_directions():
    draw = augment.uniform(augment.fold_in(augment.example_seeds(0, tf.range(2_000)), 0), 2)
    which = np.floor(draw[:, 0].numpy() * 14) * 2 + (draw[:, 1].numpy() < 0.5)
    assert np.bincount(which.astype(int), minlength=28).min() > 30


@pytest.mark.parametrize("alpha", [0.2, 1, 8])
def test_shares_are_those_of_a_beta_distribution(alpha):
    """Their variance is 1 / (4 (2 alpha + 1)); for 1, all shares are equally likely."""
    shares = augment._beta_quantiles(alpha) / 4096
    assert shares.mean() == pytest.approx(0.5, abs=0.5 / 4096)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)
    if alpha == 1:
        np.testing.assert_allclose(shares, (np.arange(4096) + 0.5) / 4096, atol=0.6 / 4096)


def cut(image: np.ndarray, other: np.ndarray, seed: int, alpha: float) -> tuple[np.ndarray, float]:
    """CutMix as its authors write it, and the share of the first image."""
    draw, *centre = draws(seed, 3)
    side = math.sqrt(1 - augment._beta_quantiles(alpha)[math.floor(draw * 4096)] / 4096)
    spans = []
    for place, length in zip(centre, image.shape, strict=False):
        middle, half = math.floor(place * length), math.floor(length * side) // 2
        spans.append(slice(max(0, middle - half), min(length, middle + half)))
    result = image.copy()
    result[tuple(spans)] = other[tuple(spans)]
    area = math.prod(span.stop - span.start for span in spans)
    return result, 1 - nearest(Fraction(4096 * area, image.shape[0] * image.shape[1])) / 4096


@pytest.mark.parametrize("operation", ["mixup:0.4", "cutmix:1"])
def test_pairs_are_mixed_as_the_reference_does(operation):
    """Images and labels, in a graph and compiled by XLA: the same bits."""
    [(name, (alpha,))] = parse(operation)
    images, labels = pictures(30), np.eye(30, dtype=np.float32)
    seeds = augment.example_seeds(3, tf.range(30))
    expected = []
    for row, seed in enumerate(seeds.numpy().tolist()):
        image, other = images[row], images[row ^ 1]
        if name == "mixup":
            share = augment._beta_quantiles(alpha)[math.floor(draws(seed, 1)[0] * 4096)] / 4096
            mix = with_factor(image, other, share)
        else:
            mix, share = cut(image, other, seed, alpha)
        expected.append((mix, share * labels[row] + (1 - share) * labels[row ^ 1]))
    wanted, probabilities = map(np.stack, zip(*expected, strict=True))
    assert ((wanted != images).any(axis=(1, 2, 3))).sum() > 20
    apply = getattr(augment, name)
    for jit_compile in (False, True):
        mixed, found = tf.function(lambda *a: apply(*a, alpha), jit_compile=jit_compile)(
            tf.constant(images), tf.constant(labels), seeds
        )
        np.testing.assert_array_equal(mixed, wanted)
        np.testing.assert_array_equal(found, probabilities)
        np.testing.assert_array_equal(tf.reduce_sum(found, axis=1), np.ones(30))


# A dataset ---------------------------------------------------------------------------------------


def data(operations: str = ALL, batch: int = 12, **options) -> Augmented:
    arrays = pictures(50, size=(5, 6)), np.arange(50)
    options = {"info": DatasetInfo("arrays", num_classes=50), **options}
    return Augmented(InMemory(arrays, global_batch_size=batch, **options), operations, seed=5)


@pytest.mark.slow
def test_replicas_and_a_later_start_change_no_bit(mirrored):
    whole = seen(mirrored(1), data(), 0, 9)  # two epochs and more
    found = seen(mirrored(2), data(), 3, 5)
    tf.nest.map_structure(np.testing.assert_array_equal, found, whole[3:8])
    labels = np.concatenate([labels for _, labels in whole])
    images = np.concatenate([images for images, _ in whole])
    first, second = (images[at][labels[at].argsort()] for at in (slice(50), slice(50, 100)))
    assert (first != second).any(axis=(1, 2, 3)).mean() > 0.9  # two epochs differ
    plain = pictures(50, size=(5, 6))
    for position in (0, 49, 50, 99):  # the reference knows the epoch and the index
        number = position // 50 * 50 + labels[position]
        seed = int(augment.example_seeds(5, tf.constant([number]))[0])
        image = plain[labels[position]]
        for number, (name, arguments) in enumerate(parse(ALL)):
            folded = int(augment.fold_in(tf.constant([seed], tf.uint64), number)[0])
            image = REFERENCE[name](image, folded, *arguments)
        np.testing.assert_array_equal(images[position], image)


@pytest.mark.slow
def test_pairs_are_those_of_neighbours_for_any_number_of_replicas(mirrored):
    """In memory and streamed; also where a pair is of two epochs. Each keeps its own changes."""
    arrays = pictures(45, size=(5, 6)), np.arange(45)
    options = {"global_batch_size": 8, "info": DatasetInfo("arrays", num_classes=45)}
    for kind, replicas, start in ((InMemory, 4, 5), (Streaming, 2, 0)):
        dataset = kind(arrays, **options)
        mixed = Augmented(dataset, "flip,mixup:0.4,cutmix:1", seed=5)
        whole = seen(mirrored(1), mixed, 0, 7)
        late = seen(mirrored(replicas), mixed, start, 2)
        tf.nest.map_structure(np.testing.assert_array_equal, late, whole[start : start + 2])
        order = InMemory(np.arange(45), global_batch_size=8)
        labels = np.concatenate([o.numpy() for o in order.batches().take(7)])
        if kind is Streaming:
            labels = np.concatenate([keys[:, 1] for keys, _ in dataset.batches().take(7)])
        assert {labels[44] in labels[:44], labels[45] in labels[:44]} == {False, True}
        probabilities, rows = np.concatenate([labels for _, labels in whole]), np.arange(56)
        pairs = probabilities[rows, labels] + probabilities[rows, labels[rows ^ 1]]
        np.testing.assert_array_equal(pairs, np.ones(56))
        assert np.unique(probabilities).size > 20


def test_the_size_of_a_batch_changes_no_image(mirrored):
    many, few = (seen(mirrored(1), data("crop:1,flip", batch=b), 0, 60 // b) for b in (12, 5))
    for large, small in zip(zip(*many, strict=True), zip(*few, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(large), np.concatenate(small))


class Sums(ctl.TrainStep):
    """Logs a sum that float32 has exactly, of each step."""

    def loss(self, batch):
        images, labels = batch
        self.log("labels", tf.reduce_sum(labels * tf.range(50.0)), "sum")
        places = tf.range(1.0, 1.0 + 5 * 6 * 3)
        flat = tf.reshape(tf.cast(images, tf.float32), [-1, 5 * 6 * 3])
        self.log("pixels", tf.reduce_sum(tf.math.floormod(flat * places, 1021.0)), "sum")
        return super().loss(batch)


def make(strategy, **options) -> ctl.Loop:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input([5, 6, 3]), keras.layers.Flatten(), keras.layers.Dense(50)]
        metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        options = {"metrics": metrics, **options}
        step = Sums(keras.Sequential(layers), keras.optimizers.SGD(0.1), **options)
    return ctl.Loop(step, data("crop:2,flip,color:0.4,mixup:0.4"), strategy=strategy)


@pytest.mark.slow
def test_a_loop_sees_the_same_images_everywhere(mirrored):
    """In blocks of steps, with micro-batches on two replicas, and compiled by XLA on one."""
    sums = [
        [itemgetter("pixels", "labels", "accuracy")(loop.train(until)) for until in (3, 5, 11)]
        for loop in (
            make(mirrored(2), accumulate_steps=2),
            make(mirrored(1), jit_compile=True),
        )
    ]
    assert sums[0] == sums[1]
    assert len(set(sums[0])) == 3


def test_a_stream_of_the_users_own(mirrored):
    """It has no epochs that ctl knows of: the position is that in all its batches."""
    images, labels = pictures(40, size=(5, 6)), np.arange(40)
    own = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8).repeat()
    dataset = Augmented(ctl.data.as_dataset(own, global_batch_size=8), "flip,crop:1", seed=5)
    whole, late = seen(mirrored(1), dataset, 0, 12), seen(mirrored(2), dataset, 7, 5)
    tf.nest.map_structure(np.testing.assert_array_equal, late, whole[7:])
    assert (whole[0][0] != whole[5][0]).any()


@pytest.mark.slow
def test_a_stream_has_the_images_of_data_in_memory(mirrored):
    """Each example of each epoch, in the other order of the stream, on any number of replicas."""

    def by_epoch(batches, start: int) -> dict[tuple[int, int], bytes]:
        found, position = {}, start * 12
        for images, labels in batches:
            for image, label in zip(images, labels, strict=True):
                found[position // 50, int(label)] = image.tobytes()
                position += 1
        return found

    wanted = by_epoch(seen(mirrored(1), data("crop:2,flip"), 0, 9), 0)
    arrays = data().arrays
    for replicas, start in ((1, 0), (4, 3)):
        stream = Streaming(arrays, global_batch_size=12, seed=replicas)
        stream = Augmented(stream, "crop:2,flip", seed=5)
        found = by_epoch(seen(mirrored(replicas), stream, start, 4), start)
        assert len(found) == 48 and found.items() <= wanted.items()


def test_it_is_the_dataset_that_it_wraps():
    dataset = data(seed=9)
    assert dataset.num_examples == 50 and dataset.info.name == "arrays"
    assert dataset.description.endswith(f"augmented: {ALL}")
    assert dataset.steps_per_element == dataset.dataset.steps_per_element > 1
    assert dataset.fingerprint() == {**dataset.dataset.fingerprint(), "augment": ALL}


@pytest.mark.parametrize(
    "arrays",
    [
        np.zeros([9, 5, 6, 3], np.uint8),
        (np.zeros([9, 5, 6, 3], np.float32), np.zeros(9)),
        (np.zeros([9, 5, 6, 2], np.uint8), np.zeros(9)),
        (np.zeros([9, 5], np.uint8), np.zeros(9)),
    ],
)
def test_data_that_are_no_images(arrays):
    with pytest.raises(UsageError, match=r"only batches \(images, labels\) can be augmented"):
        Augmented(InMemory(arrays, global_batch_size=3), "flip")


def test_data_that_have_no_pairs(mirrored):
    own = tf.data.Dataset.from_tensor_slices((pictures(9), np.arange(9))).batch(4)
    own = ctl.data.as_dataset(own, global_batch_size=4)
    for says, make, replicas in (
        ("mixup mixes pairs .* a multiple of 2, not 11", lambda: data("mixup:1", batch=11), 1),
        ("takes batches .images, classes", lambda: data("flip,cutmix:1", info=None), 1),
        ("mixes pairs .* a multiple of 8, not ", lambda: data("mixup:1"), 4),
        (r"batches of one size \(drop_remainder=True\)", lambda: Augmented(own, "mixup:1"), 1),
    ):
        with pytest.raises(UsageError, match=says):
            seen(mirrored(replicas), make(), 0, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("crp:4", "unknown operation of --augment 'crp': did you mean 'crop'"),
        ("crop", "--augment=crop: write crop:PIXELS"),
        ("flip:2", "--augment=flip:2: write flip"),
        ("flip,", "unknown operation of --augment ''"),
        ("color:1.5", "--augment=color:1.5: STRENGTH must be a number from 0 to 1"),
        ("color:nan", "STRENGTH must be a number"),
        ("randaugment:2:9.5", "MAGNITUDE must be a whole number from 0 to 30"),
        ("flip,mixup", "--augment=mixup: write mixup:ALPHA"),
        ("cutmix:0", "ALPHA must be a number from 0.01 to 100"),
    ],
)
def test_texts_that_say_nothing(text, says):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)
