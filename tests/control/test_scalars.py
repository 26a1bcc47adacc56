"""The windows of scalars: those of log records and those of epochs do not cut each other."""

from __future__ import annotations

import io
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import make_loop
from rich.console import Console

import ctl
from ctl.base.actions import Every, Log
from ctl.logs.progress import Progress

SIZE = 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 4)).astype("float32")  # batches of 8, 8, 8 and 6
Y = RANDOM.integers(0, 3, 30)
LOSS = "sparse_categorical_crossentropy"
STEPS = 4  # per epoch


class Logs(ctl.TrainStep):
    """Logs the first feature in all ways."""

    def loss(self, batch):
        first = batch[0][:, 0]
        self.log("mean", first)
        self.log("sum", first, reduce="sum")
        self.log("max", first, reduce="max")
        self.log("last", tf.cast(self.global_step, tf.float32), reduce="last")
        return super().loss(batch)


def made(rate=0.0):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([4]), keras.layers.Dense(3, "softmax")]
    return keras.Sequential(layers), keras.optimizers.SGD(rate)


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)


def loop_of(strategy=None, rate=0.0, step=Logs, metrics=None, **options):
    """Nothing is learnt, so what a window must have can be computed."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model, optimizer = made(rate)
        metrics = metrics or ["accuracy", keras.metrics.SparseCategoricalCrossentropy("entropy")]
        trained = step(model, optimizer, LOSS, metrics=metrics)
        of_evaluation = ctl.EvalStep(model, LOSS, ["accuracy"])
    evaluator = ctl.Evaluator(of_evaluation, batches(), strategy=strategy)
    return ctl.Loop(trained, batches(), strategy=strategy, evaluator=evaluator, **options)


def expected(start, stop):
    """Of the steps from ``start`` to ``stop``."""
    model, _ = made()
    starts = [step % STEPS * SIZE for step in range(start, stop)]
    x, y = (np.concatenate([each[at : at + SIZE] for at in starts]) for each in (X, Y))
    outputs = np.asarray(model(x), np.float64)
    entropy = -np.log(outputs[np.arange(len(y)), y]).mean()
    return {
        "loss": entropy,
        "entropy": entropy,
        "accuracy": (outputs.argmax(1) == y).mean(),
        "mean": x[:, 0].mean(),
        "sum": x[:, 0].sum(),
        "max": x[:, 0].max(),
        "last": stop - 1,
    }


def check(scalars, start, stop):
    for name, value in expected(start, stop).items():
        assert scalars[name] == pytest.approx(value, rel=1e-5), (name, start, stop)


class Records(list):
    def write(self, record):
        self.append(dict(record))

    def close(self):
        pass


class Bar(list):
    """What a bar of progress is given."""

    def __call__(self, status):
        self.append((status.step, status.scalars()))

    def evaluated(self, *_):
        pass


class Epochs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "replicas"), [(1, 1), (3, 2), (4, 1), (7, 2)])
def test_records_and_epochs_do_not_cut_each_other(mirrored, every, replicas):
    records, epochs, bar = Records(), Epochs(), Bar()
    loop = loop_of(
        mirrored(replicas) if replicas > 1 else None,
        actions=[Every(Log(records), steps=every)],
        steps_per_loop=2,
    )
    loop._bars.append(bar)
    last = loop.train(epochs=3, callbacks=[epochs])
    ends = [*range(every, 12, every), 12]
    assert [record["step"] for record in records] == ends
    for record, start in zip(records, [0, *ends], strict=False):
        check(record, start, record["step"])
    assert len(epochs.logs) == 3
    for number, logs in enumerate(epochs.logs):
        check(logs, 4 * number, 4 * number + 4)
    check(last, 8, 12)
    for step, scalars in bar:
        check(scalars, (step - 1) // 4 * 4, step)
    assert loop.history.epochs.keys() == epochs.logs[0].keys()
    for name, values in loop.history.epochs.items():
        assert values == [logs[name] for logs in epochs.logs]


def test_epochs_alone(mirrored):
    """The last epoch is what `train` returns; an action of one's own reads the epoch so far."""
    rows = []
    loop = loop_of(
        mirrored(2),
        actions=[lambda status: rows.append((status.step, status.scalars()))],
        steps_per_loop=3,
    )
    last = loop.train(epochs=2)
    check(last, 4, 8)
    assert [step for step, _ in rows] == [3, 4, 7, 8]
    for step, scalars in rows:
        check(scalars, (step - 1) // 4 * 4, step)
    history = loop.history
    assert history.steps == [3, 4, 7, 8]
    assert history.scalars["accuracy"][1::2] == history.epochs["accuracy"]
    assert not [name for name in history.epochs if name.endswith("_per_second")]


def test_epochs_are_those_of_fit():
    """Losses, metrics and evaluations of a training."""
    loop = loop_of(rate=0.5, metrics=["accuracy"], step=ctl.TrainStep)
    results = loop.train_and_evaluate(epochs=3)
    model, optimizer = made(0.5)
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    wanted = model.fit(batches(), epochs=3, validation_data=batches(), verbose=0).history
    epochs = loop.history.epochs
    assert epochs.keys() == {*wanted, "learning_rate"}
    for name, values in wanted.items():
        assert epochs[name] == pytest.approx(values, rel=1e-5), name
    assert epochs["val_loss"][-1] == results["loss"]
    assert epochs["learning_rate"] == pytest.approx([0.5] * 3)


def test_an_epoch_may_end_within_a_batch():
    """Of 6.25 batches."""
    rows, still = [], lambda: keras.optimizers.SGD(0.0)
    make_loop(
        seed=0, optimizer=still, actions=[lambda s: (rows.append(s.scalars()), s.reset())],
        steps_per_loop=1,
    ).train(19)  # fmt: skip
    loop = make_loop(seed=0, optimizer=still)
    loop.train(epochs=3)
    for name in ("loss", "accuracy"):
        each = [row[name] for row in rows]
        wanted = [np.mean(each[:7]), np.mean(each[7:13]), np.mean(each[13:])]
        assert loop.history.epochs[name] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_each_training_has_its_windows():
    loop = loop_of()
    check(loop.train(3), 0, 3)
    check(loop.train(5), 3, 5)
    assert loop.train(6, total=9) == {}
    check(loop.train(9), 5, 9)
    assert loop.history.epochs == {}
    check(loop.train(epochs=3), 9, 12)
    check(loop.train(epochs=4), 12, 16)
    assert len(loop.history.epochs["loss"]) == 2
    log = Records()
    loop.actions.append(Every(Log(log), steps=4))
    check(loop.train(18), 16, 18)
    check(loop.train(22), 20, 22)
    assert [record["step"] for record in log] == [18, 20, 22]


def test_parts_of_a_training_are_parts_of_its_epochs():
    loop = loop_of()
    assert loop.train(epochs=0.75, total=8) == {}
    check(loop.train(epochs=2, total=8), 4, 8)
    columns = loop.history.epochs
    rows = [{name: values[at] for name, values in columns.items()} for at in range(3)]
    for row, (start, stop) in zip(rows, [(0, 3), (3, 4), (4, 8)], strict=True):
        check(row, start, stop)


def test_without_epochs_an_evaluation_ends_one():
    """Also where no epoch of the data ends."""
    loop = loop_of(actions=[Every(Log(Records()), steps=5)])
    loop.train_and_evaluate(9, evaluate_every=3)
    columns = loop.history.epochs
    assert columns["val_loss"] == [each["loss"] for each in loop.history.evaluations.values()]
    for at, start in enumerate((0, 3, 6)):
        check({name: values[at] for name, values in columns.items()}, start, start + 3)


def test_an_epoch_without_an_evaluation_has_no_results_of_one():
    loop = loop_of()
    loop.train_and_evaluate(epochs=3, evaluate_every=8)
    assert {len(values) for values in loop.history.epochs.values()} == {3}  # a table
    accuracy = loop.history.epochs["val_accuracy"]
    assert math.isnan(accuracy[0]) and not math.isnan(accuracy[1] + accuracy[2])
    assert len(loop.history.evaluations) == 2


def test_a_resume_within_an_epoch_begins_with_the_restored_step(tmp_path):
    loop = loop_of(checkpoints=ctl.CheckpointManager(tmp_path))
    loop.train(epochs=1)
    loop.train(6)
    loop.save(wait=True)
    loop.train(epochs=2)
    before = loop.history.epochs
    assert len(before["loss"]) == 2
    loop.restore()
    assert loop.history.epochs == {name: values[:1] for name, values in before.items()}
    check(loop.train(epochs=2), 6, 8)
    loop.checkpoints.close()
    again = loop_of(checkpoints=ctl.CheckpointManager(tmp_path))
    again.restore()
    again.train(epochs=3)
    again.checkpoints.close()
    columns = again.history.epochs
    for at, (start, stop) in enumerate([(6, 8), (8, 12)]):
        check({name: values[at] for name, values in columns.items()}, start, stop)


class Smallest(keras.metrics.Metric):
    """Of the outputs; not a sum."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_weight(shape=(), initializer="ones", name="value")

    def update_state(self, labels, outputs, sample_weight=None):
        self.value.assign(tf.minimum(self.value, tf.reduce_min(outputs)))

    def reset_state(self):
        self.value.assign(1.0)

    def result(self):
        return self.value


@pytest.mark.slow
def test_one_window_takes_a_metric_that_is_no_sum():
    """That of the epochs, that of the records, or both where they end together."""
    outputs = made()[0](X).numpy()
    smallest = [outputs[at : at + SIZE].min() for at in range(0, 30, SIZE)]
    loop = loop_of(metrics=[Smallest()])
    loop.train(epochs=3)
    assert loop.history.epochs["smallest"] == pytest.approx([min(smallest)] * 3)
    records = Records()
    loop = loop_of(metrics=[Smallest()], actions=[Every(Log(records), steps=1)])
    loop.train_and_evaluate(6, evaluate_every=4)
    found = [record["smallest"] for record in records]
    assert found == pytest.approx([*smallest, *smallest[:2]])
    actions, bar = [Every(Log(Records()), steps=2)], Bar()
    loop = loop_of(metrics=[Smallest()], actions=actions, steps_per_loop=1)
    loop._bars.append(bar)
    loop.train_and_evaluate(8, evaluate_every=2)
    wanted = [min(smallest[:2]), min(smallest[2:])] * 2
    assert loop.history.epochs["smallest"] == pytest.approx(wanted)
    shown = [scalars["smallest"] for _, scalars in bar]
    assert shown[::2] == pytest.approx(smallest[::2] * 2)
    assert shown[1::2] == pytest.approx(wanted)


def interrupted(error, **training):
    """A loop whose ``training`` an ``error`` has ended after step 6."""

    def fail(status):
        if status.step == 6:
            loop.actions.clear()
            raise error

    loop = loop_of(steps_per_loop=1)
    loop.actions.append(fail)
    with pytest.raises(error):
        loop.train(**training)
    return loop


def test_a_training_that_was_interrupted_goes_on_with_its_window():
    loop = interrupted(ZeroDivisionError, epochs=3)
    assert loop.watchers == [loop.history]
    check(loop.train(epochs=2), 4, 8)


@pytest.mark.parametrize("first", [{"until": 8}, {"epochs": 3}])
def test_a_training_to_a_step_after_an_interrupted_one_has_its_own_window(first):
    loop = interrupted(KeyboardInterrupt, **first)
    check(loop.train(9), 6, 9)
    check(loop.train(11), 9, 11)


def test_a_bar_of_ones_own_shows_what_the_log_does():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Progress(console=console) as bar:
        loop = loop_of(actions=[Every(Log(bar), steps=3), bar], steps_per_loop=1)
        loop.train(epochs=1)
        assert bar._bar.scalars["accuracy"] == pytest.approx(expected(3, 4)["accuracy"])
