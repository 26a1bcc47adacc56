"""Callbacks of Keras get what `fit` gives them, and do what they do there."""

from __future__ import annotations

import csv
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as of_keras

import ctl
from ctl.checkpoint import bundle
from ctl.errors import UsageError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = RANDOM.integers(0, 3, 32)
LOSS = "sparse_categorical_crossentropy"


def model():
    keras.utils.set_random_seed(0)
    last = keras.layers.Dense(3, "softmax")
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), last])


def batches(size=8):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def make(rate=0.1, evaluated=True, **options):
    trained = model()
    step = ctl.TrainStep(trained, keras.optimizers.SGD(rate), LOSS, metrics=["accuracy"])
    evaluator = ctl.Evaluator(ctl.EvalStep(trained, LOSS, ["accuracy"]), batches())
    return ctl.Loop(step, batches(), evaluator=evaluator if evaluated else None, **options)


def fit(callbacks, epochs, rate=0.1):
    plain = model()
    plain.compile(keras.optimizers.SGD(rate), LOSS, metrics=["accuracy"], run_eagerly=True)
    plain.fit(
        batches(),
        epochs=epochs,
        validation_data=batches(),
        callbacks=callbacks,
        verbose=0,
    )
    return plain


class Recorder(of_keras.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.logs = {}

    def record(self, hook, *arguments):
        *numbers, logs = arguments
        self.calls.append((hook, *numbers))
        self.logs.setdefault(hook, []).append(dict(logs or {}))

    def __getattribute__(self, name):
        if name.startswith("on_") and "batch" not in name:
            return lambda *arguments: self.record(name, *arguments)
        return super().__getattribute__(name)


def test_a_callback_is_called_as_by_fit():
    ours, theirs = Recorder(), Recorder()
    loop = make()
    loop.train_and_evaluate(epochs=2, callbacks=[ours])
    plain = fit([theirs], 2)
    assert ours.calls == theirs.calls
    assert ours.model is loop.step.model
    assert ours.params == {**theirs.params, "steps": 4, "epochs": 2}
    for mine, other in zip(ours.logs["on_epoch_end"], theirs.logs["on_epoch_end"], strict=True):
        assert mine.keys() == {*other, "learning_rate"}
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=1e-5), name
        assert mine["learning_rate"] == pytest.approx(0.1)
    for mine, other in zip(loop.step.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    assert getattr(loop.step.model, "optimizer", None) is None  # as before
    assert not loop.actions and not loop.eval_actions


def test_logs_begin_with_the_epoch():
    ours, theirs = Recorder(), Recorder()
    loop = make(evaluated=False)
    loop.train(epochs=1)
    loop.train(epochs=2, callbacks=ours)
    fit([theirs], 2)
    (logs,) = ours.logs["on_epoch_end"]
    assert ("on_epoch_begin", 1) in ours.calls
    assert logs["loss"] == pytest.approx(theirs.logs["on_epoch_end"][1]["loss"], rel=1e-5)


def test_batches_are_those_at_the_end_of_a_call():
    seen = []
    callback = of_keras.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(("begin", batch)),
        on_train_batch_end=lambda batch, logs: seen.append(("end", batch, sorted(logs))),
    )
    make(evaluated=False, steps_per_loop=3).train(epochs=2, callbacks=[callback])
    names = ["accuracy", "learning_rate", "loss"]
    of_epoch = [("begin", 0), ("end", 2, names), ("begin", 3), ("end", 3, names)]
    assert seen == of_epoch * 2


