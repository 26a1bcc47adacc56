"""The loop: when Python wakes and what is called then, strategies, data, memory, the hot path.

`test_loop_*.py` have the rest: evaluation, failures, resuming, signals, stopping.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import traceback
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, largest_difference, make_loop, mlp
from pretended import Pretend

import ctl.loop
from ctl.base.actions import Every
from ctl.control.pace import Pace
from ctl.data import GlobalBatches, InMemory
from ctl.distributed.cluster import elastic
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.step import TrainStep

EVALUATED = 51  # three batches of 16 and one of 3


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


@pytest.fixture(scope="module")
def idle():
    """A loop for tests that pretend its steps."""
    return make_loop()


PERIODS = [(1,), (10,), (4, 6), (7, 10, 15), (100, 3), (1000,)]


@pytest.mark.parametrize(
    ("periods", "steps_per_loop", "start"),
    [
        (periods, steps_per_loop, (0, 13)[(i + j) % 2])
        for i, periods in enumerate(PERIODS)
        for j, steps_per_loop in enumerate([None, 1, 7])
    ],
    ids=str,
)
def test_actions_are_called_at_the_steps_due(idle, monkeypatch, periods, steps_per_loop, start):
    until = 47
    fired = {period: [] for period in periods}

    def note(period):
        return lambda status: fired[period].append((status.step, status.final))

    idle.actions = [Every(note(p), steps=p) for p in periods]
    idle._pace = Pace(steps_per_loop)
    steps = Pretend(idle, monkeypatch)
    idle.step.global_step.assign(start)
    idle.train(until)
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


@pytest.mark.slow
def test_weights_loaded_into_a_loop_are_those_it_begins_with():
    """Averages and slots that begin as the weights, too: ScheduleFreeAdamW would forget them."""
    kind = getattr(keras.optimizers, "ScheduleFreeAdamW", keras.optimizers.Adam)
    options = {"optimizer": lambda: kind(0.01), "ema_decay": 0.5, "evaluate": 32}
    first, second = make_loop(seed=0, **options), make_loop(seed=1, **options)
    weights = first.step.model.get_weights()
    want = first.evaluate()
    second.step.model.set_weights(weights)
    assert second.evaluate() == want
    second.step.model.set_weights([w + 1.0 for w in weights])
    assert second.evaluate() != want
    second.step.model.set_weights(weights)
    for loop in (first, second):
        loop.train(2)
    np.testing.assert_equal(second.step.model.get_weights(), first.step.model.get_weights())
    assert second.evaluate() == first.evaluate()


def test_batches_of_any_form_with_partial_ones(mirrored):
    """A dict from a user's own tf.data, whose last batch has 5 examples, on two loops."""

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
    for replicas in (1, 4):
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
    assert largest_difference(*weights) <= 1e-6
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
def test_the_calls_that_lead_from_train_to_the_collective(mirrored, monkeypatch, replicas):
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
        stacks.append(names[names.index("train") :])  # `hides_frames` is around it
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", spy)
    loop = make_loop(mirrored(replicas) if replicas else tf.distribute.get_strategy())
    loop.train(2)
    path = ["train", "call", "run", "_one_step"]
    path += ["__call__", "reduce", "sum_gradients", "all_reduce"]
    assert stacks == [path] * max(1, replicas)
    drawn = re.findall(r"^( +)(?:\w+\.)*(\w+)  ", ctl.loop.__doc__, re.MULTILINE)
    outer: list[tuple[str, str]] = []
    for indent, name in drawn:
        outer = [*(one for one in outer if one[0] < indent), (indent, name)]
        if name == "all_reduce":
            assert [name for _, name in outer] == path
    assert [name for _, name in outer][5:] == ["apply", "__call__", "_update", "_update_device"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "most", "accumulate", "stream"), [(16, 3, 2, False), (5, 4, 1, True)]
)
def test_an_elastic_job_shares_any_batch(mirrored, monkeypatch, size, most, accumulate, stream):
    """Of 16 examples, three replicas have 6, 6 and 4; of 5, four have 2, 2, 1 and 0."""
    monkeypatch.setenv(elastic.VARIABLE, "-1")
    weights = []
    for replicas in (1, most):
        data = InMemory(examples(100), global_batch_size=size)
        if stream:
            single = tf.data.Dataset.from_tensor_slices(examples(100)).repeat()
            data = GlobalBatches(single.batch(size, drop_remainder=True))
        loop = make_loop(mirrored(replicas), data=data, seed=1, accumulate_steps=accumulate)
        loop.train(12)
        weights.append(loop.step.model.get_weights())
    assert largest_difference(*weights) < 2e-6
