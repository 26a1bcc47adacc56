"""ZeRO stage 1 equals plain Keras on any number of replicas, with 1/N of the slots on each."""

from __future__ import annotations

import collections
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_replicas_agree,
    cut,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
)

from ctl.errors import CheckpointError, UsageError
from ctl.recipes.zero1 import ZeRO1
from ctl.step import TrainStep

STEPS, CLIP = 5, 0.1


def adamw() -> keras.Optimizer:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# SGD with momentum: see tests/test_methods.py.
OPTIMIZERS = {"adamw": adamw, "ftrl": lambda: keras.optimizers.Ftrl(0.1)}


def model() -> keras.Model:
    """No size of a bias is a multiple of 2. A constraint acts on a whole variable."""
    short = keras.constraints.MaxNorm(0.7)
    parts = [keras.layers.Dense(7, "tanh"), keras.layers.Dense(CLASSES, kernel_constraint=short)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def make(strategy, checkpoints=None, optimizer="adamw", kind=ZeRO1, data=None, **options):
    data = data or tf.data.Dataset.from_tensor_slices(examples(BATCH * STEPS))
    return make_loop(
        strategy,
        model=model,
        optimizer=OPTIMIZERS[optimizer],
        step_class=kind,
        data=data.batch(BATCH, drop_remainder=True).repeat(),
        clip_norm=CLIP,
        checkpoints=checkpoints,
        **options,
    )


def trained_plainly(optimizer: str) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    trained, plain = model(), OPTIMIZERS[optimizer]()
    variables = trained.trainable_variables
    for features, labels in cut(examples(BATCH * STEPS)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels, trained(features)))
        gradients = tape.gradient(loss, [v.value for v in variables])
        clipped, norm = tf.clip_by_global_norm(gradients, CLIP)
        assert norm > CLIP
        plain.apply(clipped, variables)
    return trained.get_weights()


def bytes_per_device(loop) -> dict[str, int]:
    """Of all copies of what the optimizer has, and of the part that it updates."""
    total: dict[str, int] = collections.Counter()
    of_optimizer = [*loop.step.optimizer.variables, *loop.step.optimizer._trainable_variables]
    own = {id(v) for v in loop.step.model.variables}
    for variable in of_optimizer:
        for copy in loop.strategy.experimental_local_results(variable.value):
            if id(variable) not in own:
                total[copy.device] += copy.numpy().nbytes
    return total


@pytest.mark.parametrize(
    ("replicas", "optimizer"),
    [(1, "adamw"), (2, "ftrl"), pytest.param(4, "adamw", marks=pytest.mark.slow)],
)
def test_equals_plain_keras(mirrored, replicas, optimizer):
    loop = make(mirrored(replicas), optimizer=optimizer, seed=1)
    loop.train(STEPS)
    wanted = trained_plainly(optimizer)
    assert largest_difference(loop.step.model.get_weights(), wanted) <= 1e-6
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


@pytest.mark.slow
def test_another_number_of_replicas_is_refused(mirrored, tmp_path):
    first = make(mirrored(2), directory=tmp_path)
    first.train(1)
    first.save(wait=True)
    first.checkpoints.close()
    with pytest.raises(CheckpointError):
        make(mirrored(1), directory=tmp_path).restore()


def test_the_memory_of_a_replica(mirrored):
    """For Adam, 3/N of the weights in place of 2: two slots and the part. Beside them, an optimizer
    has the number of its steps (int64) and its learning rate."""
    scalars, sizes = 8 + 4, [math.prod(w.shape) for w in model().get_weights()]
    for replicas in (1, 2, 4):
        plain = bytes_per_device(make(mirrored(replicas), optimizer="adamw", kind=TrainStep))
        zero = bytes_per_device(make(mirrored(replicas), optimizer="adamw"))
        assert len(plain) == len(zero) == replicas
        assert {*plain.values()} == {2 * 4 * sum(sizes) + scalars}
        mine = sum(-(-size // replicas) for size in sizes)
        assert mine <= sum(sizes) / replicas + len(sizes)
        assert {*zero.values()} == {3 * 4 * mine + scalars}


@pytest.mark.slow
def test_what_moves(ring2):
    """The all-reduce of ctl, and a gather: of the lengths first, then of the parts."""
    moved = []
    for kind in (TrainStep, ZeRO1):
        loop = make(ring2, kind=kind)
        plan = loop.plan()
        moved.append([(c.kind, c.bytes) for c in (*plan.collectives, *plan.other) if c.in_loop])
    size = 4 * loop.step.model.count_params()
    assert moved[0] == [("CollectiveReduceV2", size)]
    mine = sum(-(-v.shape.num_elements() // 2) for v in loop.step.trainable_variables)
    gathers = [("CollectiveGatherV2", 2 * 4), ("CollectiveGatherV2", 4 * mine)]
    assert moved[1] == moved[0] + gathers
    assert plan.collectives[0].name == "pack0" and not [c for c in plan.other if c.in_loop]


def test_a_skipped_update_changes_no_bit(mirrored):
    """Not of the slots of the other replica either, whose gradients were finite."""
    features, labels = examples(3 * BATCH)
    features[BATCH, 0] = np.inf
    data = tf.data.Dataset.from_tensor_slices((features, labels))
    loop = make(mirrored(2), on_nan="skip", data=data)
    found = []
    for until in (1, 2, 3):
        loop.train(until)
        variables = [*loop.step.trainable_variables, *loop.step.unsynchronized_variables()]
        copies = [c for v in variables for c in loop.strategy.experimental_local_results(v)]
        found.append([c.numpy().tobytes() for c in copies])
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[1], found[2], strict=True))


def test_what_it_refuses(mirrored):
    for refused in ("Lamb", "Adafactor", "Muon", "Nadam"):
        with pytest.raises(UsageError, match="^ZeRO1 needs one new optimizer, not one of Lamb, "):
            make_loop(optimizer=getattr(keras.optimizers, refused), step_class=ZeRO1)
    loop = make(mirrored(1))
    loop.train_only([loop.step.model.layers[-1]])
    with pytest.raises(UsageError, match="^ZeRO1 needs a gradient of each variable"):
        loop.train(1)