@pytest.mark.slow
def test_early_stopping_ends_at_the_epoch_of_fit():
    options = {"monitor": "val_loss", "patience": 2, "min_delta": 0.05, "verbose": 0}
    ours = of_keras.EarlyStopping(**options, restore_best_weights=True)
    theirs = of_keras.EarlyStopping(**options, restore_best_weights=True)
    loop = make()
    loop.train_and_evaluate(epochs=20, callbacks=[ours])
    plain = fit([theirs], 20)
    assert loop.stopped and ours.stopped_epoch == theirs.stopped_epoch > 1
    assert loop.global_step == 4 * (ours.stopped_epoch + 1)
    for mine, other in zip(loop.step.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_which_weights_the_model_has_at_the_end_is_said(capsys):
    """Keras gives it the best ones after the last evaluation."""
    stops = of_keras.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    loop = make(rate=3.0)
    results = loop.train_and_evaluate(epochs=20, callbacks=[stops], progress=True)
    best, last = 4 * (stops.best_epoch + 1), loop.global_step
    assert best < last
    shown = " ".join(capsys.readouterr().out.split())
    assert f"EarlyStopping ended the training at step {last}" in shown
    assert (
        f"EarlyStopping gave the model the weights of step {best}, the best; optimizer and "
        f"checkpoints are those of step {last}"
    ) in shown
    assert results == loop.history.evaluations[best] != loop.history.evaluations[last]
    assert loop.evaluate()["loss"] == pytest.approx(results["loss"], rel=1e-6)


def test_nothing_is_said_of_weights_that_are_the_last(capsys):
    keeps = of_keras.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    loop = make()
    results = loop.train_and_evaluate(epochs=2, callbacks=[keeps], progress=True)
    assert keeps.best_epoch == 1 and results == loop.history.evaluations[8]
    assert "gave the model" not in capsys.readouterr().out


@pytest.mark.slow
def test_rates_are_those_of_fit():
    def made():
        plateau = of_keras.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=0.03)
        rates = []
        record = of_keras.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(logs["learning_rate"])
        )
        return rates, [plateau, record]

    (rates, ours), (expected, theirs) = made(), made()
    loop = make(0.5)
    loop.train_and_evaluate(epochs=6, callbacks=ours)
    plain = fit(theirs, 6, 0.5)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert len(set(expected)) > 2
    for mine, other in zip(loop.step.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_a_rate_by_epoch_is_that_of_fit():
    def made():
        return [of_keras.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))]

    loop = make()
    loop.train(epochs=3, callbacks=made())
    plain = fit(made(), 3)
    for mine, other in zip(loop.step.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_files(tmp_path):
    loop = make()
    loop.train_and_evaluate(
        epochs=3,
        callbacks=[
            of_keras.CSVLogger(tmp_path / "log.csv"),
            of_keras.TensorBoard(tmp_path / "board"),
            of_keras.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True),
            of_keras.ModelCheckpoint(
                tmp_path / "{epoch}-{val_accuracy:.2f}.weights.h5", save_weights_only=True
            ),
        ],
    )
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"} < rows[0].keys()
    losses = [results["loss"] for results in loop.history.evaluations.values()]
    np.testing.assert_allclose([float(row["val_loss"]) for row in rows], losses, rtol=1e-6)
    assert {path.name for path in (tmp_path / "board").iterdir()} == {"train", "validation"}
    assert len([*tmp_path.glob("*.weights.h5")]) == 3
    best = keras.models.load_model(tmp_path / "best.keras")
    ours = ctl.Evaluator(ctl.EvalStep(best, LOSS), batches()).run()
    assert ours["loss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_resume_begins_with_its_epoch(tmp_path):
    loop = make(checkpoints=tmp_path)
    loop.train_and_evaluate(6, evaluate_every=6)
    loop.checkpoints.close()
    again, recorder = make(checkpoints=tmp_path), Recorder()
    again.restore()
    again.train_and_evaluate(epochs=3, evaluate_every=6, callbacks=[recorder])
    epochs = [call for call in recorder.calls if "epoch" in call[0]]
    assert epochs == [(f"on_epoch_{at}", epoch) for epoch in (1, 2) for at in ("begin", "end")]
    one, two = recorder.logs["on_epoch_end"]
    assert "val_loss" not in one and "val_loss" in two  # evaluated at 12
    assert recorder.calls[0] == ("on_train_begin",) and recorder.calls[-1] == ("on_train_end",)


def halved(loop, at):
    """Whenever it is called for an epoch, or a step, ``at`` or earlier."""

    def halve(when, logs):
        if when <= at:
            rate = loop.step.updater.groups[0].optimizer.learning_rate
            rate.assign(rate / 2)

    return halve


def nothing(loop, at):
    return lambda when, logs: None


def changed_weights(loop, at):
    def shrink(when, logs):
        kernel = loop.step.model.layers[0].kernel
        kernel.assign(kernel * 0.9)

    return shrink


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "evaluated", "writes"),
    [
        (halved, True, 5),  # of 3 epochs, of which two change something
        (halved, False, 1),
        (changed_weights, True, 6),
        (nothing, True, 3),
        (None, True, 4),  # ReduceLROnPlateau
    ],
)
def test_a_resume_has_what_callbacks_have_changed(tmp_path, monkeypatch, change, evaluated, writes):
    written = []
    write = bundle.write
    monkeypatch.setattr(bundle, "write", lambda *a: written.append(1) or write(*a))

    def trained(directory, epochs):
        loop = make(0.5, evaluated, checkpoints=directory)
        loop.restore()
        end = change and of_keras.LambdaCallback(on_epoch_end=change(loop, at=1))
        once = of_keras.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=10, min_lr=0.25)
        run = loop.train_and_evaluate if evaluated else loop.train
        run(epochs=epochs, callbacks=[end or once])
        loop.checkpoints.close()
        return loop

    straight = trained(tmp_path / "straight", 3)
    assert len(written) == writes
    if change is nothing:
        return
    trained(tmp_path / "run", 2)
    resumed = trained(tmp_path / "run", 3)
    for group, variables in resumed.step.state().items():
        for one, other in zip(variables, straight.step.state()[group], strict=True):
            np.testing.assert_array_equal(one, other)
    if evaluated:
        saved = ctl.CheckpointManager(tmp_path / "run", read_only=True).latest()
        assert saved.metrics == resumed.history.evaluations[12] and saved.evaluated


