"""Two towers: the corrected softmax over all replicas, the recall over all items, and the data."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference
from references import assert_trains_as, descend

import ctl
from ctl.base.models import as_model
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.recipes import two_tower

USERS, ITEMS, BATCH, STEPS, TEMPERATURE = 11, 7, 8, 4, 0.5
SIZES = [BATCH] * STEPS


def model() -> dict[str, keras.Model]:
    return {"user": two_tower.tower(USERS, 6), "item": two_tower.tower(ITEMS, 6)}


def arrays(count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Of so few items that a batch has some more than once. The frequencies are others than those
    in these arrays."""
    random = np.random.default_rng(0)
    users, items = random.integers(USERS, size=count), random.integers(ITEMS, size=count)
    frequencies = np.arange(1.0, ITEMS + 1.0, dtype="float32") / 28.0
    return {"user": users, "log_frequency": np.log(frequencies[items])}, items


def batches(sizes: Sequence[int] = SIZES) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(arrays(sum(sizes)))
    if sizes == SIZES:
        return data.batch(BATCH, drop_remainder=True)
    return data.batch(sum(sizes)).rebatch(sizes)


def make(strategy, checkpoints=None, data=None, optimizer=None, **options) -> ctl.Loop:
    with strategy.scope():
        step = two_tower.TwoTower(
            model(),
            optimizer or keras.optimizers.SGD(0.5),
            softmax_temperature=TEMPERATURE,
            **options,
        )
    return ctl.Loop(step, data or batches(), strategy=strategy, checkpoints=checkpoints)


def loss_of(towers, features, items, corrected: bool) -> tf.Tensor:
    """Section 3, row by row: of other examples, those with another item are negatives."""
    products = tf.einsum("ud,id->ui", towers["user"](features["user"]), towers["item"](items))
    terms = tf.exp(products / TEMPERATURE)
    if corrected:
        terms /= tf.exp(features["log_frequency"])
    losses = []
    for row, item in enumerate(items.numpy()):
        negatives = np.flatnonzero(items.numpy() != item)
        below = terms[row, row] + tf.reduce_sum(tf.gather(terms[row], negatives))
        losses.append(-tf.math.log(terms[row, row] / below))
    return tf.reduce_mean(losses)


@pytest.mark.parametrize(
    ("replicas", "corrected", "sizes"),
    [
        (1, True, SIZES),
        (1, False, SIZES),
        (2, True, SIZES),
        # With a batch of one, a replica has no examples.
        pytest.param(2, True, [8, 5, 1, 7], marks=pytest.mark.slow),
        pytest.param(2, False, [9, 13, 8, 5], marks=pytest.mark.slow),
    ],
)
def test_replicas_equal_plain_tensorflow(mirrored, replicas, corrected, sizes):
    data = batches(sizes)

    def train(plain) -> list[float]:
        return descend(
            plain,
            keras.optimizers.SGD(0.5),
            lambda features, items: loss_of(plain, features, items, corrected),
            data,
        )

    loop = make(mirrored(replicas), data=data, sampling_correction=corrected)
    scalars, losses = assert_trains_as(loop, as_model(model()), train, steps=STEPS)
    assert scalars["loss"] == pytest.approx(np.average(losses, weights=sizes), rel=1e-5)


@pytest.mark.slow
def test_the_correction_changes_the_weights(mirrored):
    """A factor that all frequencies share does not."""

    def trained(factor: float, **options) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        data = batches().map(
            lambda features, items: (
                {**features, "log_frequency": features["log_frequency"] + np.log(factor)},
                items,
            )
        )
        loop = make(mirrored(1), data=data, **options)
        loop.train(STEPS)
        return loop.step.model.get_weights()

    corrected = trained(1.0)
    assert largest_difference(corrected, trained(100.0)) < 1e-5
    assert largest_difference(corrected, trained(1.0, sampling_correction=False)) > 1e-3


