"""Local SGD equals models that are trained one by one, of which the mean is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import largest_difference
from rounds import ROUND, STEPS, assert_equals_reference, copies, make

from ctl.control.copies import CompareReplicas
from ctl.errors import CheckpointError, UsageError
from ctl.recipes.local_sgd import LocalSGD
from ctl.step import TrainStep


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_it_equals_models_that_are_trained_one_by_one(mirrored, replicas):
    assert_equals_reference(mirrored(replicas), LocalSGD)


def test_a_resume_on_other_replicas_is_refused(mirrored, tmp_path):
    first = make(mirrored(2), LocalSGD, directory=tmp_path)
    first.save(wait=True)
    first.checkpoints.close()
    with pytest.raises(CheckpointError, match="2"):
        make(mirrored(4), LocalSGD, directory=tmp_path).restore()


def test_weights_that_differ_are_no_fault(mirrored):
    loop = make(mirrored(2), LocalSGD)
    loop.train(ROUND + 1)
    assert largest_difference(*copies(loop)) > 1e-4
    CompareReplicas(loop.step)(SimpleNamespace(step=ROUND + 1))


@pytest.mark.slow
def test_a_mean_in_each_step_equals_synchronous_training(mirrored):
    several = make(mirrored(4), LocalSGD, local_steps=1, seed=1)
    one = make(mirrored(1), TrainStep, seed=1)
    for loop in (several, one):
        loop.train(STEPS)
    assert largest_difference(several.step.model.get_weights(), one.step.model.get_weights()) < 1e-6


def test_what_moves(ring2):
    """The plan shows what the last step of a round moves. Others move one number."""
    loop = make(ring2, LocalSGD)
    plan = loop.plan()
    (mean,) = plan.collectives
    assert mean.bytes == 4 * loop.step.model.count_params() and mean.name.startswith("cond/")
    assert [c.bytes for c in plan.other if c.in_loop] == [4]


def test_other_optimizers_are_refused():
    with pytest.raises(UsageError, match="^LocalSGD supports one optimizer only, and no ema_decay"):
        make(None, LocalSGD, ema_decay=0.9)


def test_an_evaluation_between_two_means_is_said(mirrored, caplog):
    loop = make(mirrored(2), LocalSGD)
    said = [action for action in loop.eval_actions if action.__name__ == "warn"]
    for step in (ROUND, ROUND + 1):
        for action in said:
            action(step, {})
    assert caplog.text.count("are not averaged") == 1
    assert f"step {ROUND + 1} is not a multiple of --local_steps={ROUND}" in caplog.text