def test_a_resume_has_what_evaluation_actions_have_changed(tmp_path):
    loop = make(checkpoints=tmp_path)
    loop.eval_actions.append(halved(loop, at=8))
    loop.train_and_evaluate(epochs=1)
    loop.checkpoints.close()
    again = make(checkpoints=tmp_path)
    again.restore()
    assert again.step.updater.groups[0].optimizer.learning_rate.numpy() == np.float32(0.05)


def test_without_a_known_epoch_an_evaluation_ends_one():
    recorder, data = Recorder(), batches().repeat()
    trained = model()
    evaluator = ctl.Evaluator(ctl.EvalStep(trained, LOSS), batches())
    loop = ctl.Loop(ctl.TrainStep(trained, "sgd", LOSS), data, evaluator=evaluator)
    loop.train_and_evaluate(10, evaluate_every=5, callbacks=[recorder])
    assert [call for call in recorder.calls if call[0] == "on_epoch_end"] == [
        ("on_epoch_end", 0),
        ("on_epoch_end", 1),
    ]
    assert all("val_loss" in logs for logs in recorder.logs["on_epoch_end"])
    loop.train(13, callbacks=[recorder])
    assert recorder.calls[-2:] == [("on_epoch_end", 4), ("on_train_end",)]


def test_a_stop_in_an_epoch_ends_it():
    class Stops(Recorder):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    stops = Stops()
    loop = make(steps_per_loop=1)
    loop.train_and_evaluate(epochs=3, callbacks=[stops])
    assert loop.stopped and loop.global_step == 2
    assert stops.calls[-2:] == [("on_epoch_end", 0), ("on_train_end",)]
    assert "val_loss" in stops.logs["on_epoch_end"][0]
    loop.stopped = False
    loop.train(epochs=2, callbacks=[Recorder()])  # a new training, as a second fit
    assert loop.global_step == 8


def test_replicas(mirrored):
    with mirrored(2).scope():
        trained = model()
        step = ctl.TrainStep(trained, keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    loop = ctl.Loop(step, batches(), strategy=mirrored(2))
    recorder, rate = Recorder(), of_keras.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    loop.train(epochs=2, callbacks=[recorder, rate])
    plain = Recorder()
    one = make(evaluated=False)
    one.train(epochs=2, callbacks=[plain, rate])
    for mine, other in zip(*(r.logs["on_epoch_end"] for r in (recorder, plain)), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    ("callback", "options", "says"),
    [
        (of_keras.BackupAndRestore("x"), {}, r"^BackupAndRestore is not .*loop.restore\(\)$"),
        (of_keras.SwapEMAWeights(), {}, "^SwapEMAWeights is not used with ctl: .*ema_decay"),
        (print, {}, "^callbacks must be a list of keras.callbacks.Callback objects, not of <bu"),
        (
            of_keras.ReduceLROnPlateau(),
            {"schedule": ctl.schedule.Constant(0.1)},
            "^ReduceLROnPlateau sets the learning rate .*, and the loop has a schedule: leave",
        ),
    ],
)
def test_what_is_refused(callback, options, says):
    loop = make(evaluated=False, **options)
    with pytest.raises(UsageError, match=says):
        loop.train(epochs=1, callbacks=[callback])
    assert loop.global_step == 0 and not loop.actions


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (of_keras.EarlyStopping("val_acc"), "EarlyStopping 'val_acc': did you mean 'val_accuracy'"),
        (of_keras.EarlyStopping("val_acc", mode="max"), "EarlyStopping 'val_acc': did you mean"),
        (of_keras.EarlyStopping("acc", mode="max"), "EarlyStopping 'acc': the choices are loss, a"),
        (
            of_keras.ModelCheckpoint("x.keras", monitor="val_acc", save_best_only=True),
            "ModelCheckpoint 'val_acc': did you mean 'val_accuracy'. the choices are loss, .*val_l",
        ),
    ],
)
def test_a_monitored_name_that_no_log_will_have_is_refused(callback, says):
    loop = make()
    with pytest.raises(UsageError, match=f"^unknown monitor of {says}"):
        loop.train_and_evaluate(epochs=1, callbacks=[callback])
    assert loop.global_step == 0 and not loop.actions


