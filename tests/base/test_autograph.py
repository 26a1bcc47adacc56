"""AutoGraph converts the user's code, however it came into a step, and none of ctl's."""

from __future__ import annotations

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, adam, examples
from tensorflow.python.autograph.impl import api

from ctl.base import autograph, tf_internals
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep, scale_images
from ctl.phases.losses import cross_entropy
from ctl.phases.observer import Observer
from ctl.recipes.sam import SAM
from ctl.schedule import Schedule
from ctl.step import TrainStep

CONVERTED: set[str] = set()


def decide(name, tensor=0.0):
    """Notes ``name``. In a graph, it works only if AutoGraph converts what calls it."""
    total = tf.reduce_sum(tensor)
    for _ in tf.range(1):
        if total < 0.0:
            total += 1.0
    CONVERTED.add(name)


def decided(method):
    """A decorator of the user's."""

    @functools.wraps(method)
    def decorated(*arguments, **options):
        decide(method.__name__)
        return method(*arguments, **options)

    return decorated


def overriding(name):
    """A method that decides, and calls that of ctl."""

    def method(self, *arguments, **options):
        return getattr(TrainStep, name)(self, *arguments, **options)

    method.__name__ = name
    method.__signature__ = inspect.signature(getattr(TrainStep, name))
    return decided(method)


PHASES = ["__call__", "sum_of", "count", "update_metrics", "loss_and_gradients", "backward"]
PHASES += ["forward_backward", "reduce", "sum_gradients", "finite", "clip", "apply", "outcome"]


class Mixin:
    def forward(self, batch):
        decide("forward")
        return super().forward(batch)


class Mine(Mixin, TrainStep):
    locals().update({name: overriding(name) for name in PHASES})

    @staticmethod
    def preprocess(features):
        decide("preprocess")
        return scale_images(features)

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        decide("loss", losses)
        return losses, outputs


class Sharp(SAM, Mine):
    """A recipe calls the methods of a step of the user's."""


class Evaluated(EvalStep):
    def __call__(self, batch):
        decide("evaluation")
        return super().__call__(batch)


class Watching(Observer):
    def mark(self, name, tensors):
        decide("mark")

    def all_reduce(self, tensors, **options):
        decide("all_reduce")
        return Observer.all_reduce(tensors, **options)


class Rate(Schedule):
    def decay(self, step):
        decide("decay", step)
        return tf.constant(0.1, tf.float64)


class Data(InMemory):
    def on_replica(self, element, resident):
        decide("on_replica")
        return super().on_replica(element, resident)


class Right(keras.metrics.SparseCategoricalAccuracy):
    def update_state(self, labels, outputs, sample_weight=None):
        decide("metric")
        super().update_state(labels, outputs, sample_weight)


class Loss:
    def __call__(self, labels, outputs):
        decide("loss_fn", outputs)
        return cross_entropy(labels, outputs)


def halved(rate, step):
    decide("schedule", tf.cast(step, tf.float32))
    return rate / 2.0


def clip(step, gradients):
    decide("clip of the object")
    return TrainStep.clip(step, gradients)


ALL = {*PHASES, "forward", "preprocess", "loss", "evaluation", "metric", "loss_fn", "on_replica"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "replicas", "schedule", "options", "more"),
    [
        (Mine, 1, Rate(), {"jit_compile": True}, {"decay"}),
        (
            Sharp,
            2,
            functools.partial(halved, 0.2),
            {"jit_compile": False},
            {"schedule", "clip of the object", "mark", "all_reduce"},
        ),
    ],
)
def test_only_the_users_code_is_converted(
    mirrored, monkeypatch, kind, replicas, schedule, options, more
):
    CONVERTED.clear()
    of_ctl = set()
    transform = api._TRANSPILER.transform

    def spy(function, context):
        if function.__module__.startswith("ctl.") and "recipes" not in function.__module__:
            of_ctl.add(function.__qualname__)
        return transform(function, context)

    monkeypatch.setattr(api._TRANSPILER, "transform", spy)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
        step = kind(model, adam()(), Loss(), metrics=[Right("m")], on_nan="skip", **options)
        evaluated = Evaluated(model, Loss(), metrics=[Right("m")])
    if "mark" in more:
        step.observer = Watching()
        step.clip = functools.partial(clip, step)
    data = Data(examples(3 * BATCH), global_batch_size=BATCH)
    held_out = Data(examples(BATCH, seed=9), global_batch_size=BATCH, training=False)
    evaluator = Evaluator(evaluated, held_out, strategy=strategy)
    loop = Loop(step, data, strategy=strategy, schedule=schedule, evaluator=evaluator)
    assert np.isfinite(loop.train(2)["loss"])
    loop.evaluate()
    assert (ALL | more) - {"clip"} <= CONVERTED
    assert of_ctl == {"Steps.run", "Evaluator._eval_steps"}


def test_eager_code_stays_as_it_is():
    """A debugger stops in it, and what was assigned is what is read."""
    model = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
    loss_fn = Loss()
    step = Mine(model, "sgd", loss_fn)
    assert step.loss_fn is loss_fn and step.loss.__func__ is Mine.loss
    assert autograph.with_autograph(clip) is clip
    assert tf_internals.no_rules() is None
