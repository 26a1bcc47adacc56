"""Plateau and early stopping: equal to Keras, and the same after a resume."""

from __future__ import annotations

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import examples, largest_difference, make_loop, mlp

from ctl.base.actions import STOP, Every
from ctl.errors import CheckpointError, UsageError
from ctl.schedule import Plateau
from ctl.schedule.patience import EarlyStopping, Patience


def losses_of(seed):
    """Results that improve at first, and then go up and down."""
    random = np.random.default_rng(seed)
    return (1.0 / np.arange(1, 41) + 0.1 * random.normal(size=40)).round(3).tolist()


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "options",
    [{"patience": 1}, {"patience": 2, "cooldown": 3}, {"patience": 3, "min_delta": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_the_rates_are_those_of_keras(mode, options, seed):
    options = {"factor": 0.5, "mode": mode, **options}
    callback = keras.callbacks.ReduceLROnPlateau("loss", min_lr=1e-3, **options)
    optimizer = keras.optimizers.SGD(0.1)
    callback.set_model(types.SimpleNamespace(optimizer=optimizer))
    callback.on_train_begin()
    schedule = Plateau(0.1, **options, end_learning_rate=1e-3)
    rates = []
    for number, loss in enumerate(losses_of(seed)):
        callback.on_epoch_end(number, {"loss": loss})
        schedule.evaluated(number, {"loss": loss})
        rates.append(float(schedule(0)))
        assert rates[-1] == pytest.approx(float(optimizer.learning_rate.numpy()), rel=1e-5)
    assert len(set(rates)) > 3


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("min_delta", [0.0, 0.05])
def test_the_training_ends_where_it_does_in_keras(mode, patience, min_delta):
    callback = keras.callbacks.EarlyStopping("loss", min_delta, patience, mode=mode)
    callback.set_model(types.SimpleNamespace(stop_training=False))
    callback.on_train_begin()
    stopping = EarlyStopping("loss", patience, mode, min_delta)
    for number, loss in enumerate(losses_of(0)):
        callback.on_epoch_end(number, {"loss": loss})
        ends = stopping(number, {"loss": loss}) is STOP
        assert ends == callback.model.stop_training
        if ends:
            return
    raise AssertionError("neither has ended it")


def training_data():
    return tf.data.Dataset.from_tensor_slices(examples(64)).batch(16, drop_remainder=True).repeat()


@pytest.fixture(scope="module")
def fitted():
    """The weights before, the epochs with their rates, and the weights after `fit` of Keras."""
    held_out = tf.data.Dataset.from_tensor_slices(examples(20, seed=9)).batch(16)
    model = mlp()
    before = model.get_weights()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=2, min_delta=1e-2),
        keras.callbacks.EarlyStopping("val_loss", min_delta=1e-2, patience=5),
    ]
    options = {"epochs": 25, "steps_per_epoch": 4, "verbose": 0, "shuffle": False}
    history = model.fit(
        training_data(), validation_data=held_out, callbacks=callbacks, **options
    ).history
    return before, history["learning_rate"], model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_training_equals_fit_with_callbacks(mirrored, fitted, replicas):
    """Of Keras, on one device: the rates, the end and the weights."""
    before, expected, after = fitted
    rates = []
    loop = make_loop(
        mirrored(replicas),
        optimizer=lambda: keras.optimizers.SGD(),
        data=training_data(),
        evaluate=20,  # the same examples
        schedule=Plateau(0.5, factor=0.5, patience=2, min_delta=1e-2),
        eval_actions=[EarlyStopping("loss", patience=5, min_delta=1e-2)],
    )
    read = lambda status: rates.append(status.scalars()["learning_rate"])  # noqa: E731
    loop.actions.append(Every(read, steps=4))
    loop.step.model.set_weights(before)
    loop.train_and_evaluate(100, evaluate_every=4)
    assert loop.global_step == 4 * len(expected) < 100
    assert rates == pytest.approx(expected, rel=1e-6)
    assert len(set(rates)) > 2
    assert largest_difference(loop.step.model.get_weights(), after) <= 1e-5


