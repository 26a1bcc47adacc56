"""A collective of one's own for the gradients: all else stays ctl's."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    batches_of,
    examples,
    largest_difference,
    make_loop,
    network,
    precision,
    sgd,
)
from keras import layers

from ctl.errors import UsageError
from ctl.reduce import all_reduce
from ctl.step import TrainStep


class OneByOne(TrainStep):
    """Sums each gradient for itself."""

    def sum_gradients(self, gradients):
        assert all(g.dtype == "float32" for g in gradients)
        return [all_reduce([g])[0] for g in gradients]


class Finite(TrainStep):
    """Loses every NaN and Inf, as a quantization may."""

    def sum_gradients(self, gradients):
        finite = [tf.where(tf.math.is_finite(g), g, 0.0) for g in gradients]
        return super().sum_gradients(finite)


def model() -> keras.Model:
    return network(layers.Dense(6, "tanh"), layers.BatchNormalization())


def batches(features, labels) -> tf.data.Dataset:
    """Of 16 and of 5 examples, so that the examples are counted."""
    return batches_of([*zip(np.split(features, [16]), np.split(labels, [16]), strict=True)])


@pytest.mark.parametrize(  # each pair of values of any two
    ("replicas", "counted", "policy"),
    [
        (1, False, "mixed_float16"),
        (1, True, "float32"),
        (2, False, "float32"),
        (2, True, "mixed_float16"),
    ],
)
def test_it_trains_alike(mirrored, replicas, counted, policy):
    """The weights, the statistics and the loss, with examples counted, and with a loss scale."""
    trained, losses = [], []
    for kind in (TrainStep, OneByOne):
        with precision(policy):
            loop = make_loop(
                mirrored(replicas),
                model=model,
                optimizer=sgd(),
                step_class=kind,
                data=batches(*examples(21)) if counted else None,
                loss_scale=policy != "float32",
                clip_norm=0.5,
                seed=1,
            )
        losses.append(loop.train(4)["loss"])
        trained.append(loop.step.model.get_weights())
    assert largest_difference(*trained) <= (1e-6 if policy == "float32" else 1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if policy == "float32" else 1e-3)


def test_an_infinity_that_it_loses_is_seen(mirrored):
    features, labels = examples(21)
    features[20, 0] = np.inf  # of the last replica, in the second batch
    loop = make_loop(
        mirrored(2),
        model=model,
        step_class=Finite,
        data=batches(features, labels),
        on_nan="skip",
    )
    loop.train(1)
    before = loop.step.model.get_weights()
    assert loop.train(2)["skipped_steps"] == 1
    assert largest_difference(loop.step.model.get_weights(), before) == 0.0
    loop.train(3)
    after = loop.step.model.get_weights()
    assert largest_difference(after, before) > 1e-4 and all(np.isfinite(w).all() for w in after)


def test_tensors_of_other_shapes_or_another_number():
    class Flat(TrainStep):
        def sum_gradients(self, gradients):
            return [tf.reshape(g, [-1]) for g in gradients]

    class One(TrainStep):
        def sum_gradients(self, gradients):
            return gradients[:1]

    for kind in (Flat, One):
        with pytest.raises(UsageError, match=r"^sum_gradients\(\) was given shapes .* returned"):
            make_loop(step_class=kind).train(1)
