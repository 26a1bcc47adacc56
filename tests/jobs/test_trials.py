"""The trial of packs: what it tries, what it keeps, and that nothing else of a training sees it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    CountsItself,
    assert_replicas_agree,
    counts,
    examples,
    make_loop,
    sgd,
)

from ctl.data import InMemory
from ctl.data.global_batches import GlobalBatches
from ctl.jobs import trials
from ctl.loop import Loop
from ctl.step import TrainStep


def tensors(*sizes: int) -> list[tf.TensorSpec]:
    return [tf.TensorSpec([size // 4], tf.float32) for size in sizes]


def test_candidates_are_halves_down_to_sixteenths():
    parts = 1 << 20
    found = trials.candidates(tensors(*[parts] * 16))
    assert found == [0, 8 * parts, 4 * parts, 2 * parts, parts]


def test_candidates_differ_in_their_packs():
    """A large tensor has a pack of its own, whatever the limit."""
    assert trials.candidates(tensors(1 << 20)) == [0]
    found = trials.candidates(tensors(8 << 20, 1 << 20))
    assert len(found) == 2


def test_small_gradients_are_not_cut():
    assert trials.candidates(tensors(*[1 << 10] * 64)) == [0]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES),
        ]
    )


def tunable(strategy, **more) -> Loop:
    adamw = lambda: keras.optimizers.AdamW(0.01)  # noqa: E731
    data = InMemory(examples(), global_batch_size=BATCH)
    options = {"ema_decay": 0.9, "clip_norm": 1.0, **more}
    return make_loop(strategy, model=network, optimizer=adamw, data=data, seed=3, **options)


def weights(of: Loop) -> list[np.ndarray]:
    """Of every replica."""
    return [
        part.numpy()
        for values in of.step.state().values()
        for variable in values
        for part in of.strategy.experimental_local_results(variable)
    ]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Of two steps: how long a step takes is not what is tested."""
    monkeypatch.setattr(trials, "_BLOCK_SECONDS", 0.0)


@pytest.fixture
def two(monkeypatch):
    """One pack and packs of 128 bytes are tried; collects the times of every trial."""
    times, measure = [], trials._time
    monkeypatch.setattr(trials, "candidates", lambda tensors: [0, 128])
    monkeypatch.setattr(trials, "_time", lambda *args: times.append(measure(*args)) or times[-1])
    return times


