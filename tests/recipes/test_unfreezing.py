"""Gradual unfreezing equals plain TensorFlow, and a resume continues its phase."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, adam, cut, examples, keras_loss, make_loop
from keras import layers
from references import assert_trains_as

from ctl import testing
from ctl.base.actions import Every
from ctl.data import InMemory
from ctl.recipes.unfreezing import GradualUnfreezing

EVERY, STEPS, RATE, MOMENTUM = 2, 5, 0.5, 0.9


def network() -> keras.Model:
    """Three layers, two of them in a model within the model."""
    base = keras.Sequential(
        [keras.Input([FEATURES]), layers.Dense(8, "tanh"), layers.ReLU(), layers.Dense(7, "tanh")]
    )
    return keras.Sequential([keras.Input([FEATURES]), base, layers.Dense(CLASSES)])


def make(strategy=None, **options):
    fixed = {"model": network, "step_class": GradualUnfreezing, "unfreeze_steps": EVERY}
    default = {
        "optimizer": lambda: keras.optimizers.SGD(RATE, MOMENTUM),
        "data": InMemory(examples(64), global_batch_size=16),
    }
    return make_loop(strategy, **fixed, **{**default, **options})


def trained_plainly(model: keras.Model, batches) -> None:
    """SGD with momentum on one device; of what does not train yet, no gradient is taken."""
    weights = [v.value for v in model.trainable_variables]  # a kernel and a bias for each layer
    velocities = [np.zeros(v.shape, np.float32) for v in weights]
    for step, (features, labels) in enumerate(batches):
        trains = range(len(weights))[-2 * (1 + step // EVERY) :]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels, model(features, training=True)))
        gradients = tape.gradient(loss, [weights[i] for i in trains])
        for i, gradient in zip(trains, gradients, strict=True):
            velocities[i] = MOMENTUM * velocities[i] - RATE * gradient.numpy()
            weights[i].assign_add(velocities[i])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_equals_plain_tensorflow(mirrored, replicas):
    data = examples(16 * STEPS)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(16, drop_remainder=True)
    loop = make(mirrored(replicas), data=batches)
    assert_trains_as(loop, network(), lambda plain: trained_plainly(plain, cut(data)), steps=STEPS)


@pytest.mark.slow
def test_one_more_layer_trains_from_each_boundary_on():
    """With Adam, whose slots would move without a gradient of their own, too."""
    loop = make(optimizer=adam())
    seen = []
    for step in range(1, 7):
        variables = [*loop.step.model.variables, *loop.step.optimizer.variables]
        before = [v.numpy() for v in variables]
        loop.train(step, total=7)
        seen.append(
            {v.path for v, old in zip(variables, before, strict=True) if (v.numpy() != old).any()}
        )
    counters = {v.path for v in loop.step.optimizer.variables if v.shape == ()}
    of_layer = 2 + 4  # kernel and bias, and two slots of each
    assert [len(paths - counters) for paths in seen] == [of_layer * n for n in (1, 1, 2, 2, 3, 3)]
    assert seen[0] < seen[2] < seen[4]
    assert {path for path in seen[0] - counters if "adam" not in path} == {
        v.path for v in loop.step.model.layers[-1].variables
    }


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "pause"), [(1, 2), (2, 1)])
def test_a_resume_changes_no_bit(replicas, pause):
    """Paused between two phases, and in one."""

    def again(strategy, checkpoints):
        return make(strategy, checkpoints=checkpoints)

    seed = next(seed for seed in range(99) if random.Random(seed).randint(1, 2) == pause)
    testing.check_resumed(again, replicas, steps=3, seed=seed)


def test_what_an_action_saves_at_a_boundary_trains_what_comes_next(tmp_path):
    save = Every(lambda status: straight.save(wait=True), steps=EVERY)
    straight = make(directory=tmp_path, actions=[save])
    straight.train(EVERY, total=STEPS)
    straight.checkpoints.close()
    resumed = make(directory=tmp_path)
    resumed.restore()
    assert (
        resumed.step.trainable_mask
        == straight.step.trainable_mask
        == (False, False, True, True, True, True)
    )
    resumed.checkpoints.close()
