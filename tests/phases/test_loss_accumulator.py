"""The logged loss is the mean over examples, whatever the sizes of the batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, batches_of, examples, keras_loss, make_loop, sgd

SIZES = BATCH, 5


def logged(strategy, arrays, **options) -> tuple[float, keras.Model]:
    """Trains on a batch of 16 and one of 5, again and again."""
    parts = [np.split(array, [BATCH]) for array in arrays]
    data = batches_of([*zip(*parts, strict=True)])
    loop = make_loop(strategy, optimizer=sgd(0.0), data=data, **options)
    return loop.train(6)["loss"], loop.step.model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options", "weighted"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"accumulate_steps": 2}, True),
        (2, {"accumulate_steps": 2}, False),
        (1, {"on_nan": "skip"}, False),
        (2, {"on_nan": "skip"}, True),
    ],
    ids=str,
)
def test_it_is_the_mean_over_examples(mirrored, replicas, options, weighted):
    features, labels = examples(sum(SIZES))
    weights = np.ones(len(labels), "float32")
    if weighted:
        weights[:BATCH] = np.linspace(0, 3, BATCH)
        options = options | {"weighting": "sum_of_weights"}
    labels[BATCH:] = labels[0]  # the short batches have another loss
    loss, model = logged(mirrored(replicas), (features, labels, weights), **options)
    losses = keras_loss(labels, model(features)).numpy().astype("float64")
    means = [losses[:BATCH].mean(), losses[BATCH:].mean()]
    expected = np.average(losses, weights=weights)
    assert abs(np.mean(means) - expected) > 1e-2
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_skipped_batches_have_no_part_in_it(mirrored):
    features, labels = examples(sum(SIZES))
    features[2, 3] = np.nan
    weights = np.ones(len(labels), "float32")
    loss, model = logged(mirrored(2), (features, labels, weights), on_nan="skip")
    short = keras_loss(labels[BATCH:], model(features[BATCH:]))
    assert loss == pytest.approx(float(tf.reduce_mean(short)), rel=1e-5)
