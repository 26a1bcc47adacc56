from __future__ import annotations

import numpy as np
import pytest

from ctl.data import order
from ctl.data.order import Shuffle, oversampled, permuted


def keys(epoch: int) -> np.ndarray:
    return np.random.Philox(key=np.array([3, epoch], np.uint64)).random_raw(8)


@pytest.mark.parametrize("size", [2, 3, 7, 63, 64, 65, 1000, 100_003])
def test_a_feistel_network_is_a_permutation(size):
    assert sorted(permuted(np.arange(size), size, keys(0))) == list(range(size))


@pytest.mark.parametrize("in_memory", [1 << 22, 0])
def test_every_epoch_has_every_example_once_at_any_position(monkeypatch, in_memory):
    monkeypatch.setattr(order, "_MOST_PERMUTED", in_memory)
    for block in (1, 7):
        epochs = Shuffle(101, 5, block)(np.arange(4 * 101)).reshape(4, 101)
        assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4
        some = np.array([350, 7, 101, 100])
        np.testing.assert_array_equal(Shuffle(101, 5, block)(some), epochs.ravel()[some])
        assert (Shuffle(101, 6, block)(np.arange(101)) != epochs[0]).any()
    runs = Shuffle(101, 5, 7)(np.arange(98)).reshape(14, 7)
    assert (np.diff(runs, axis=1) == 1).all() and (runs[:, 0] % 7 == 0).all()


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations from what is expected of equal probabilities, for many degrees."""
    degrees = counts.size - max(counts.shape) if counts.ndim == 2 else counts.size - 1
    expected = counts.mean()
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("in_memory", [1 << 22, 0])
def test_positions_and_neighbours_are_uniform(monkeypatch, in_memory):
    monkeypatch.setattr(order, "_MOST_PERMUTED", in_memory)
    size, epochs = 100, 2000
    rows = Shuffle(size, 1)(np.arange(size * epochs)).reshape(epochs, size)
    positions = np.stack([np.bincount(rows[:, at], minlength=size) for at in range(size)])
    assert abs(chi_square(positions)) < 5
    # Of the same position in two epochs, and of neighbours in one.
    assert abs(chi_square(np.bincount(((rows[1:] - rows[:-1]) % size).ravel()))) < 5
    steps = np.bincount(((rows[:, 1:] - rows[:, :-1]) % size).ravel())
    assert steps[0] == 0 and abs(chi_square(steps[1:])) < 5


def test_the_order_is_the_one_of_earlier_releases():
    """See `ctl.data.order.VERSION`."""
    assert Shuffle(10, 3)(np.arange(10)).tolist() == [6, 8, 4, 1, 3, 5, 9, 7, 0, 2]
    assert Shuffle(5_000_000, 3)(np.arange(5)).tolist() == [
        2677501,
        2233235,
        817474,
        2309280,
        4338093,
    ]


def test_a_start_far_into_data_of_any_size_is_quick_and_small():
    shuffle = Shuffle(10**12, 0)
    late = shuffle(10**15 + np.arange(64))
    assert len(set(late.tolist())) == 64 and late.min() >= 0 and late.max() < 10**12
    assert not shuffle._permutations


def test_oversampled_classes_have_as_many():
    labels = np.array([2, 0, 0, 2, 0, 0, 0, 5])
    rows = oversampled(labels)
    assert np.bincount(labels[rows]).tolist() == [5, 0, 5, 0, 0, 5]
    assert {*rows.tolist()} == {*range(8)}
    counts = np.bincount(rows)
    assert sorted(counts[[0, 3]].tolist()) == [2, 3] and counts[7] == 5
    np.testing.assert_array_equal(oversampled(labels), rows)
    drawn = {tuple(oversampled(labels, seed)) for seed in range(9)}
    assert len(drawn) == 2  # which of the two is there once more