@pytest.mark.slow
def test_a_training_does_not_see_the_trial(mirrored, two):
    """BatchNorm, Dropout, AdamW, an average of the weights, metrics, and what each replica has of
    its own: bit for bit the same as with the size that was kept, in the middle of an epoch, too."""
    strategy = mirrored(2)
    trained, tuned = (tunable(strategy, step_class=CountsItself) for _ in range(2))
    trained.train(3)
    tuned.train(3)
    before = weights(tuned)
    kept = trials.tune_packs(tuned)
    assert tuned.global_step == 3 and kept == tuned.step.bytes_per_pack
    for a, b in zip(before, weights(tuned), strict=True):
        np.testing.assert_array_equal(a, b)
    assert counts(tuned) == [3.0, 3.0]
    (times,) = two
    assert list(times) == [0, 128]
    assert all(len(seconds) >= 7 and min(seconds) > 0 for seconds in times.values())
    trained.step.bytes_per_pack = kept
    trained.scalars.reset()
    results = [each.train(10) for each in (trained, tuned)]
    for a, b in zip(weights(trained), weights(tuned), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("loss", "accuracy"):
        assert results[0][name] == results[1][name]
    assert_replicas_agree(strategy, tuned.step.model.trainable_variables)


def rounds(ratio, noise=0.0, count=7):
    """Times of 0 and 1 in rounds on a machine that becomes twice as slow, and has outliers."""
    random = np.random.default_rng(0)
    first = np.linspace(1, 2, count) * (1 + 5 * (random.random(count) < 0.2))
    return {0: list(first), 1: list(first * (ratio + noise * random.uniform(-1, 1, count)))}


@pytest.mark.parametrize(
    ("times", "best", "decided"),
    [
        (rounds(0.9), 1, True),
        (rounds(0.9, 0.05), 1, True),
        (rounds(0.98), 0, False),  # a gain that is too small to matter
        (rounds(1.13), 0, False),
        (rounds(0.9, count=6), 0, None),
        (rounds(0.95, 0.3), 0, None),
        (rounds(0.95, 0.3, count=400), 1, True),
    ],
)
def test_the_paired_ratios_decide(times, best, decided):
    assert trials.fastest(times) == best
    assert trials._gains(trials._ratios(times, 1)) is decided
    assert trials.fastest({**times, 2: [0.5 * one for one in times[0]]}) in (best, 2)


@pytest.mark.slow
def test_more_rounds_are_made_while_it_is_undecided(mirrored, monkeypatch):
    """And none of a training that is too short for a trial."""
    made = []

    def measured(strategy, seconds):
        made.append(seconds)
        if len(made) <= 2:  # the first call, and two steps
            return [0.01]
        number = len(made) - 3
        return [1.0, (1.5 if number % 2 else 0.5) if number < 9 else 0.5]

    monkeypatch.setattr(trials, "_slowest", measured)
    monkeypatch.setattr(trials, "candidates", lambda tensors: [0, 128])
    data = InMemory(examples(), global_batch_size=BATCH)
    each = make_loop(mirrored(2), optimizer=sgd(), data=data)
    assert trials.tune_packs(each, steps=1000) == 0 and len(made) == 2
    made.clear()
    assert trials.tune_packs(each) == 128
    assert trials._LEAST_ROUNDS < len(made) - 2 < trials._MOST_ROUNDS


@pytest.mark.slow
def test_a_choice_is_known_to_later_runs(mirrored, monkeypatch, tmp_path):
    """Of the same model and batch; a damaged file costs a trial."""
    monkeypatch.setattr(trials, "candidates", lambda tensors: [0, 128])
    made, times = [], rounds(0.5)
    found = {0: times[0], 128: times[1]}
    monkeypatch.setattr(trials, "_time", lambda *_: made.append(0) or found)
    path = tmp_path / "trials.json"
    for _ in range(2):
        assert trials.tune_packs(tunable(mirrored(2)), cache=path) == 128
    assert len(made) == 1
    other = make_loop(mirrored(2), data=InMemory(examples(), global_batch_size=BATCH))
    assert trials.tune_packs(other, cache=path) == 128
    assert len(made) == 2
    path.write_text(path.read_text()[:-4])
    assert trials.tune_packs(tunable(mirrored(2)), cache=path) == 128
    assert len(made) == 3


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.compiled_update), 2])
def test_compiling_is_tried_and_leaves_no_trace(mirrored, replicas):
    strategy = mirrored(replicas)
    trained, tuned = tunable(strategy), tunable(strategy)
    before = weights(tuned)
    kept = trials.tune_jit_compile(tuned)
    assert kept is tuned.step.jit_compile
    for a, b in zip(before, weights(tuned), strict=True):
        np.testing.assert_array_equal(a, b)
    trained.step.jit_compile = kept
    for each in (trained, tuned):
        each.train(5)
    for a, b in zip(weights(trained), weights(tuned), strict=True):
        np.testing.assert_array_equal(a, b)


class Strings(TrainStep):
    """XLA has no strings."""

    def loss(self, batch):
        losses, logits = super().loss(batch)
        lengths = tf.strings.length(tf.strings.as_string(batch[1]))
        return losses + 0.0 * tf.cast(lengths, tf.float32), logits


@pytest.mark.slow
def test_what_cannot_be_compiled_is_not(mirrored):
    each = make_loop(mirrored(2), step_class=Strings)
    assert trials.tune_jit_compile(each) is False
    each.train(3)
    assert each.global_step == 3


def test_one_replica_has_nothing_to_try(mirrored):
    assert trials.tune_packs(tunable(mirrored(1))) == 0


def test_a_dataset_that_ends_is_not_an_error(mirrored, two):
    few = tf.data.Dataset.from_tensor_slices(examples(3 * BATCH)).batch(BATCH, drop_remainder=True)
    each = make_loop(mirrored(2), data=GlobalBatches(few, training=False))
    before = weights(each)
    assert trials.tune_packs(each) == 0 and not two
    for a, b in zip(before, weights(each), strict=True):
        np.testing.assert_array_equal(a, b)
    each.train(3)
    assert each.global_step == 3


def test_replicas_that_exchange_statistics_try_no_xla(mirrored):
    def model():
        norm = keras.layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.layers.Input([FEATURES]), norm, keras.layers.Dense(CLASSES)])

    assert trials.tune_jit_compile(make_loop(mirrored(2), model=model)) is False