@pytest.mark.slow
def test_rows_train_as_whole_tables(mirrored):
    weights = []
    for sparse_rows in ("on", "off"):
        keras.utils.set_random_seed(3)
        with mirrored(1).scope():
            adam = keras.optimizers.Adam(0.01)
        loop = make(mirrored(1), optimizer=adam, sparse_rows=sparse_rows)
        loop.train(STEPS)
        assert bool(loop.step.tables.deferred) == (sparse_rows == "on")
        weights.append(loop.step.model.get_weights())
    assert largest_difference(*weights) <= 1e-6


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_ranks_all_items(mirrored, replicas):
    """Also those that are in no batch."""
    strategy, count = mirrored(replicas), 60
    users, items = np.arange(count) % USERS, np.arange(count) % (ITEMS - 2)
    data = InMemory(({"user": users}, items), global_batch_size=BATCH, training=False)
    with strategy.scope():
        step = two_tower.Evaluation(model(), softmax_temperature=TEMPERATURE, recall_at=3)
    results = ctl.Evaluator(step, data, strategy=strategy).run()
    every = step.model["item"](np.arange(ITEMS)).numpy()
    logits = step.model["user"](users).numpy() @ every.T / TEMPERATURE
    of_item = np.take_along_axis(logits, items[:, np.newaxis], axis=1)
    recall = np.mean((logits > of_item).sum(axis=1) < 3)
    assert 0.0 < recall < 1.0
    assert results["recall_at_3"] == pytest.approx(recall, rel=1e-6)
    losses = np.log(np.exp(logits).sum(axis=1)) - of_item[:, 0]
    assert results["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow
def test_the_correction_raises_the_recall():
    """Almost as many as one who knows the tastes: the first two of a kind of ten."""
    training, held_out = two_tower.choices(1000, 100)
    recalls = []
    for corrected in (True, False):
        keras.utils.set_random_seed(3)
        towers = {"user": two_tower.tower(1000, 16), "item": two_tower.tower(100, 16)}
        adam = keras.optimizers.Adam(0.01)
        step = two_tower.TwoTower(towers, adam, sampling_correction=corrected)
        ctl.Loop(step, InMemory(training, global_batch_size=100)).train(200)
        data = InMemory(held_out, global_batch_size=500, training=False)
        evaluation = two_tower.Evaluation(step.model, recall_at=2)
        recalls.append(ctl.Evaluator(evaluation, data).run()["recall_at_2"])
    best = 0.8 * 1.5 / np.sum(1.0 / np.arange(1, 11))
    assert recalls[0] > 0.85 * best
    assert recalls[0] > 1.5 * recalls[1]


def test_choices_have_tastes_and_a_power_law():
    users, items = 500, 100
    (features, chosen), (other, held_out) = two_tower.choices(users, items)
    counts = np.bincount(chosen, minlength=items)
    np.testing.assert_allclose(
        np.exp(features["log_frequency"]), counts[chosen] / len(chosen), rtol=1e-5
    )
    by_rank = counts.reshape(10, 10).sum(axis=1)
    np.testing.assert_allclose(by_rank[0] / by_rank, np.arange(1, 11), rtol=0.2)
    kinds = np.zeros([users, 10])
    np.add.at(kinds, (features["user"], chosen % 10), 1.0 / 20.0)
    assert kinds.max(axis=1).mean() == pytest.approx(0.82, abs=0.02)
    assert other["user"].tolist() == list(range(users))
    assert np.mean(held_out % 10 == kinds.argmax(axis=1)) == pytest.approx(0.82, abs=0.05)


def test_the_model_of_the_command_makes_unit_vectors():
    for one in two_tower.make_model().values():
        vectors = one(np.array([0, 3, 9_999])).numpy()
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
        assert one.layers[0].input_dim == 10_000


def test_what_is_no_pair_of_towers_is_refused():
    user, item = model().values()
    late = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    for wrong in (user, {"user": user, "items": item}, {"user": user, "item": late}):
        with pytest.raises(UsageError, match=r"^TwoTower needs a dict of two models, user and it"):
            two_tower.TwoTower(wrong, keras.optimizers.SGD())