def test_a_step_counts_once_and_nan_is_no_improvement():
    patience = Patience("loss", 3)
    nan, inf = float("nan"), float("inf")
    seen = [(1, 1.0), (2, nan), (2, 1.0), (3, nan), (3, 0.1), (4, inf)]
    ended = [patience.evaluated(step, {"loss": value}) for step, value in seen]
    assert ended == [False] * 5 + [True]


def test_accuracy_is_best_where_it_is_highest():
    assert Patience("accuracy", 1).mode == "max"
    assert Patience("mnist@test/loss", 1).mode == "min"
    assert Patience("bleu", 1, "min").mode == "min"


@pytest.mark.parametrize(
    "name", ["auc", "auc_1", "test/Precision", "f1_score", "top5", "mean_io_u"]
)
def test_a_name_says_that_the_highest_is_best(name):
    assert (Patience(name, 1).mode, Patience(name, 1, "min").mode) == ("max", "min")


@pytest.mark.parametrize("name", ["mae", "rmse", "kl_divergence", "mean_absolute_error"])
def test_a_name_says_that_the_lowest_is_best(name):
    assert Patience(name, 1).mode == "min"


@pytest.mark.parametrize("name", ["map", "layer2", "image", "bleu", "accuracy_loss"])
def test_a_name_that_does_not_say_what_is_best(name):
    with pytest.raises(UsageError, match="^cannot tell if a high or a low"):
        Patience(name, 1)


@pytest.mark.parametrize(("name", "meant"), [("val_loss", "loss"), ("val_acc", "accuracy")])
def test_a_name_of_keras_is_told_that_of_an_evaluation(name, meant):
    with pytest.raises(UsageError, match=f"{name} is better: did you mean '{meant}'. Otherwise se"):
        EarlyStopping(name, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Patience("loss", 0),
        lambda: Patience("loss", 1, "low"),
        lambda: Patience("bleu", 1),  # high or low
        lambda: Patience("loss", 1, cooldown=-1),
        lambda: Patience("loss", 1, min_delta=float("nan")),
        lambda: Plateau(0.1, factor=1.0),
        lambda: Plateau(-0.1),
        lambda: Patience("f1", 1, "max").evaluated(1, {"loss": 1.0}),
        lambda: make_loop(schedule=Plateau(0.1)),  # without an evaluator
    ],
)
def test_what_cannot_work_is_refused(make):
    with pytest.raises(UsageError) as error:
        make()
    assert "\n" not in str(error.value)


def impatient(strategy, directory, seed=0, **options):
    """A loop whose rate falls in most evaluations, and that ends early."""
    rows = []
    loop = make_loop(
        strategy,
        schedule=Plateau(0.05, "accuracy", 0.5, 1, warmup_steps=3),
        eval_actions=[EarlyStopping("accuracy", patience=4)],
        evaluate=20,
        directory=directory,
        seed=seed,
        **options,
    )
    read = lambda status: rows.append((status.step, status.scalars()["learning_rate"]))  # noqa: E731
    loop.actions.append(Every(read, steps=2))
    return loop, rows


