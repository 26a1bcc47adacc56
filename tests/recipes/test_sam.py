"""Sharpness-aware minimization equals plain TensorFlow, on any number of replicas."""

from __future__ import annotations

import keras
import pytest
from helpers import BATCH, accuracy, assert_replicas_agree, examples, largest_difference, mlp
from sam import sam_loop, trained_plainly

from ctl import testing
from ctl.data import InMemory
from ctl.loop import Loop
from ctl.recipes.sam import SAM

STEPS = 10


@pytest.mark.parametrize("replicas", [1, 2])
def test_equals_plain_tensorflow(mirrored, replicas):
    loop = sam_loop(mirrored(replicas))
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), trained_plainly(STEPS)) <= 1e-6
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


def test_moves_the_weights_as_far_as_it_is_told():
    loop = sam_loop(None, rho=0.5)
    loop.train(STEPS)
    far = trained_plainly(STEPS, rho=0.5)
    assert largest_difference(loop.step.model.get_weights(), far) <= 1e-6
    assert largest_difference(far, trained_plainly(STEPS)) > 1e-3


@pytest.mark.slow
def test_the_checks_of_a_step_pass():
    def make(strategy, checkpoints):
        with strategy.scope():
            step = SAM(mlp(), keras.optimizers.SGD(0.1, momentum=0.9), metrics=[accuracy()])
        data = InMemory(examples(), global_batch_size=BATCH, seed=3)
        return Loop(step, data, strategy=strategy, checkpoints=checkpoints)

    testing.check_step(make, replicas=(2,), steps=3, tolerance=1e-6)
