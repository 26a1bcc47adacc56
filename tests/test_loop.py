"""The loop: when Python wakes and what is called then, evaluation, divergence, data, memory.

Resuming is in test_loop_resume.py, signals are in test_loop_signals.py.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import traceback
import types
import weakref
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    accuracy,
    assert_replicas_agree,
    examples,
    largest_difference,
    make_loop,
    mlp,
)

import ctl.loop
from ctl.actions import Every
from ctl.checkpoint import durable
from ctl.data import GlobalBatches, InMemory
from ctl.errors import CheckpointError, DivergedError, UsageError
from ctl.loop import Evaluator, Loop, Outcome
from ctl.step import EvalStep, TrainStep

EVALUATED = 51  # three batches of 16 and one of 3


class Pretend:
    """In place of the compiled steps: each takes this long on a clock of its own. What `Loop` does
    around them is all there is to test, so nothing is traced."""

    def __init__(self, loop, monkeypatch, seconds_per_step=0.01):
        self.calls: list[int] = []
        self.seconds_per_step = seconds_per_step
        self._now = 0.0
        self._global_step = loop.step.global_step
        clock = types.SimpleNamespace(perf_counter=lambda: self._now)
        monkeypatch.setattr("ctl.loop.time", clock)
        loop.steps.run = self

    def __call__(self, feed, steps, report, trace_key):
        steps = int(steps)
        self.calls.append(steps)
        self._now += steps * self.seconds_per_step
        self._global_step.assign_add(steps)
        totals = tf.constant([1.0, float(steps), *report.numpy()])
        return Outcome(totals, tf.constant(steps), feed.position)


# When Python wakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds_per_step", "until", "calls"),
    [
        (1 / 128, 252, [1, 1, 64, 64, 64, 58]),  # half a second in each call
        (1 / 8192, 12_000, [1, 1, 4096, 4096, 3806]),
        (2.0, 4, [1, 1, 1, 1]),
    ],
)
def test_python_wakes_about_every_half_second(monkeypatch, seconds_per_step, until, calls):
    wakes = []
    loop = make_loop(actions=[wakes.append])
    steps = Pretend(loop, monkeypatch, seconds_per_step)
    loop.train(until)
    assert steps.calls == calls
    assert [w.step for w in wakes] == np.cumsum(calls).tolist()
    assert [w.final for w in wakes] == [False] * (len(calls) - 1) + [True]
    assert {w.until for w in wakes} == {until}
    assert {w.steps_per_epoch for w in wakes} == {100 / BATCH}
    assert wakes[-1].seconds_per_step == pytest.approx(seconds_per_step)


def test_the_pace_follows_the_steps(monkeypatch):
    """A slow first call (tracing) is not learned from; steps that become slow are noticed."""
    loop = make_loop()
    steps = Pretend(loop, monkeypatch, seconds_per_step=30.0)
    loop.train(1)
    steps.seconds_per_step = 1 / 128
    loop.train(130)
    steps.seconds_per_step = 1 / 8
    loop.train(202)
    assert steps.calls == [1, 1, 64, 64, 64, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_loop", [None, 1, 7])
@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("periods", [(1,), (10,), (4, 6), (7, 10, 15), (100, 3), (1000,)], ids=str)
def test_actions_are_called_at_the_steps_due(monkeypatch, steps_per_loop, start, periods):
    until = 47
    fired = {period: [] for period in periods}

    def note(period):
        return lambda status: fired[period].append((status.step, status.final))

    loop = make_loop(
        actions=[Every(note(p), steps=p) for p in periods], steps_per_loop=steps_per_loop
    )
    steps = Pretend(loop, monkeypatch)
    loop.step.global_step.assign(start)
    loop.train(until)
    for period in periods:
        due = [s for s in range(start + 1, until + 1) if s % period == 0 or s == until]
        assert fired[period] == [(s, s == until) for s in due]
    if steps_per_loop:
        assert max(steps.calls) <= steps_per_loop
    else:  # no more wakes than there are steps due, but for the two that measure the pace
        due = {
            s for s in range(start + 1, until + 1) if s == until or any(s % p == 0 for p in periods)
        }
        assert len(steps.calls) <= len(due) + 2


def test_what_an_action_raises_comes_out(monkeypatch):
    def fail(status):
        raise ZeroDivisionError("mine")

    loop = make_loop(actions=[Every(fail, steps=5)])
    Pretend(loop, monkeypatch)
    with pytest.raises(ZeroDivisionError, match="mine"):
        loop.train(10)
    assert loop.global_step == 5


def test_a_window_of_scalars_does_not_depend_on_the_calls(mirrored):
    """The mean loss and the accuracy since the last reset, however many calls that took."""
    windows = {}
    for steps_per_loop in (1, 4, 10):
        rows = []

        keras.utils.set_random_seed(1)

        def read(status, rows=rows):
            rows.append(status.scalars())
            status.reset()
            assert status.scalars() is not rows[-1] and status.scalars() == rows[-1]

        loop = make_loop(
            mirrored(2),
            data=InMemory(examples(100), global_batch_size=BATCH),
            actions=[Every(read, steps=10)],
            steps_per_loop=steps_per_loop,
            optimizer=lambda: keras.optimizers.SGD(0.0),
        )
        assert loop.train(20) == rows[-1]
        windows[steps_per_loop] = rows
    for rows in windows.values():
        assert len(rows) == 2 and rows[0]["loss"] != rows[1]["loss"]
        for row, first in zip(rows, windows[1], strict=True):
            assert row["loss"] == pytest.approx(first["loss"], rel=1e-6)
            assert row["accuracy"] == first["accuracy"]
            assert row["learning_rate"] == 0.0
        rate = rows[1]["steps_per_second"]  # the first call is not timed: most of it is tracing
        assert rows[1]["examples_per_second"] == pytest.approx(BATCH * rate)


def test_a_step_that_does_not_advance_is_named():
    class Forgetful(TrainStep):
        def apply(self, gradients, finite=None):
            pass

    with pytest.raises(UsageError, match=r"Forgetful call self.apply\(\)"):
        make_loop(step_class=Forgetful).train(3)


def test_python_of_the_user_decides_on_tensors(mirrored):
    """AutoGraph converts nothing of ctl, but all that ctl calls."""

    def rate(step):
        if step < 2:
            return 0.5
        return 0.25

    class Half(TrainStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            if tf.reduce_sum(losses) > 0:
                losses = losses * 0.0
            return losses, outputs

    loop = make_loop(
        mirrored(2),
        step_class=Half,
        schedule=lambda step: rate(tf.cast(step, tf.int32)),
        optimizer=lambda: keras.optimizers.SGD(1.0),
        steps_per_loop=1,
    )
    before = [v.numpy() for v in loop.step.model.trainable_variables]
    rates = [loop.train(step)["learning_rate"] for step in (1, 2, 3)]
    assert rates == [0.5, 0.5, 0.25], "not those that the steps were made with"
    assert loop.train(4)["loss"] == 0.0
    for variable, value in zip(loop.step.model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


# Training and evaluation -------------------------------------------------------------------------


class Journal:
    """A loop on pretended steps whose evaluations are noted, with what was on the disk then."""

    def __init__(self, directory, monkeypatch, *, fail_at=None, **options):
        self.events: list[tuple] = []
        self.fail_at = fail_at
        self.loop = make_loop(
            directory=directory,
            evaluator=self,
            actions=[lambda s: self.events.append(("train", s.step, s.until, s.final))],
            eval_actions=[lambda step, results: self.events.append(("evaluated", step, results))],
            steps_per_loop=100,
            **options,
        )
        Pretend(self.loop, monkeypatch)

    def run(self, on_wake, asked_to_stop):
        step = self.loop.global_step
        self.loop.checkpoints.wait()
        assert self.loop.checkpoints.latest().step == step, "not saved before the evaluation"
        if step == self.fail_at:
            raise ZeroDivisionError("the evaluation fails")
        if on_wake:
            on_wake(1, 1)
        return {"accuracy": step / 100}

    def go(self, until):
        try:
            return self.loop.train_and_evaluate(until, evaluate_every=10)
        finally:
            self.loop.checkpoints.close()

    def saved(self):
        return {s.step: dict(s.metrics) for s in self.loop.checkpoints.all()}


def test_train_and_evaluate(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    assert run.go(25) == {"accuracy": 0.25}
    assert run.events == [
        ("train", 10, 25, False),
        ("evaluated", 10, {"accuracy": 0.10}),
        ("train", 20, 25, False),
        ("evaluated", 20, {"accuracy": 0.20}),
        ("train", 25, 25, True),
        ("evaluated", 25, {"accuracy": 0.25}),
    ]
    assert run.saved() == {s: {"accuracy": s / 100} for s in (10, 20, 25)}

    again = Journal(tmp_path, monkeypatch)
    again.loop.restore()
    assert again.go(25) == {"accuracy": 0.25}  # finished: as the first time, but nothing is done
    assert again.events == []

    longer = Journal(tmp_path, monkeypatch)
    longer.loop.restore()
    assert longer.go(33) == {"accuracy": 0.33}
    assert [e[:2] for e in longer.events] == [
        ("train", 30),
        ("evaluated", 30),
        ("train", 33),
        ("evaluated", 33),
    ]


@pytest.mark.parametrize("due", [20, 25])
def test_a_resumed_run_makes_up_for_the_evaluation_due(tmp_path, monkeypatch, due):
    run = Journal(tmp_path, monkeypatch, fail_at=due)
    with pytest.raises(ZeroDivisionError):
        run.go(25)
    again = Journal(tmp_path, monkeypatch)
    assert again.loop.restore().step == due
    assert again.go(25) == {"accuracy": 0.25}
    assert again.events[0] == ("evaluated", due, {"accuracy": due / 100})
    assert len(again.events) == (3 if due == 20 else 1)
    assert again.saved() == {s: {"accuracy": s / 100} for s in (10, 20, 25)}


def test_a_run_resumed_between_evaluations_does_not_evaluate_first(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    run.loop.train(13)
    run.loop.save(wait=True)
    run.loop.checkpoints.close()
    again = Journal(tmp_path, monkeypatch)
    again.loop.restore()
    again.go(20)
    assert [e[:2] for e in again.events] == [("train", 20), ("evaluated", 20)]


def test_metrics_that_were_saved_are_no_evaluation(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    run.loop.train(20)
    run.loop.save({"accuracy": 0.9, "note": 1.0}, wait=True)
    run.loop.checkpoints.close()  # the process ends before the evaluation
    for evaluated in ([("evaluated", 20)], []):
        again = Journal(tmp_path, monkeypatch)
        again.loop.restore()
        assert again.go(20) == {"accuracy": 0.2}
        assert [e[:2] for e in again.events] == evaluated
    assert again.saved() == {20: {"accuracy": 0.2, "note": 1.0}}


@pytest.mark.parametrize("count", [20, 23])
def test_data_that_end_are_evaluated_once_more(tmp_path, count):
    """Also where they end at an evaluation, or between two."""

    class Finite(GlobalBatches):
        def __init__(self, dataset):
            super().__init__(dataset, training=False)

    data = tf.data.Dataset.from_tensor_slices(examples(count * BATCH)).batch(BATCH)
    evaluated = []
    loop = make_loop(
        data=Finite(data),
        directory=tmp_path,
        evaluate=EVALUATED,
        eval_actions=[lambda step, results: evaluated.append((step, results))],
    )
    results = loop.train_and_evaluate(100, evaluate_every=10)
    loop.checkpoints.close()
    assert [step for step, _ in evaluated] == sorted({10, 20, count})
    assert results == evaluated[-1][1]
    assert loop.checkpoints.latest().step == count
    assert loop.checkpoints.latest().metrics == results


# Evaluation --------------------------------------------------------------------------------------


def results_of(model) -> dict[str, float]:
    features, labels = examples(EVALUATED, seed=9)
    logits = model(features).numpy()
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return {
        "loss": float(np.mean(losses)),
        "accuracy": float((logits.argmax(axis=1) == labels).mean()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_evaluation_in_the_middle_of_training(mirrored, tmp_path, replicas):
    """With the averaged weights, on every example, with one trace; training goes on untouched."""
    strategy = mirrored(replicas)
    options = {"ema_decay": 0.9, "optimizer": lambda: keras.optimizers.SGD(0.5)}
    keras.utils.set_random_seed(3)
    loop = make_loop(strategy, evaluate=EVALUATED, directory=tmp_path, **options)
    loop.train(5)
    trained = loop.step.model.get_weights()
    averages = [average.numpy() for average in loop.step.updater.ema]
    assert largest_difference(trained, averages) > 1e-2

    for _ in range(2):  # the second goes round with the iterator of the first
        batches = []
        results = loop.evaluate(lambda done, of: batches.append((done, of)))  # noqa: B023
        assert batches[-1] == (4, 4)
        assert_replicas_agree(strategy, loop.step.model.variables)
        np.testing.assert_equal(loop.step.model.get_weights(), trained)
        loop.step.model.set_weights(averages)
        assert results == pytest.approx(results_of(loop.step.model), rel=1e-6)
        loop.step.model.set_weights(trained)
        assert results["loss"] != pytest.approx(results_of(loop.step.model)["loss"], rel=1e-3)

    def fail(done, of):
        raise ZeroDivisionError

    loop.evaluator._pace.steps = lambda: 1  # so that three of four batches are left
    with pytest.raises(ZeroDivisionError):
        loop.evaluate(fail)
    np.testing.assert_equal(loop.step.model.get_weights(), trained)
    assert loop.evaluate() == pytest.approx(results, rel=1e-6)  # from the first batch on again

    loop.save(wait=True)
    loop.train(8)
    at_8 = loop.step.model.get_weights()
    loop.restore()
    np.testing.assert_equal(loop.step.model.get_weights(), trained)
    loop.train(8)
    np.testing.assert_equal(loop.step.model.get_weights(), at_8)
    loop.evaluate()
    loop.checkpoints.close()
    assert loop.steps.run.experimental_get_tracing_count() == 1
    assert loop.evaluator._eval_steps.experimental_get_tracing_count() == 1

    keras.utils.set_random_seed(3)
    alone = make_loop(strategy, **options)
    alone.train(8)
    np.testing.assert_equal(alone.step.model.get_weights(), at_8)


def test_evaluation_of_a_dataset_of_unknown_length(mirrored):
    data = tf.data.Dataset.from_tensor_slices(examples(EVALUATED, seed=9))
    data = data.filter(lambda features, label: True).batch(BATCH)
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        evaluator = Evaluator(EvalStep(model, metrics=[accuracy()]), data, strategy=strategy)
    for _ in range(2):
        batches = []
        results = evaluator.run(lambda done, of: batches.append((done, of)))  # noqa: B023
        assert batches == [(i, None) for i in (1, 2, 3, 4)]
        assert results == pytest.approx(results_of(model), rel=1e-6)
    assert evaluator._eval_steps.experimental_get_tracing_count() == 1


def test_an_evaluation_without_examples_is_an_error():
    data = tf.data.Dataset.from_tensor_slices(examples(BATCH)).batch(BATCH).take(0)
    with pytest.raises(UsageError, match="no valid examples"):
        Evaluator(EvalStep(mlp()), data).run()


# What can go wrong -------------------------------------------------------------------------------


def poisoned(*steps: int) -> tf.data.Dataset:
    """The last example of these batches is NaN: it goes to the last replica."""
    features, labels = examples()
    for step in steps:
        features[step * BATCH - 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH, drop_remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "step"), [(1, 12), (2, 12), (4, 12), (2, 14), (2, 8), (2, 1)])
def test_nan_names_its_step_and_the_last_good_checkpoint(mirrored, tmp_path, replicas, step):
    """In calls of up to 7 steps that end at 7, 10, 14: in the middle, at the end, at the start."""
    saves = Every(lambda status: loop.save(), steps=10)
    loop = make_loop(
        mirrored(replicas),
        data=poisoned(step),
        directory=tmp_path,
        actions=[saves],
        steps_per_loop=7,
    )
    good = tmp_path / "step-0000000010" if step > 10 else "none"
    with pytest.raises(DivergedError) as error:
        loop.train(20)
    assert f"the loss is nan at step {step}; last good checkpoint: {good};" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3
    loop.checkpoints.close()
    assert [s.step for s in loop.checkpoints.all()] == ([10] if step > 10 else [])


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The loss of step 5 is finite, its gradient is not: only the next loss would tell."""

    class NanGradient(TrainStep):
        def backward(self, tape, loss, variables=None):
            bad = tf.where(tf.equal(self.global_step, 4), np.nan, 0.0)
            return [g + bad for g in super().backward(tape, loss, variables)]

    loop = make_loop(step_class=NanGradient, directory=tmp_path)
    loop.train(5)
    with pytest.raises(DivergedError, match="NaN or Inf"):
        loop.save(wait=True)
    loop.checkpoints.close()
    assert loop.checkpoints.all() == []


