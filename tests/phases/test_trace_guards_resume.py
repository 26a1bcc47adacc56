"""Python values that were changed while a step trained: a resume has them, or says that it lacks
them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import make_loop, network, sgd

from ctl.base.actions import Every
from ctl.errors import UsageError
from ctl.step import TrainStep

FACTOR = 1.0


class Scaled(TrainStep):
    """Values of several kinds that the loss reads."""

    of_class = 1.0
    shadowed = 1.0

    def __init__(self, *args, rate=1.0, **options):
        super().__init__(*args, **options)
        self.rate = rate
        self.table = {"rate": 1.0}
        self.flags = [True, None]

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        scale = self.rate * self.table["rate"] * self.of_class * self.shadowed * FACTOR
        self.of_call = [scale]  # as a user may cache what a trace has computed
        return losses * (scale if self.flags[0] else 2.0 * scale), outputs


def with_dropout():
    layers = keras.layers
    return network(
        layers.Dropout(0.1, seed=1), layers.Dense(8, "tanh"), layers.Dropout(0.2, seed=2)
    )


def make(directory=None, **options):
    options = {"optimizer": sgd(momentum=0.5), "seed": 0, "steps_per_loop": 1, **options}
    return make_loop(step_class=Scaled, model=with_dropout, directory=directory, **options)


def change(loop):
    step = loop.step
    step.rate *= 0.25
    step.table["rate"] = 0.5
    step.flags[0] = False
    step.clip_norm = 1.0
    step.shadowed = 0.5
    step.optimizer.momentum = 0.75
    step.model.layers[2].rate = 0.3


@pytest.fixture
def of_class(monkeypatch):
    """A class keeps what is set on it, but the program that resumes begins anew."""
    monkeypatch.setattr(Scaled, "of_class", 1.0)
    yield lambda value: monkeypatch.setattr(Scaled, "of_class", value)


@pytest.mark.slow
def test_a_resume_has_what_an_action_changed(tmp_path, of_class):
    def changing(loop):
        def act(status):
            if status.step == 2:
                change(loop)
                Scaled.of_class = 0.5

        loop.actions.append(Every(act, steps=2))
        return loop

    straight = changing(make())
    straight.train(4)
    of_class(1.0)
    first = changing(make(tmp_path))
    first.train(2, total=4)
    first.save(wait=True)
    first.checkpoints.close()
    of_class(1.0)
    resumed = changing(make(tmp_path, seed=1))
    saved = resumed.restore()
    resumed.checkpoints.close()
    assert saved.changed == {
        "Scaled.rate": [1.0, 0.25],
        "Scaled.table": [{"rate": 1.0}, {"rate": 0.5}],
        "Scaled.flags": [[True, None], [False, None]],
        "Scaled.clip_norm": [None, 1.0],
        "Scaled.shadowed": [None, 0.5],
        "class Scaled.of_class": [1.0, 0.5],
        "layer dropout#2.rate": [0.2, 0.3],
        "optimizer.momentum": [0.5, 0.75],
    }
    resumed.train(4)
    for a, b in zip(straight.step.model.weights, resumed.step.model.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_program_that_was_edited_keeps_its_value(tmp_path, caplog):
    """And says so; one that sets what the action did is not warned."""
    first = make(tmp_path)
    first.step.rate = 0.9  # before the first call, it is of the program
    first.train(1, total=9)
    first.step.rate = 0.5
    first.save(wait=True)
    first.checkpoints.close()
    for begins, ends in ((0.9, 0.5), (0.5, 0.5), (0.7, 0.7)):
        resumed = make(tmp_path, rate=begins)
        assert "as the program sets it now" not in caplog.text
        assert resumed.restore().changed == {"Scaled.rate": [0.9, 0.5]}
        assert resumed.step.rate == ends
        resumed.checkpoints.close()
    assert "Scaled.rate is 0.7, as the program sets it now, not 0.5, to which" in caplog.text


@pytest.mark.slow
def test_back_in_the_same_program(tmp_path):
    """What was changed after the checkpoint is as it was before."""
    loop = make(tmp_path)
    loop.train(1, total=9)
    loop.save(wait=True)
    change(loop)
    loop.train(2, total=9)
    loop.restore()
    step = loop.step
    assert (step.rate, step.table, step.flags) == (1.0, {"rate": 1.0}, [True, None])
    assert (step.clip_norm, step.shadowed, step.optimizer.momentum) == (None, 1.0, 0.5)
    assert "shadowed" not in vars(step) and step.model.layers[2].rate == 0.2
    loop.train(2, total=9)
    assert loop.steps.run.experimental_get_tracing_count() == 2
    loop.checkpoints.close()


def change_what_json_lacks(step):
    step.model.layers[1].activation = tf.nn.relu
    step.rate = np.float32(0.5)
    globals().update(FACTOR=0.5)


@pytest.mark.slow
def test_what_cannot_be_saved_must_be_changed_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    first = make(tmp_path)
    first.train(1, total=9)
    change_what_json_lacks(first.step)
    first.save(wait=True)
    first.checkpoints.close()
    names = "Scaled.rate, FACTOR of Scaled.loss, layer dense.activation"
    assert f"cannot hold what {names} was changed to" in caplog.text
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    resumed = make(tmp_path)
    assert resumed.restore().changed == dict.fromkeys(names.split(", "))
    resumed.checkpoints.close()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"{names} was changed before .*: change it again"):
            resumed.train(2)
    change_what_json_lacks(resumed.step)
    resumed.train(2, total=9)


def test_a_resume_may_go_on_without_the_changes(tmp_path):
    first = make(tmp_path)
    first.train(1, total=9)
    change(first)
    first.step.rate = np.float32(0.5)
    first.save(wait=True)
    first.checkpoints.close()
    resumed = make(tmp_path)
    assert resumed.restore(changed=False).step == 1
    resumed.checkpoints.close()
    resumed.train(2, total=9)
    assert (resumed.step.rate, resumed.step.clip_norm) == (1.0, None)


def test_an_older_checkpoint_changes_nothing(tmp_path):
    first = make(tmp_path)
    first.train(1, total=9)
    assert first.checkpoints.save(1, first.state.variables(), wait=True)  # without the values
    first.checkpoints.close()
    resumed = make(tmp_path)
    resumed.step.rate = 0.5
    assert resumed.restore().changed is None
    assert resumed.step.rate == 0.5
    resumed.checkpoints.close()


@pytest.mark.slow
def test_another_learning_rate_than_that_of_the_checkpoint_is_named(tmp_path, warnings_of):
    def resumed(rate):
        loop = make(tmp_path, optimizer=lambda: keras.optimizers.Adam(rate))
        loop.restore()
        return loop

    loop = resumed(0.001)
    loop.train(1)
    loop.save(wait=True)
    resumed(0.001)
    assert not [line for line in warnings_of() if "learning_rate goes on" in line]
    loop = resumed(0.1)
    (said,) = [line for line in warnings_of() if "learning_rate goes on" in line]
    assert "learning_rate goes on at 0.001, as in the checkpoint of step 1, and not at 0.1" in said
    loop.step.optimizer.learning_rate = 0.1
    assert loop.train(2)["learning_rate"] == pytest.approx(0.1)
