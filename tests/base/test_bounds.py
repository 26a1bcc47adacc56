"""Arguments out of bounds, of another kind, or that hide what ctl uses: one line, and early."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import FEATURES, make_loop, mlp

from ctl.base.bounds import BOUNDS, checked
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("clip_norm", 0, "clip_norm must be a number above 0, not 0"),
        ("clip_norm", -1.0, "a number above 0, not -1.0"),
        ("clip_norm", math.inf, "not inf"),
        ("clip_norm", "1", "not '1'"),
        ("ema_decay", 1.5, "ema_decay must be a number between 0 and 1, not 1.5"),
        ("ema_decay", 0.0, "not 0.0"),
        ("ema_decay", -0.5, "not -0.5"),
        ("ema_decay", math.nan, "not nan"),
        ("accumulate_steps", True, "accumulate_steps must be a whole number of at least 1, not Tr"),
        ("accumulate_steps", 2.0, "not 2.0"),
        ("accumulate_steps", 0, "not 0"),
        ("bytes_per_pack", -1, "a whole number of at least 0, not -1"),
        ("steps_per_loop", -1, "steps_per_loop must be a whole number of at least 1, not -1"),
        ("steps_per_loop", 2.5, "not 2.5"),
        ("loss_fn", "msee", "unknown loss_fn 'msee': did you mean 'mse'"),
        ("loss_fn", 3, "loss_fn is 3: give a function"),
        ("loss_fn", None, "loss_fn is None: give a function"),
        ("loss_fn", dict, "loss_fn is the class dict: give a function"),
        ("checkpoints", 3, r"checkpoints is 3: give a directory, or ctl.CheckpointManager\(dire"),
        ("evaluator", EvalStep(mlp()), "evaluator is a EvalStep: give ctl.Evaluator"),
        ("actions", print, "actions must be a list of functions"),
        ("eval_actions", [3], "eval_actions must be a list of functions, not .3."),
    ],
)
def test_wrong_arguments_are_one_line(name, value, reason):
    with pytest.raises(UsageError, match=reason) as error:
        make_loop(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("metrics", [[3], "accuracy", keras.metrics.Mean("mean")])
def test_metrics_are_a_list_of_keras_metrics(metrics):
    for make in (
        lambda: TrainStep(mlp(), "adam", metrics=metrics),
        lambda: EvalStep(mlp(), metrics=metrics),
    ):
        with pytest.raises(UsageError, match="metrics must be a list of names, such as"):
            make()


def test_lengths_of_a_training():
    loop = make_loop(evaluate=16)
    for wrong in (10.5, "10", True, -1):
        with pytest.raises(UsageError, match="until must be a whole number of at least 0"):
            loop.train(wrong)
    for wrong in (-1, 0, 2.0):
        with pytest.raises(UsageError, match="evaluate_every must be a whole number of at least 1"):
            loop.train_and_evaluate(10, evaluate_every=wrong)
    assert loop.global_step == 0
    loop.train(np.int64(1), total=np.int32(3))
    loop.train_and_evaluate(np.int64(3), evaluate_every=np.int64(2))
    assert loop.global_step == 3


def test_a_setting_that_an_action_changes_is_checked():
    loop = make_loop(clip_norm=1.0)
    loop.train(1)
    loop.step.clip_norm = 0
    with pytest.raises(UsageError, match="clip_norm must be a number above 0, not 0"):
        loop.train(2)
    assert loop.global_step == 1


def test_numbers_become_those_of_python_and_tensors_stay():
    for value, want in ((np.float32(0.5), 0.5), (1, 1.0), (np.int64(2), 2.0)):
        got = checked("clip_norm", value)
        assert got == want and type(got) is float
    assert type(checked("until", np.uint8(2))) is int
    tensor = tf.constant(0.5)
    assert checked("clip_norm", tensor) is tensor and checked("clip_norm", None) is None
    assert all(str(bounds).startswith("a ") for bounds in BOUNDS.values())


HIDDEN = {
    "seed": 3,
    "log": [],
    "finite": True,
    "clip": 1.0,
    "apply": keras.layers.Dense(2),
    "count": keras.metrics.Mean("mean"),
    "training": False,
    "options": {"a": 1},
    "logged": [],
    "seeds": [1, 2],
    "statistics": {},
    "updater": None,
    "trainable_variables": [],
    "noinline": True,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_attributes_that_hide_those_of_ctl_are_refused(name):
    class Own(TrainStep):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            setattr(self, name, HIDDEN[name])

    with pytest.raises(UsageError, match=f"Own sets self.{name}, which ctl uses for itself"):
        make_loop(step_class=Own)


def test_a_function_may_take_the_place_of_a_method():
    class Own(TrainStep):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.clip = lambda gradients: [g if g is None else g / 2 for g in gradients]
            self.counts, self.temperature, self.names = "tokens", 0.5, ["a"]

    make_loop(step_class=Own).train(1)


class OfEachClass(keras.metrics.Metric):
    """As `keras.metrics.F1Score(average=None)`: one number for each class."""

    def __init__(self):
        super().__init__(name="each")
        self.total = self.add_weight(name="total", shape=[5], initializer="zeros")

    def update_state(self, labels, outputs, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(outputs, 0))

    def result(self):
        return self.total


def test_a_metric_of_several_numbers_is_refused_before_the_first_step():
    class Own(TrainStep):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.metrics.append(OfEachClass())

    loop, reason = make_loop(step_class=Own), r"metric each has a result of shape \(5,\)"
    with pytest.raises(UsageError, match=reason):
        loop.train(1)
    assert loop.global_step == 0
    evaluator = Evaluator(EvalStep(mlp(), metrics=[OfEachClass()]), evaluated())
    with pytest.raises(UsageError, match=reason):
        evaluator.run()


def evaluated() -> InMemory:
    data = np.zeros([4, FEATURES], np.float32), np.zeros([4], np.int64)
    return InMemory(data, global_batch_size=2, training=False)


def test_an_object_may_take_the_place_of_a_method_and_a_loss_of_its_own_that_of_loss_fn():
    class Halves:
        def __call__(self, gradients):
            return [g if g is None else g / 2 for g in gradients]

    class Own(TrainStep):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.clip = Halves()
            self.hits = keras.metrics.Sum("hits")

        def loss(self, batch):
            losses = tf.reduce_sum(self.model(batch[0]) ** 2, -1)
            self.hits.update_state(tf.zeros_like(losses))
            return losses

    assert make_loop(step_class=Own, loss_fn=None).train(1)["hits"] == 0.0


def test_phases_that_return_nothing_are_named():
    class Forgets(TrainStep):
        def loss(self, batch):
            super().loss(batch)

    class Drops(TrainStep):
        def clip(self, gradients):
            super().clip(gradients)

    with pytest.raises(UsageError, match=r"Forgets.loss\(\) returned None"):
        make_loop(step_class=Forgets).train(1)
    with pytest.raises(
        UsageError, match=r"Drops.clip\(\) returned NoneType: it must return a list .* 4 trainable"
    ):
        make_loop(step_class=Drops).train(1)

    class EvalForgets(EvalStep):
        def loss(self, batch):
            super().loss(batch)

    with pytest.raises(UsageError, match=r"EvalForgets.loss\(\) returned None"):
        Evaluator(EvalForgets(mlp()), evaluated()).run()


class Alone(TrainStep):
    """Returns no outputs, and may update its metric by itself."""

    updates = False

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        if self.updates:
            self.metrics[0].update_state(batch[1], outputs)
        return losses


class EvalAlone(EvalStep):
    def loss(self, batch):
        return super().loss(batch)[0]


def test_a_metric_that_nothing_updates_is_left_out(warnings_of):
    loop = make_loop(step_class=Alone)
    scalars = loop.train(2)
    assert "loss" in scalars and "accuracy" not in scalars
    assert any(
        warning.startswith("Alone.loss() returns no outputs, so accuracy is logged only if")
        for warning in warnings_of()
    )
    metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
    assert {*Evaluator(EvalAlone(mlp(), metrics=metrics), evaluated()).run()} == {"loss"}


@pytest.mark.slow
def test_a_metric_that_the_loss_updates_is_logged(monkeypatch):
    want = make_loop(seed=0).train(2)["accuracy"]
    monkeypatch.setattr(Alone, "updates", True)
    assert make_loop(seed=0, step_class=Alone).train(2)["accuracy"] == want > 0