def test_a_constant_inf_is_saved(tmp_path):
    """A layer of the model adds a mask to its input."""

    class Masked(keras.layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")
            self.mask.assign(np.where(np.arange(shape[-1]), 0.0, -np.inf))

        def call(self, inputs):
            return keras.ops.where(self.mask < 0, 0.0, inputs)

    def masked():
        first, last = mlp().layers
        return keras.Sequential([keras.layers.Input(first.input.shape[1:]), first, Masked(), last])

    loop = make_loop(model=masked, directory=tmp_path)
    with loop.checkpoints as checkpoints:
        loop.train(2)
        loop.save(wait=True)
        loop.train(3)
        bias = loop.step.model.trainable_variables[-1]
        bias.assign(np.full(bias.shape, np.inf))
        with pytest.raises(DivergedError, match="NaN or Inf"):
            loop.save(wait=True)
        assert [saved.step for saved in checkpoints.all()] == [2]


def test_skipping_goes_on_and_counts(mirrored):
    """3 of 20 updates; the mean loss is that of the other 17."""
    strategy = mirrored(2)
    loop = make_loop(strategy, data=poisoned(3, 4, 12), on_nan="skip")
    scalars = loop.train(20)
    assert scalars["skipped_steps"] == int(loop.step.updater.skipped.numpy()) == 3
    assert 0.5 < scalars["loss"] < 5
    assert loop.global_step == 20 and int(loop.step.optimizer.iterations.numpy()) == 17
    assert all(np.isfinite(w).all() for w in loop.step.model.get_weights())
    assert_replicas_agree(strategy, loop.step.model.trainable_variables)


@pytest.mark.parametrize("options", [{"on_nan": "skip"}, {"loss_scale": True}], ids=str)
def test_skipping_without_end_stops(options):
    loop = make_loop(data=poisoned(*range(1, 21)), steps_per_loop=30, **options)
    with pytest.raises(DivergedError, match="the last 120 updates were skipped.*step 120"):
        loop.train(1000)
    assert loop.global_step == 120


def test_a_write_that_fails_in_the_background_stops_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(5, "Input/output error")

    def save(status):
        loop.save()
        futures.wait([loop.checkpoints._pending])  # the failure is there, nobody has looked

    wakes = []
    loop = make_loop(
        directory=tmp_path,
        actions=[Every(save, steps=5), lambda status: wakes.append(status.step)],
        steps_per_loop=1,
    )
    loop.train(4)
    monkeypatch.setattr(durable, "publish", full)
    with pytest.raises(CheckpointError, match="step 5.*Input/output error"):
        loop.train(20)
    assert wakes == [1, 2, 3, 4, 5] and loop.global_step == 6
    loop.checkpoints.close()


@pytest.mark.parametrize("replicas", [2, 4])
def test_batches_that_replicas_cannot_share(mirrored, replicas):
    data = InMemory(examples(100), global_batch_size=15)
    with pytest.raises(UsageError, match=f"15 is not divisible by {replicas} replicas"):
        make_loop(mirrored(replicas), data=data)


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_micro_batches_than_examples(mirrored, replicas):
    with pytest.raises(
        UsageError, match=f"=17, but a replica has {16 // replicas} examples: use {16 // replicas}"
    ):
        make_loop(mirrored(replicas), accumulate_steps=17)


@pytest.mark.parametrize("method", ["save", "restore"])
def test_without_checkpoints_or_evaluator(method):
    loop = make_loop()
    with pytest.raises(UsageError, match=r"no checkpoints: give Loop\(checkpoints"):
        getattr(loop, method)()
    with pytest.raises(UsageError, match=r"no evaluator: give Loop\(evaluator"):
        loop.evaluate()


# Strategies and data -----------------------------------------------------------------------------


def test_no_strategy_equals_one_device():
    """Neither needs the other's words: `Loop(step, dataset).train(n)` is enough."""
    weights = []
    for strategy in (None, tf.distribute.OneDeviceStrategy("/cpu:0")):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else tf.device("/cpu:0"):
            model = mlp()
            step = TrainStep(model, keras.optimizers.Adam(0.01), ema_decay=0.5, clip_norm=0.1)
        loop = Loop(step, InMemory(examples(100), global_batch_size=BATCH), strategy=strategy)
        loop.train(20)
        weights.append(model.get_weights())
    np.testing.assert_equal(weights[0], weights[1])


def test_batches_of_any_form_with_partial_ones(mirrored):
    """A dict from a user's own tf.data, whose last batch has 5 examples, on three loops."""

    class Named(TrainStep):
        def loss(self, batch):
            return super().loss((batch["features"], batch["label"]))

        def count(self, batch):
            return tf.cast(tf.shape(batch["label"])[0], tf.float32)

        def update_metrics(self, batch, outputs):
            super().update_metrics((batch["features"], batch["label"]), outputs)

    features, labels = examples(4 * BATCH + 5)
    data = tf.data.Dataset.from_tensor_slices({"features": features, "label": labels}).batch(BATCH)
    weights, scalars = [], []
    for replicas in (1, 2, 4):
        keras.utils.set_random_seed(1)
        loop = make_loop(
            mirrored(replicas),
            data=data,
            step_class=Named,
            optimizer=lambda: keras.optimizers.SGD(0.1),
        )
        scalars.append(loop.train(10))
        weights.append(loop.step.model.get_weights())
        assert loop.steps.run.experimental_get_tracing_count() == 1
    assert largest_difference(weights[0], weights[1]) <= 1e-6
    assert largest_difference(weights[0], weights[2]) <= 1e-6
    assert len({s["accuracy"] for s in scalars}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_is_freed_without_the_garbage_collector(mirrored, tmp_path, replicas):
    """So that memory and threads of the pipeline go when the loop goes, not at some later step of
    another one."""

    def run():
        loop = make_loop(
            mirrored(replicas),
            evaluate=EVALUATED,
            directory=tmp_path,
            actions=[Every(lambda status: status.scalars(), steps=3)],
            ema_decay=0.9,
        )
        loop.train_and_evaluate(4, evaluate_every=2)
        loop.restore()
        first = weakref.ref(loop.feed.iterator)
        loop.train(6)
        loop.begin(2)
        assert first() is None
        loop.train(8)
        loop.checkpoints.close()
        return [weakref.ref(o) for o in (loop, loop.evaluator, loop.feed.iterator)] + [
            weakref.ref(loop.evaluator._iterator)
        ]

    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in run()] == [None] * 4
    finally:
        gc.enable()


# The hot path -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [0, 2])
def test_seven_calls_lead_from_train_to_the_collective(mirrored, monkeypatch, replicas):
    """Those that the docstring of `ctl.loop` shows. With several replicas, each has a thread."""
    stacks = []
    original = tf.distribute.ReplicaContext.all_reduce

    def spy(self, *args, **kwargs):
        threads = {threading.get_ident(), threading.main_thread().ident}
        names = [
            frame.name.removeprefix("tf__")  # AutoGraph's copy of a function
            for thread in sorted(threads, key=threading.main_thread().ident.__eq__, reverse=True)
            for frame in traceback.extract_stack(sys._current_frames()[thread])
            if "/ctl/" in frame.filename or frame.name.startswith("tf__")
        ]
        stacks.append(names)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", spy)
    loop = make_loop(mirrored(replicas) if replicas else tf.distribute.get_strategy())
    loop.train(2)
    path = ["train", "run", "_one_step", "__call__", "reduce", "sum_gradients", "all_reduce"]
    assert stacks == [path] * max(1, replicas)
    drawn = re.findall(r"^ +(?:\w+\.)*(\w+)  ", ctl.loop.__doc__, re.MULTILINE)
    assert drawn == path