@pytest.fixture(scope="module")
def uninterrupted(mirrored, tmp_path_factory):
    """``uninterrupted()``: a loop that has trained, its rows and its results."""

    @functools.cache
    def trained():
        loop, rows = impatient(mirrored(1), tmp_path_factory.mktemp("straight"))
        results = loop.train_and_evaluate(100, evaluate_every=4)
        loop.checkpoints.close()
        return loop, rows, results

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("pause", [8, 9])
def test_a_resume_changes_nothing(tmp_path, mirrored, uninterrupted, pause):
    """Paused at an evaluation, of which the checkpoint was written before, and between two."""
    straight, rows, results = uninterrupted()
    assert straight.stopped
    assert pause < straight.global_step < 100
    assert len({rate for step, rate in rows if step > 3}) > 2

    first, begin = impatient(mirrored(1), tmp_path)
    first.train_and_evaluate(8, evaluate_every=4)
    if pause > 8:
        first.train(pause, total=100)
        first.save()
    first.checkpoints.close()
    resumed, rest = impatient(mirrored(1), tmp_path, seed=1)
    assert resumed.restore().step == pause
    assert resumed.train_and_evaluate(100, evaluate_every=4) == results
    assert (resumed.global_step, resumed.stopped) == (straight.global_step, True)
    assert [row for row in begin + rest if row[0] % 2 == 0] == rows
    for mine, other in zip(
        resumed.step.model.variables, straight.step.model.variables, strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())
    resumed.checkpoints.close()


def test_a_checkpoint_without_the_memory_is_refused(tmp_path):
    loop = make_loop(evaluate=20, directory=tmp_path)
    loop.train(1)
    loop.save(wait=True)
    loop.checkpoints.close()
    other, _ = impatient(None, tmp_path)
    with pytest.raises(CheckpointError, match="no 'memory', what evaluations have left"):
        other.restore()
    other.checkpoints.close()


def test_the_logged_rate_is_the_one_that_was_applied():
    """Another action, before the log of the same step, has changed the rate of the next one."""
    rows = []
    loop = make_loop(optimizer=lambda: keras.optimizers.SGD(0.5), steps_per_loop=2)

    def halve(status):
        loop.step.optimizer.learning_rate = 0.5 * 0.5 ** (status.step / 2)

    loop.actions += [halve, lambda status: rows.append(status.scalars()["learning_rate"])]
    loop.train(6)
    assert rows == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("in_the_optimizer", [True, False])
def test_the_logged_rate_of_a_schedule_of_keras_is_the_one_that_was_applied(in_the_optimizer):
    rows, rates = [], keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [4.0, 2.0, 1.0])
    if in_the_optimizer:
        loop = make_loop(optimizer=lambda: keras.optimizers.SGD(rates), steps_per_loop=1)
    else:
        loop = make_loop(optimizer=lambda: keras.optimizers.SGD(9.0), schedule=rates)
    loop.actions.append(lambda status: rows.append(status.scalars()["learning_rate"]))
    for step in range(1, 5):
        loop.train(step)
    assert rows == [4.0, 4.0, 2.0, 1.0]  # until and with the boundaries: those of Keras


def test_a_schedule_that_changes_after_the_last_step_is_logged_as_it_was():
    schedule = Plateau(0.5, factor=0.5, patience=1)
    loop = make_loop(schedule=schedule, evaluate=20)
    loop.actions.append(lambda status: schedule.evaluated(status.step, {"loss": 1.0}))
    assert loop.train(1)["learning_rate"] == 0.5
    assert loop.train(2)["learning_rate"] == 0.5  # this was the second evaluation without a gain
    assert loop.train(3)["learning_rate"] == 0.25


def test_a_plateau_in_a_graph_of_ones_own():
    schedule = Plateau(0.5, factor=0.5, patience=1)
    rate = tf.function(lambda: schedule(0))
    assert float(rate()) == 0.5
    for step in range(2):
        schedule.evaluated(step, {"loss": 1.0})
    assert float(rate()) == 0.25


def test_another_training_begins_without_the_memory_of_the_first(tmp_path):
    """As in a loop over folds; a resume has it."""
    stop = EarlyStopping("loss", 1, min_delta=100.0)

    def loop():
        return make_loop(eval_actions=[stop], directory=tmp_path, evaluate=20, seed=0)

    first = loop()
    first.train_and_evaluate(6, evaluate_every=2)
    ended = first.global_step
    assert ended == 4 and first.stopped
    first.checkpoints.close()
    second = loop()
    assert not stop.memory.numpy()[0]
    assert second.restore().stopped and stop.memory.numpy()[0]
