"""A line says, once for a loop, that steps wait for their input."""

from __future__ import annotations

import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES

from ctl import Loop, TrainStep
from ctl.control import input_wait
from ctl.control.input_wait import InputWait, is_bound
from ctl.data.feed import Waited
from ctl.data.global_batches import GlobalBatches

SAID = "the input bounds the speed"


def lines(caplog) -> list[str]:
    return [text for text in caplog.messages if SAID in text]


def test_what_is_a_large_share():
    assert not is_bound(0.0, 5.0) and not is_bound(1.4, 5.0)
    assert is_bound(1.5, 5.0) and is_bound(5.0, 5.0)


def test_it_is_said_once_at_the_end_of_a_window(caplog):
    wait = InputWait(types.SimpleNamespace(faster="another disk"))
    wait.add(Waited(0.9), 1.0)
    assert not lines(caplog)
    wait.add(Waited(3.9), 4.0)
    wait.add(Waited(8.9), 5.0)
    assert lines(caplog) == [
        f"{SAID}: steps waited for it for 78 % of the last 5 s; try another disk"
    ]


def test_each_window_is_judged_alone(caplog):
    wait = InputWait(object())
    for _ in range(20):
        wait.add(Waited(1.0), 5.0)
        wait.add(Waited(0.5), 5.0)  # of a feed that was opened again
    assert not lines(caplog)
    wait.add(Waited(2.5), 5.0)  # such as from the second epoch on, from another disk
    assert lines(caplog) == [f"{SAID}: steps waited for it for 40 % of the last 5 s"]


def napping(seconds: float):
    """A function of `map` that takes so long; what it computes stays."""

    def sleep(value):
        time.sleep(seconds)
        return value

    def mapped(features, labels):
        same = tf.numpy_function(sleep, [features], features.dtype)
        return tf.ensure_shape(same, features.shape), labels

    return mapped


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_slow_pipeline_and_a_slow_step(mirrored, monkeypatch, caplog, replicas):
    monkeypatch.setattr(input_wait, "_WINDOW_SECONDS", 0.4)
    x = np.zeros([64, FEATURES], np.float32), np.zeros([64], np.int64)
    batches = tf.data.Dataset.from_tensor_slices(x).batch(8, drop_remainder=True)
    strategy = mirrored(replicas)

    class Slow(TrainStep):
        def loss(self, batch):
            return super().loss(napping(0.1)(*batch))

    for step_class, data in (Slow, batches.cache()), (TrainStep, batches.map(napping(0.1))):
        with strategy.scope():
            model = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
            step = step_class(model, keras.optimizers.SGD(0.1), jit_update=False)
        assert not lines(caplog)
        Loop(step, data.prefetch(2), strategy=strategy, steps_per_loop=2).train(12)
    (line,) = lines(caplog)
    assert "keras.utils.PyDataset with workers=4" in line and "\n" not in line


def test_the_remedy_fits_the_data():
    batches = tf.data.Dataset.range(8).batch(2)
    assert "tf.io.parse_example" in GlobalBatches(batches).faster
    of_python = batches.map(lambda x: tf.numpy_function(lambda y: y, [x], tf.int64))
    assert "parse_example" not in GlobalBatches(of_python).faster
