"""Distillation equals plain TensorFlow; a teacher that does not fit is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CLASSES,
    FEATURES,
    assert_replicas_agree,
    cut,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
)
from keras import layers

from ctl import testing
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.recipes.distillation import Distillation

STEPS = 6


@pytest.fixture
def teacher(tmp_path):
    """The file of a larger model, with layers that behave otherwise in training."""
    parts = [layers.Dense(20, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input([FEATURES]), *parts, layers.Dense(CLASSES)])
    model.set_weights([3.0 * w + 0.1 for w in model.get_weights()])
    model.save(tmp_path / "teacher.keras")
    return tmp_path / "teacher.keras"


def plain_distillation(model, teacher, batches, temperature, label_share) -> None:
    """Hinton et al. 2015, section 2, on one device. The Kullback-Leibler divergence differs from
    the cross entropy by what the model does not change."""
    optimizer = keras.optimizers.SGD(0.1)
    divergence = keras.losses.KLDivergence(reduction="sum")
    for features, labels, weights in batches:
        target = tf.nn.softmax(teacher(features, training=False) / temperature)
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = 0.0
            for row, weight in enumerate(weights):
                soft = divergence(target[row], tf.nn.softmax(logits[row] / temperature))
                hard = keras_loss(labels[row], logits[row])
                both = (1 - label_share) * temperature**2 * soft + label_share * hard
                loss += weight * both / np.sum(weights)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)


@pytest.mark.parametrize(
    ("replicas", "temperature", "label_share"), [(1, 2.0, 0.5), (2, 5.0, 0.1), (4, 2.0, 0.5)]
)
def test_equals_plain_tensorflow(mirrored, teacher, replicas, temperature, label_share):
    features, labels = examples(16 * STEPS)
    weights = np.random.default_rng(1).uniform(0.5, 2.0, len(labels)).astype("float32")
    options = {"teacher_temperature": temperature, "label_share": label_share}
    loop = make_loop(
        mirrored(replicas),
        step_class=Distillation,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        data=tf.data.Dataset.from_tensor_slices((features, labels, weights)).batch(16),
        teacher=teacher,
        **options,
    )
    plain = mlp()
    plain.set_weights(loop.step.model.get_weights())
    loaded = keras.models.load_model(teacher)
    taught = [w.copy() for w in loaded.get_weights()]
    batches = cut((features, labels, weights))
    plain_distillation(plain, loaded, batches, temperature, label_share)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plain.get_weights()) <= 1e-6
    assert largest_difference(loop.step.taught_by.get_weights(), taught) == 0.0
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


def test_a_resume_changes_no_bit(teacher):
    def make(strategy, checkpoints):
        return make_loop(
            strategy,
            step_class=Distillation,
            data=InMemory(examples(64), global_batch_size=16),
            checkpoints=checkpoints,
            teacher=teacher,
        )

    testing.check_resumed(make, steps=2)


def test_a_teacher_that_does_not_fit_is_refused(tmp_path):
    def refusal(teacher):
        with pytest.raises(UsageError) as caught:
            make_loop(step_class=Distillation, teacher=teacher)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(None).startswith("--teacher is missing")
    missing, damaged, other = (tmp_path / f"{name}.keras" for name in "abc")
    assert refusal(missing).startswith(f"--teacher={missing} is not a Keras model")
    damaged.write_bytes(b"no zip")
    assert refusal(damaged).startswith(f"--teacher={damaged} is not a Keras model")
    keras.Sequential([keras.Input([FEATURES]), layers.Dense(CLASSES + 1)]).save(other)
    assert f"{other} takes (None, {FEATURES}) and returns (None, 6), but the model" in refusal(
        other
    )
