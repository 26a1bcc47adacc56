"""What is changed after the first trace takes effect, or is refused."""

from __future__ import annotations

import dataclasses
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import examples, make_loop, mlp, network, sgd

from ctl.base.actions import Every
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.phases.losses import cross_entropy
from ctl.schedule import Constant
from ctl.step import TrainStep


@dataclasses.dataclass
class Config:
    temperature: float = 1.0


class Tempered(TrainStep):
    """Python values of a user's own, of several kinds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = 1.0
        self.table = {"temperature": 1.0}
        self.weights = [1.0, 1.0]
        self.many = [1.0] * 100
        self.skipped = {"conv1"}
        self.config = Config()
        self.space = types.SimpleNamespace(temperature=1.0)
        self.array = np.float32(1.0)

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        scale = self.temperature * self.table["temperature"] * self.weights[1]
        scale *= self.config.temperature * self.space.temperature * self.array
        return losses * scale, outputs


def sets(path: str, value):
    """A change of an attribute, a path with dots, to ``value`` or to what it makes."""
    *owners, name = path.split(".")

    def change(owner):
        made = value() if isinstance(value, type | types.FunctionType) else value
        setattr(functools.reduce(getattr, owners, owner), name, made)

    return change


CHANGES = {
    "clip_norm": sets("clip_norm", 1e-3),
    "loss_fn": sets("loss_fn", lambda: lambda *a: 0.1 * cross_entropy(*a)),
    "own number": sets("temperature", 0.1),
    "own dict": lambda step: step.table.update(temperature=0.1),
    "own list": lambda step: step.weights.__setitem__(1, 0.1),
    "own dict that grows": lambda step: step.table.update(temperature=0.1, other=1.0),
    "own dict that shrinks": lambda step: step.table.clear(),
    "own list that grows": lambda step: step.weights.append(0.1),
    "own long list": lambda step: step.many.__setitem__(3, 0.1),
    "own set": lambda step: step.skipped.add("conv2"),
    "own dataclass": sets("config.temperature", 0.1),
    "own namespace": sets("space.temperature", 0.1),
    "own array": sets("array", np.float32(0.1)),
    "own method": sets("clip", lambda: lambda gs: [0.1 * g for g in gs]),
    "weight_decay": sets("optimizer.weight_decay", 0.9),
    "momentum": sets("optimizer.momentum", 0.1),
    "a layer": lambda step: setattr(step.model.layers[0], "rate", 0.9),
}


def with_dropout():
    return network(keras.layers.Dropout(0.1, seed=1))


def make(strategy=None, **options):
    optimizer = sgd(momentum=0.9, weight_decay=0.01)
    options = {"model": with_dropout, "clip_norm": 10.0, **options}
    return make_loop(strategy, step_class=Tempered, optimizer=optimizer, seed=0, **options)


def third_step(change=None, strategy=None, **options):
    """The weights after three steps, when ``change`` was made after two; and the loop."""
    loop = make(strategy, **options)
    loop.train(2)
    if change:
        change(loop.step)
    loop.train(3)
    return weights(loop), loop


@pytest.fixture(scope="module")
def unchanged():
    return third_step()[0]


def weights(loop):
    return np.concatenate([v.numpy().ravel() for v in loop.step.model.trainable_variables])


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name):
    step = make().step
    keys = [step.trace_key, step.trace_key]
    CHANGES[name](step)
    keys += [step.trace_key, step.trace_key]
    assert [key.version for key in keys] == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_norm", "own number", "weight_decay", "a layer"])
def test_a_change_takes_effect(name, unchanged):
    """On the graph of before, the step would train as if nothing had been changed."""
    changed, loop = third_step(CHANGES[name])
    assert loop.steps.run.experimental_get_tracing_count() == 2
    assert np.abs(unchanged - changed).max() > 1e-4


def test_earlier_values_find_their_trace():
    """Of any kind that is compared by value, and several at once; a later version has its own."""
    step = make().step
    values = (1.0, {"conv1"}), (0.1, {"conv1"}), (0.1, {"conv2"}), (1.0, {"conv2"})
    versions = []
    for number in (0, 1, 2, 1, 0, 3, 2, 0, 1):
        step.temperature, step.skipped = values[number][0], {*values[number][1]}
        versions.append(step.trace_key.version)
    assert versions == [0, 1, 2, 1, 0, 3, 2, 0, 1]


@pytest.mark.parametrize("name", ["loss_fn", "own array", "own method"])
def test_an_object_that_comes_back_is_traced_again(name):
    """It may be another inside, which is not compared."""
    step = make().step
    array, method, loss_fn = step.array, step.clip, step.loss_fn
    CHANGES[name](step)
    assert step.trace_key.version == 1
    step.temperature = 0.1
    assert step.trace_key.version == 2
    step.array, step.clip, step.loss_fn = array, method, loss_fn
    step.temperature = 1.0
    assert step.trace_key.version == 3


@pytest.mark.slow
def test_a_known_trace_trains_as_a_new_one():
    loops = [make(steps_per_loop=1) for _ in range(2)]
    for number, scale in enumerate((1.0, 0.1, 1.0), 1):
        for loop in loops:
            loop.step.temperature = scale
        loops[1].step.array = np.float32(1.0)  # no trace is found again
        for loop in loops:
            loop.train(number, total=9)
    assert [loop.steps.run.experimental_get_tracing_count() for loop in loops] == [2, 3]
    np.testing.assert_array_equal(*map(weights, loops))


@pytest.mark.slow
def test_a_change_takes_effect_in_what_xla_compiles(mirrored):
    """Forward and backward of several replicas are a function with traces of its own."""
    data = InMemory(examples(96), global_batch_size=16)
    options = {"strategy": mirrored(2), "jit_compile": True, "data": data}
    straight, _ = third_step(**options)
    changed, _ = third_step(CHANGES["own number"], **options)
    assert np.abs(straight - changed).max() > 1e-4


def test_an_action_may_change_a_setting():
    """The next call has it, not the next `train`."""
    loop = make_loop(step_class=Tempered, optimizer=sgd())

    def freeze(status):
        loop.step.temperature = 0.0

    loop.actions.append(Every(freeze, steps=2))
    loop.train(1)
    loop.train(2, total=9)
    before = weights(loop)
    loop.train(4, total=9)
    np.testing.assert_array_equal(weights(loop), before)


def test_a_change_of_the_evaluation_step_takes_effect():
    loop = make_loop(evaluate=20)
    before = loop.evaluate()["loss"]
    loop.evaluator.step.loss_fn = lambda *a: 2.0 * cross_entropy(*a)
    assert loop.evaluate()["loss"] == pytest.approx(2 * before)


def other_data():
    return InMemory(examples(64), global_batch_size=16)


REFUSED = {
    "Tempered.accumulate_steps was changed from 1 to 2": sets("step.accumulate_steps", 2),
    "Tempered.ema_decay was changed from None": sets("step.ema_decay", 0.9),
    "Tempered.on_nan was changed from 'stop'": sets("step.on_nan", "skip"),
    "Tempered.loss_scale": sets("step.loss_scale", True),
    "Tempered.jit_update": sets("step.jit_update", False),
    "Tempered.optimizer was changed from a SGD to a Adam": sets(
        "step.optimizer", keras.optimizers.Adam
    ),
    "Tempered.model was changed": sets("step.model", mlp),
    "Tempered.teacher was changed from None to a Sequential": sets("step.teacher", mlp),
    "Tempered.metrics": lambda loop: loop.step.metrics.append(keras.metrics.Mean()),
    "optimizer.nesterov was changed from False": sets("step.optimizer.nesterov", True),
    "optimizer.clipnorm was changed from None to 1.0": sets("step.optimizer.clipnorm", 1.0),
    "optimizer.momentum was changed from 0.9 to 0.0": sets("step.optimizer.momentum", 0.0),
    "updater.groups": sets("step.updater.groups", list),
    "the dataset of the loop": sets("dataset", other_data),
    "the dataset of the loop has": sets("steps.dataset", other_data),
    "the step of the loop": sets("step", lambda: make().step),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_change_without_effect_is_refused(message):
    loop = make()
    REFUSED[message](loop)
    with pytest.raises(UsageError, match=message) as error:
        loop.train(3)
    assert "\n" not in str(error.value)


def test_a_learning_rate_beside_a_schedule_is_refused(tmp_path, mirrored):
    loop = make_loop(mirrored(2), schedule=Constant(0.1), directory=tmp_path)
    loop.train(2)
    loop.save(wait=True)
    loop.step.optimizer.learning_rate = 0.5
    with pytest.raises(UsageError, match="optimizer.learning_rate was set to 0.5"):
        loop.train(3)
    loop.restore()
    loop.train(3)
    loop.checkpoints.close()


def test_a_learning_rate_without_a_schedule_takes_effect():
    loop = make_loop(optimizer=sgd())
    loop.train(2)
    before = weights(loop)
    loop.step.optimizer.learning_rate = 0.0
    loop.train(3)
    np.testing.assert_array_equal(weights(loop), before)
    assert loop.steps.run.experimental_get_tracing_count() == 1


class Halves(keras.optimizers.schedules.LearningRateSchedule):
    """Has no config, as many of the users' have none."""

    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start * 0.5 ** tf.cast(step, tf.float32)