def test_a_loop_without_evaluator_logs_nothing_as_val():
    loop = make()
    loop.evaluator = None
    says = (
        "'val_los': the choices are loss, .*; names with val_ need Loop.evaluator=…. and train_and"
    )
    with pytest.raises(UsageError, match=says):
        loop.train(4, callbacks=[of_keras.EarlyStopping("val_los")])


def test_a_callback_may_monitor_what_one_before_it_has_added(tmp_path):
    """And a `ModelCheckpoint` of all epochs monitors nothing."""
    adds = of_keras.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(val_f1=-epoch))
    stopping = of_keras.EarlyStopping("val_f1", mode="max", patience=1)
    every = of_keras.ModelCheckpoint(tmp_path / "x.keras", monitor="val_acc", mode="max")
    loop = make()
    loop.train_and_evaluate(epochs=4, callbacks=[every, adds, stopping])
    assert stopping.stopped_epoch == 1 and loop.stopped


def test_the_learning_rate_may_be_monitored():
    loop = make()
    loop.train(epochs=1, callbacks=[of_keras.EarlyStopping("learning_rate", mode="min")])
    assert loop.global_step == 4


@pytest.mark.parametrize(
    ("metric", "monitor", "mode"),
    [
        ("accuracy", "val_accuracy", "max"),
        (functools.partial(keras.metrics.AUC, name="auc"), "auc", "max"),
        (keras.metrics.MeanAbsoluteError, "val_mean_absolute_error", "min"),
        (None, "val_loss", "min"),
        ("mean_squared_error", "val_mean_squared_error", "min"),
        (lambda: keras.metrics.MeanMetricWrapper(lambda y, p: y, "mine"), "val_mine", None),
    ],
)
def test_the_mode_of_what_is_monitored_is_that_of_its_metric(metric, monitor, mode):
    callback = of_keras.EarlyStopping(monitor=monitor, patience=9)
    given = [] if metric is None else [metric if isinstance(metric, str) else metric()]
    trained = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, "sigmoid")])
    labels = (Y > 0).astype("float32")
    of_evaluation = monitor.startswith("val_")
    trains, evaluates = ([], given) if of_evaluation else (given, [])
    step = ctl.TrainStep(trained, "sgd", "binary_crossentropy", metrics=trains)
    evaluates = ctl.EvalStep(trained, "binary_crossentropy", metrics=evaluates)
    evaluator = ctl.Evaluator(evaluates, (X, labels))
    loop = ctl.Loop(step, (X, labels), global_batch_size=8, evaluator=evaluator)
    if mode is None:
        with pytest.raises(UsageError, match=f"^EarlyStopping monitors {monitor}: give mode='max'"):
            loop.train(2, callbacks=[callback])
        return
    loop.train(2, callbacks=[callback])
    assert callback.mode == mode


def test_early_stopping_without_a_mode_is_that_of_fit():
    ours, theirs = (
        of_keras.EarlyStopping("val_accuracy", patience=1, restore_best_weights=True)
        for _ in range(2)
    )
    loop = make(rate=3.0)
    loop.train_and_evaluate(epochs=12, callbacks=[ours])
    plain = fit([theirs], 12, rate=3.0)
    assert 0 < ours.stopped_epoch == theirs.stopped_epoch
    for mine, other in zip(loop.step.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
