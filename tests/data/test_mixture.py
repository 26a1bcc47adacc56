"""Mixtures: every part has its share at every position, and the order is a function of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from batches import seen

from ctl.data import Augmented, DatasetInfo, InMemory, Streaming, mix
from ctl.data.errors import translate_data_errors
from ctl.data.mixture import Interleave
from ctl.data.sources import Items
from ctl.errors import UsageError

WEIGHTS = [[1], [1, 1], [0.7, 0.2, 0.1], [5, 3, 3, 2, 1], [0.05] * 20, [97, 2, 1], [1e-3, 0.999]]


@pytest.mark.parametrize("weights", [*WEIGHTS, [Fraction(1, 3), Fraction(2, 3)]], ids=str)
def test_each_part_has_its_share_at_every_position(weights):
    interleave = Interleave(weights)
    shares = np.array([float(w) for w in weights]) / float(sum(weights))
    for position in [*range(300), 10**9, 10**12 + 7]:
        counts = interleave.counts(position)
        assert sum(counts) == position
        assert np.abs(counts - shares * position).max() < 1 + 1e-3


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([], "weights of a mixture must be above 0"),
        ([1, 0], "must be above 0, not"),
        ([1, float("nan")], "must be above 0, not"),
        ([1, 0.1234567], "must be short decimals such as 0.7 and 0.3, not 1, 0.1234567"),
    ],
)
def test_weights_that_have_no_order(weights, says):
    with pytest.raises(UsageError, match=says):
        Interleave(weights)


def part(first: int, count: int, seed: int = 0, **options) -> InMemory:
    numbers = np.arange(first, first + count)
    arrays = {"x": np.stack([numbers, numbers + 1], axis=1), "y": numbers}
    return InMemory(arrays, global_batch_size=8, seed=seed, **options)


def mixture(**options):
    return mix([(part(0, 10, 1), 0.7), (part(100, 33, 2), 0.2), (part(200, 9, 3), 0.1)])


def numbers(strategy, dataset, start: int, count: int) -> np.ndarray:
    """The examples of global batches, as the replicas see them."""
    batches = seen(strategy, dataset, start, count)
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], np.stack([batch["y"], batch["y"] + 1], axis=1))
    return np.stack([batch["y"] for batch in batches])


class Encoded:
    """The examples of `part`, as strings; some cannot be decoded."""

    def __init__(self, first: int, count: int, bad: tuple[int, ...] = ()):
        self.first, self.count, self.bad = first, count, bad

    def __len__(self) -> int:
        return self.count

    def read(self, indices: np.ndarray) -> list[bytes]:
        numbers = {i: b"x" if i in self.bad else b"%d" % (self.first + i) for i in indices.tolist()}
        return [numbers[i] for i in indices.tolist()]

    def decode(self, string: tf.Tensor) -> dict[str, tf.Tensor]:
        number = tf.strings.to_number(string, tf.int64)
        return {"x": tf.stack([number, number + 1]), "y": number}


def streamed(skipped: tuple[int, ...] = (), **options):
    """As `mixture`, of three kinds of sources."""
    items = [{"x": np.array([n, n + 1]), "y": n} for n in range(100, 133)]
    options = {"global_batch_size": 8, **options}
    skips = {"on_bad_record": "skip"} if skipped else {}
    encoded = Streaming(Encoded(200, 9, skipped), seed=3, **skips, **options)
    return mix(
        [
            (part(0, 10, 1), 0.7),
            (Streaming(Items(items), seed=2, **options), 0.2),
            (encoded, 0.1),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixture, streamed])
def test_a_mixture_has_each_part_in_its_own_order(mirrored, make):
    dataset = make()
    found = numbers(mirrored(1), dataset, 0, 40)
    flat = found.ravel()
    which = np.digitize(flat, [100, 200])
    for position in range(1, flat.size):
        shares = np.bincount(which[:position], minlength=3) - np.array([0.7, 0.2, 0.1]) * position
        assert np.abs(shares).max() < 1
    for number, one in enumerate(dataset.parts):  # each epoch has each example once
        mine = flat[which == number]
        epochs = mine[: mine.size // one.num_examples * one.num_examples]
        for epoch in epochs.reshape(-1, one.num_examples):
            assert sorted(epoch) == list(range(number * 100, number * 100 + one.num_examples))
        order = numbers(mirrored(1), one, 0, mine.size // 8)
        np.testing.assert_array_equal(mine[: len(order) * 8], np.concatenate(order))
    for replicas, start in ((2, 0), (4, 13)):
        later = numbers(mirrored(replicas), dataset, start, 10)
        np.testing.assert_array_equal(later, found[start : start + 10])


def test_workers_of_a_mixture_read_their_shares():
    """Also of a mixture of a mixture, and where nothing needs to be decoded."""
    plain = Streaming(part(300, 40).arrays, global_batch_size=8)
    for dataset in (streamed(), mix([(mixture(), 1), (plain, 2)])):
        rows = [(k, b["y"]) for k, b in dataset.batches(5).take(3).as_numpy_iterator()]
        keys, whole = (np.concatenate(of) for of in zip(*rows, strict=True))
        assert len({tuple(key) for key in keys.tolist()}) == len(keys)
        shares = [dataset.shares(5, range(w, w + 1), 2).take(3) for w in range(2)]
        parts = [[b["y"] for _, b in share.as_numpy_iterator()] for share in shares]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).ravel(), whole)
    assert set(np.concatenate(numbers_of(mix([(plain, 1)]), 5))) == set(range(300, 340))


def numbers_of(dataset, batches: int) -> list[np.ndarray]:
    return [batch["y"] for _, batch in dataset.batches().take(batches).as_numpy_iterator()]


def test_a_damaged_record_is_that_of_its_part():
    """Another example of the same part takes its place."""
    sound, skips = (np.concatenate(numbers_of(streamed(bad), 20)) for bad in ((), (8,)))
    np.testing.assert_array_equal(np.where(sound == 208, 200, sound), skips)
    stops = mix([(Streaming(Encoded(0, 9, (4,)), global_batch_size=8, seed=3), 1)])
    with (
        pytest.raises(UsageError, match="example 4 cannot be decoded"),
        translate_data_errors(stops),
    ):
        numbers_of(stops, 3)


def test_what_a_mixture_says():
    dataset = mixture()
    assert (dataset.num_examples, dataset.global_batch_size) == (52, 8)
    assert dataset.description.endswith("mixed: 0.7 of 10, 0.2 of 33, 0.1 of 9")
    same = mixture()
    assert dataset.fingerprint() == same.fingerprint()
    other = mix([(part(0, 10, 1), 0.7), (part(100, 33, 2), 0.1), (part(200, 9, 3), 0.2)])
    reseeded = mix([(part(0, 10, 1), 0.7), (part(100, 33, 9), 0.2), (part(200, 9, 3), 0.1)])
    assert dataset.fingerprint() != other.fingerprint()
    assert dataset.fingerprint() != reseeded.fingerprint()
    assert streamed().description.endswith("mixed: 0.7 of 10, 0.2 of 33, 0.1 of 9")
    assert streamed().fingerprint() == streamed().fingerprint() != dataset.fingerprint()
    infos = [DatasetInfo("a", num_classes=3), DatasetInfo("b", num_classes=7)]
    two = mix([(part(0, 10, info=infos[0]), 1), (part(9, 10, info=infos[1]), 1)])
    assert (two.info.name, two.info.num_classes) == ("a + b", 7)


def test_datasets_that_do_not_fit():
    images = InMemory((np.zeros([9, 4, 4, 3], np.uint8), np.zeros(9)), global_batch_size=8)
    small = InMemory(part(0, 9).arrays, global_batch_size=4)
    for parts, says in (
        ([(part(0, 10), 1), (images, 1)], "differ in their examples: .* and .*uint8"),
        ([(part(0, 10), 1), (small, 1)], "differ in their global batch sizes: 8 and 4"),
        (
            [(part(0, 10), 1), (Streaming(np.zeros(9), global_batch_size=8), 1)],
            "differ in their examples",
        ),
        ([(part(0, 10), 1), (part(0, 10, training=False), 1)], "in memory .* to train on"),
        ([(Augmented(images, "flip"), 1)], "in memory .* to train on"),
    ):
        with pytest.raises(UsageError, match=says):
            mix(parts)
