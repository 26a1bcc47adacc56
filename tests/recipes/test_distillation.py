"""Distillation equals plain TensorFlow; a teacher that does not fit is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, cut, examples, keras_loss, largest_difference, make_loop, mlp
from keras import layers
from references import assert_trains_as, descend

from ctl.errors import UsageError
from ctl.recipes.distillation import Distillation

STEPS = 6


def save_teacher(path) -> None:
    """A larger model, with layers that behave otherwise in training; always the same."""
    random = np.random.default_rng(5)
    parts = [layers.Dense(20, "relu"), layers.BatchNormalization(), layers.Dropout(0.5, seed=5)]
    model = keras.Sequential([keras.Input([FEATURES]), *parts, layers.Dense(CLASSES)])
    model.set_weights([random.uniform(0.1, 1.0, w.shape) for w in model.get_weights()])
    model.save(path)


def plain_distillation(model, teacher, batches, temperature, label_share) -> None:
    """Hinton et al. 2015, section 2, on one device. The Kullback-Leibler divergence differs from
    the cross entropy by what the model does not change."""
    divergence = keras.losses.KLDivergence(reduction="sum")

    def loss_of(features, labels, weights) -> tf.Tensor:
        target = tf.nn.softmax(teacher(features, training=False) / temperature)
        logits = model(features, training=True)
        loss = 0.0
        for row, weight in enumerate(weights):
            soft = divergence(target[row], tf.nn.softmax(logits[row] / temperature))
            hard = keras_loss(labels[row], logits[row])
            both = (1 - label_share) * temperature**2 * soft + label_share * hard
            loss += weight * both / len(weights)
        return loss

    descend(model, keras.optimizers.SGD(0.1), loss_of, batches)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "temperature", "label_share"), [(1, 2.0, 0.5), (2, 5.0, 0.1)])
def test_equals_plain_tensorflow(mirrored, tmp_path, replicas, temperature, label_share):
    teacher = tmp_path / "teacher.keras"
    save_teacher(teacher)
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
    loaded = keras.models.load_model(teacher)
    taught = [w.copy() for w in loaded.get_weights()]
    batches = cut((features, labels, weights))
    assert_trains_as(
        loop,
        mlp(),
        lambda plain: plain_distillation(plain, loaded, batches, temperature, label_share),
        steps=STEPS,
        tolerance=1e-6,
    )
    assert largest_difference(loop.step.taught_by.get_weights(), taught) == 0.0


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
