"""Statistics of BatchNorm on several replicas: moving, synchronized, in steps that are skipped."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from helpers import (
    BATCH,
    FEATURES,
    STEPS,
    adam,
    assert_replicas_agree,
    both,
    cut,
    examples,
    largest_difference,
    make_loop,
    network,
    normalized,
    sgd,
    train,
)
from keras import layers

from ctl.errors import UsageError


@pytest.mark.parametrize("replicas", [1, 4])
def test_batch_norm_statistics_are_those_of_one_replica(mirrored, replicas):
    """The layer sees the data, so its statistics do not depend on how batches are split."""

    arrays = examples()
    strategy = mirrored(replicas)
    loop = train(strategy, normalized(momentum=0.8, name="norm"), sgd(0.0), arrays)
    mean, variance = np.zeros(FEATURES), np.ones(FEATURES)
    for features, _ in cut(arrays):
        mean = 0.8 * mean + 0.2 * features.astype(np.float64).mean(axis=0)
        variance = 0.8 * variance + 0.2 * features.astype(np.float64).var(axis=0)
    norm = loop.step.model.get_layer("norm")
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, atol=1e-6)
    assert_replicas_agree(strategy, loop.step.model.variables)


def test_synchronized_batch_norm_equals_one_replica(mirrored):
    ours, theirs, *_ = both(mirrored(2), sgd(), make_model=normalized(synchronized=True))
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6


@pytest.mark.slow
def test_gradients_of_a_synchronized_batch_norm_cross_replicas_of_other_counts(mirrored):
    """Gradients of the first layer are those of all replicas, whose weights differ."""

    def model():
        return network(layers.Dense(8, "tanh"), layers.BatchNormalization(synchronized=True))

    weights = np.tile(np.repeat([1.0, 0.1], BATCH // 2), STEPS).astype(np.float32)
    options = {"make_model": model, "weighting": "sum_of_weights"}
    ours, theirs, *_ = both(mirrored(2), sgd(), (*examples(), weights), **options)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"jit_compile": True}], ids=str)
def test_a_synchronized_batch_norm_in_a_loop_or_under_xla_is_refused(mirrored, options):
    model = normalized(synchronized=True)
    make_loop(mirrored(1), model=model, **options)
    with pytest.raises(UsageError, match="neither --accumulate_steps nor --jit_compile: use"):
        make_loop(mirrored(2), model=model, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "jit_compile", "synchronized"),
    [
        (1, True, False),
        (2, False, False),
        pytest.param(2, False, True, marks=pytest.mark.compiled_update),
    ],
)
def test_a_skipped_step_leaves_batch_norm_as_it_was(mirrored, replicas, jit_compile, synchronized):
    """The statistics are those of a training that never saw the batch."""

    batches = cut(examples(4 * BATCH))
    poisoned = batches[1][0].copy()
    poisoned[3, 2] = np.nan
    states = []
    for given in ([*batches[:2], (poisoned, batches[1][1]), *batches[2:]], batches):
        arrays = tuple(np.concatenate(parts) for parts in zip(*given, strict=True))
        keras.utils.set_random_seed(4)
        loop = train(
            mirrored(replicas),
            normalized(momentum=0.5, synchronized=synchronized),
            adam(),
            arrays,
            steps=len(given),
            on_nan="skip",
            jit_compile=jit_compile,
        )
        states.append(loop.step.model.get_weights())
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="needs a newer Keras, with renorm of BatchNormalization",
)
def test_the_statistics_of_renorm_are_the_same_on_all_replicas(mirrored):
    model = normalized(momentum=0.5, renorm=True, renorm_momentum=0.5)
    loop = train(mirrored(2), model, adam(), examples())
    norm = loop.step.model.layers[0]
    assert len(norm.non_trainable_variables) == 5
    assert_replicas_agree(mirrored(2), norm.non_trainable_variables)
