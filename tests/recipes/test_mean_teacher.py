"""The mean teacher equals plain TensorFlow that is given the same noise."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, cut, examples, keras_loss, largest_difference, make_loop, mlp
from keras import layers
from references import assert_trains_as, descend

from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.recipes.mean_teacher import MeanTeacher

STEPS, DECAY = 6, 0.5
OPTIONS = {"ema_decay": DECAY, "consistency_weight": 3.0, "consistency_rampup": 4}


class SameNoise(MeanTeacher):
    """With noise that depends on the features only, so that it is the same on any replica."""

    def noisy(self, features, name):
        return noise_of(features, name)


def noise_of(features, name):
    return features + (
        0.3 * tf.sin(9.0 * features) if name == "student" else 0.3 * tf.cos(features)
    )


def plain_mean_teacher(student, optimizer, batches) -> keras.Model:
    """Tarvainen and Valpola 2017, on one device. Returns the teacher."""
    teacher = keras.models.clone_model(student)
    teacher.set_weights(student.get_weights())

    def loss_of(step: int, batch: tuple) -> tf.Tensor:
        features, labels = batch
        grown = np.exp(-5.0 * (1.0 - min(1.0, step / OPTIONS["consistency_rampup"])) ** 2)
        known = np.flatnonzero(labels >= 0)
        target = tf.nn.softmax(teacher(noise_of(features, "teacher")))
        logits = student(noise_of(features, "student"))
        hard = tf.reduce_sum(keras_loss(labels[known], tf.gather(logits, known)))
        cost = tf.reduce_sum((tf.nn.softmax(logits) - target) ** 2) / CLASSES
        return (hard + OPTIONS["consistency_weight"] * grown * cost) / len(labels)

    for step, batch in enumerate(batches):
        descend(student, optimizer, loss_of, [(step, batch)])
        decay = DECAY if step else 0.0  # as in ctl and Keras, the average starts after one update
        pairs = zip(teacher.get_weights(), student.get_weights(), strict=True)
        teacher.set_weights([decay * a + (1 - decay) * b for a, b in pairs])
    return teacher


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_equals_plain_tensorflow(mirrored, replicas):
    features, labels = examples(16 * STEPS)
    labels[::3] = -1
    loop = make_loop(
        mirrored(replicas),
        step_class=SameNoise,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        data=tf.data.Dataset.from_tensor_slices((features, labels)).batch(16, drop_remainder=True),
        **OPTIONS,
    )
    student = mlp()
    _, teacher = assert_trains_as(
        loop,
        student,
        lambda plain: plain_mean_teacher(plain, keras.optimizers.SGD(0.5), cut((features, labels))),
        steps=STEPS,
        tolerance=1e-6,
    )
    averages = [v.numpy() for v in loop.step.updater.ema]
    assert largest_difference(averages, teacher.get_weights()) <= 1e-6
    assert largest_difference(averages, student.get_weights()) > 1e-3


def network() -> keras.Model:
    parts = [layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([FEATURES]), *parts, layers.Dense(CLASSES)])


def make(strategy=None, checkpoints=None, **options):
    return make_loop(
        strategy,
        model=network,
        step_class=MeanTeacher,
        data=InMemory(examples(64), global_batch_size=16),
        checkpoints=checkpoints,
        **OPTIONS,
        **options,
    )


def test_the_teacher_leaves_no_trace_and_sees_other_noise():
    """It draws other Dropout masks than the model, and updates no statistics."""
    loop = make(input_noise=0.0)
    step = loop.step
    features = tf.constant(examples(16)[0])

    @tf.function
    def both():
        student = step.model(features, training=True)
        before = [tf.identity(v.value) for v in step.model.non_trainable_variables]
        taught = step.teach(features)
        return student, taught, before

    student, taught, before = loop.strategy.run(both)
    assert largest_difference(before, [v.value for v in step.model.non_trainable_variables]) == 0
    others = [student, step.model(features, training=False)]
    assert all(largest_difference([taught], [other]) > 0.1 for other in others)


def test_an_average_is_required():
    with pytest.raises(UsageError, match=r"^the teacher is an average .*: give --ema_decay=0.999$"):
        make_loop(step_class=MeanTeacher)


def test_what_layers_add_to_the_loss_is_refused():
    def model():
        added = keras.layers.Dense(CLASSES, activity_regularizer="l2")
        return keras.Sequential([keras.Input([FEATURES]), added])

    with pytest.raises(UsageError, match="^MeanTeacher calls the model twice, which drops"):
        make_loop(step_class=MeanTeacher, model=model, ema_decay=0.5).train(1)
