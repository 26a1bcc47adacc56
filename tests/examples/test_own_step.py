"""The step of the example is right, and trained as a plain loop of TensorFlow trains it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import descend

import ctl
from ctl.examples import own_step
from ctl.testing import check_reference, strategy_over

pytestmark = pytest.mark.slow


def plain_tensorflow(model: keras.Model, batches: list) -> None:
    """SGD on the mean of both losses; no gradient goes through the change of an image."""
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(images, labels):
        images = tf.cast(images, tf.float32) / 255
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = cross_entropy(labels, model(images))
        gradient = tape.gradient(loss, images).numpy()
        norm = np.sqrt((gradient**2).sum(axis=(1, 2, 3), keepdims=True))
        moved = images + gradient / norm
        return (cross_entropy(labels, model(images)) + cross_entropy(labels, model(moved))) / 2

    descend(model, keras.optimizers.SGD(0.1), loss_of, batches)


def test_it_equals_plain_tensorflow():
    check_reference(own_step.make_loop, plain_tensorflow)


def test_images_are_moved_by_the_size_and_raise_the_loss():
    model = own_step.make_loop(strategy_over(1), None).step.model
    images, labels = (a[:50] for a in ctl.data.load(global_batch_size=1).arrays)
    images, labels = tf.cast(images, tf.float32) / 255, tf.constant(labels)
    moved = own_step.fooling(model, images, labels, 0.5)
    distances = np.sqrt(((moved - images).numpy() ** 2).sum(axis=(1, 2, 3)))
    np.testing.assert_allclose(distances, 0.5, rtol=1e-3)
    before, after = (ctl.losses.cross_entropy(labels, model(x)).numpy() for x in (images, moved))
    assert (after > before).all()


def test_the_program_checks_the_step_and_compares_it(monkeypatch, capsys):
    monkeypatch.setattr(own_step, "STEPS", 2)
    own_step.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "check_step has found no mistake"
    assert [line.split()[0] for line in lines[-2:]] == ["TrainStep", "Adversarial"]
