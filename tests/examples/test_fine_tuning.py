"""Fine-tuning trains the head alone, and then all layers, as a plain loop of TensorFlow does."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from references import assert_trains_as, global_batches

import ctl
from ctl.examples import fine_tuning

pytestmark = pytest.mark.slow
HEAD, STEPS, RATES, IMAGES = 2, 4, [3e-3, 3e-4], 100


@pytest.fixture
def loop(monkeypatch) -> ctl.Loop:
    monkeypatch.setattr(fine_tuning, "HEAD_STEPS", HEAD)
    features = fine_tuning.make_features()
    return fine_tuning.make_loop(features, range(5, 10), most=IMAGES, rates=RATES)


def test_it_equals_plain_tensorflow(loop, monkeypatch, capsys):
    batches = global_batches(loop.dataset, STEPS)
    train, plain = loop.train, keras.models.clone_model(loop.step.model)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def plain_tensorflow(model: keras.Model) -> None:
        """Adam, which takes no gradient of the features in the first steps."""
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        for step, (images, labels) in enumerate(batches):
            optimizer.learning_rate = RATES[step >= HEAD]
            trained = (model if step >= HEAD else model.layers[-1]).trainable_variables
            with tf.GradientTape() as tape:
                loss = cross_entropy(labels, model(tf.cast(images, tf.float32) / 255))
            optimizer.apply(tape.gradient(loss, [v.value for v in trained]), trained)

    def fine_tune(steps: int) -> dict[str, float]:
        monkeypatch.setattr(loop, "train", train)
        fine_tuning.fine_tune(loop, HEAD, steps)
        return {}

    monkeypatch.setattr(loop, "train", fine_tune)
    assert_trains_as(loop, plain, plain_tensorflow, steps=STEPS)
    assert capsys.readouterr().out.count("accuracy") == 2


def test_the_data_are_those_of_the_classes(loop):
    assert loop.dataset.num_examples == IMAGES
    images, labels = fine_tuning.make_data(range(5, 10), training=False)
    all_images, all_labels = ctl.data.load(global_batch_size=1, training=False).arrays
    assert set(labels) == {*range(5)} and len(labels) == (all_labels >= 5).sum()
    assert (images == all_images[all_labels >= 5]).all()