def decaying(rate):
    return keras.optimizers.schedules.ExponentialDecay(rate, 1, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("made", [decaying, Halves])
def test_a_schedule_of_the_optimizer_may_be_exchanged(made):
    """Or changed; one that is equal is not traced again."""
    changes = {
        1: lambda o: setattr(o, "learning_rate", made(0.1)),
        2: lambda o: setattr(o, "learning_rate", made(0.0)),
        3: lambda o: vars(o._learning_rate).update(start=0.0, initial_learning_rate=0.0),
    }
    for number, change in changes.items():
        loop = make_loop(optimizer=lambda: keras.optimizers.SGD(made(0.1)))
        loop.train(2)
        before = weights(loop)
        change(loop.step.optimizer)
        loop.train(3)
        assert loop.steps.run.experimental_get_tracing_count() == min(number, 2)
        assert (np.abs(weights(loop) - before).max() > 1e-4) == (number == 1)


@pytest.mark.parametrize("schedule", [None, Constant(0.1)])
def test_a_schedule_in_place_of_a_rate_is_refused(tmp_path, schedule):
    """Keras drops the variable of the rate. What is saved then fits the same program."""
    loop = make_loop(optimizer=sgd(), schedule=schedule, directory=tmp_path)
    loop.train(2)
    loop.step.optimizer.learning_rate = decaying(0.1)
    words = "optimizer.learning_rate was changed from a number to a ExponentialDecay, which would"
    with pytest.raises(UsageError, match=words):
        loop.train(3)
    loop.save(wait=True)
    loop.checkpoints.close()
    again = make_loop(optimizer=sgd(), schedule=schedule, directory=tmp_path)
    assert again.restore().step == 2
    again.train(3)
    again.checkpoints.close()


def test_an_exchanged_schedule_beside_one_of_the_loop_is_refused():
    loop = make_loop(optimizer=lambda: keras.optimizers.SGD(decaying(0.1)), schedule=Constant(0.1))
    loop.train(2)
    loop.step.optimizer.learning_rate = decaying(0.2)
    with pytest.raises(UsageError, match="from a ExponentialDecay to a ExponentialDecay, which"):
        loop.train(3)


class Counting(TrainStep):
    """Changes attributes of its own while it is traced, and while it runs."""

    traced = ran = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
        self.record = []

    def loss(self, batch):
        self.traced += 1
        self.seen = [self.traced]
        self.last = losses, outputs = super().loss(batch)
        tf.py_function(self.note, [], [])
        return losses, outputs

    def note(self):
        self.ran += 1


@pytest.mark.slow
def test_what_a_step_changes_itself_hides_no_earlier_trace():
    """But what the user has set since does."""
    loop = make_loop(step_class=Counting, steps_per_loop=1)
    for number, norm in enumerate((None, 1.0, None, 1.0), 1):
        loop.step.clip_norm = norm
        loop.train(number, total=9)
    assert loop.steps.run.experimental_get_tracing_count() == 2
    loop.step.clip_norm, loop.step.traced = None, 7
    loop.train(5, total=9)
    assert loop.steps.run.experimental_get_tracing_count() == 3


def test_what_a_step_changes_itself_is_not_traced_again():
    """It would be traced in each call, for ever."""
    loop = make_loop(step_class=Counting, steps_per_loop=2)
    loop.actions.append(lambda status: loop.step.record.append(status.step))
    loop.plan()
    loop.train(8)
    loop.train(10)
    assert loop.steps.run.experimental_get_tracing_count() == 1
    assert loop.step.ran == 10
    assert loop.step.record == [2, 4, 6, 8, 10]
