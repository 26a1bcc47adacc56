"""Phases with variables of their own: what stays, what is moved, what a resume does."""

from __future__ import annotations

import functools
import tempfile

import keras
import numpy as np
import pytest
from helpers import largest_difference, make_loop, mlp

import ctl
from ctl.base.actions import Every
from ctl.errors import UsageError
from ctl.step import TrainStep


def head(loop):
    return loop.step.model.layers[-1]


def state(loop):
    """The values of weights and slots, by path, but for counters."""
    variables = [*loop.step.model.variables, *loop.step.optimizer.variables]
    return {v.path: v.numpy() for v in variables if v.path.split("/")[-1] not in _COUNTERS}


_COUNTERS = ("iteration", "learning_rate")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_steps": 2},
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
        {"on_nan": "skip", "clip_norm": 1.0, "ema_decay": 0.9},
    ],
    ids=str,
)
def test_the_others_keep_their_values_and_slots(options):
    loop = make_loop(seed=0, **options)
    loop.train(2)
    before = state(loop)
    loop.train_only([head(loop)])
    loop.train(4)
    after = state(loop)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    names = [v.path.replace("/", "_") for v in head(loop).variables]
    adam = loop.step.optimizer.name
    slots = {f"{adam}/{name}_{slot}" for name in names for slot in ("momentum", "velocity")}
    assert changed == {v.path for v in head(loop).variables} | slots
    loop.train_only()
    loop.train(5)
    assert all(not np.array_equal(after[path], value) for path, value in state(loop).items())
    assert loop.steps.run.experimental_get_tracing_count() == 2


def test_each_set_is_traced_once():
    """However often one alternates with another, as those of generator and discriminator do."""
    loop = make_loop(seed=0, steps_per_loop=1)
    loop.actions.append(lambda status: loop.train_only([head(loop)] if status.step % 2 else None))
    loop.train(8)
    assert loop.steps.run.experimental_get_tracing_count() == 2


def test_only_what_trains_is_reduced(mirrored):
    loop = make_loop(mirrored(2), seed=0)
    loop.train_only([head(loop).kernel])
    paths = [p for c in loop.plan().collectives for m in c.members for p in m.variables]
    assert paths == [head(loop).kernel.path]


def test_a_step_acts_on_its_loop():
    """The loop calls it when it is complete, before the first step."""

    class Acting(TrainStep):
        def attach(self, loop):
            super().attach(loop)
            self.seen = []
            loop.train_only([loop.step.model.layers[-1]])
            loop.actions.insert(0, lambda status: self.seen.append(status.step))

    asked = []
    actions = [lambda status: asked.append(len(loop.step.seen))]
    loop = make_loop(step_class=Acting, actions=actions, steps_per_loop=1)
    before = loop.step.model.get_weights()
    loop.train(2)
    assert loop.step.seen == [1, 2]
    assert asked == [1, 2], "its action is not before those of the loop"
    changed = [(a != b).any() for a, b in zip(before, loop.step.model.get_weights(), strict=True)]
    assert changed == [False, False, True, True]


def unfreezing(strategy, directory=None, seed=0):
    """Trains the head for three steps, and then all."""
    loop = make_loop(strategy, seed=seed, directory=directory)

    def unfreeze(status):
        loop.train_only(None)

    loop.actions.append(Every(unfreeze, steps=3))
    return loop


@pytest.mark.slow
def test_replicas_equal_one(mirrored):
    loops = [unfreezing(mirrored(count)) for count in (1, 2)]
    for loop in loops:
        loop.train_only([head(loop)])
        loop.train(2, total=9)  # without a last wake, which would end the phase
        loop.train(6)
    weights = [loop.step.model.get_weights() for loop in loops]
    assert largest_difference(*weights) < 1e-6


@pytest.mark.slow
def test_a_resume_continues_the_phase(tmp_path, mirrored):
    straight, first = unfreezing(mirrored(1)), unfreezing(mirrored(1), tmp_path)
    for loop in (straight, first):
        loop.train_only([head(loop)])
    straight.train(6)
    first.train(2, total=6)
    first.save(wait=True)
    first.checkpoints.close()
    resumed = unfreezing(mirrored(1), tmp_path, seed=1)
    resumed.restore()
    assert not all(resumed.step.trainable_mask)
    resumed.train(6)
    for mine, other in zip(state(resumed).values(), state(straight).values(), strict=True):
        np.testing.assert_array_equal(mine, other)
    resumed.checkpoints.close()


def fine_tuned(directory, *, seed=0, stop=6):
    """The program of a fine-tuning in two phases, in one run, up to step ``stop``. It saves there,
    and is started again as it is."""
    rates = ctl.schedule.Piecewise([3], [0.1, 0.01])
    loop = make_loop(directory=directory, seed=seed, schedule=rates)
    loop.restore()
    for parts, until in (([head(loop)], 3), (None, 6)):
        loop.train_only(parts)
        loop.train(min(until, stop), total=6)
        if loop.global_step == stop:
            break
    loop.save(wait=True)
    return loop


@functools.cache
def uninterrupted():
    """The state after both phases of one run."""
    with tempfile.TemporaryDirectory() as directory:
        straight = fine_tuned(directory)
        straight.checkpoints.close()
    assert straight.history.steps[0] <= 3 < straight.history.steps[-1] == 6
    return state(straight)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [2, 3, 5])
def test_two_phases_are_one_run(tmp_path, pause):
    """Steps, history, slots and checkpoints go on, and a program that is stopped in either phase
    goes on with the same bits."""
    first = fine_tuned(tmp_path, stop=pause)
    body = first.step.model.layers[0].kernel.numpy()
    first.checkpoints.close()
    resumed = fine_tuned(tmp_path, seed=1)
    assert [saved.step for saved in resumed.checkpoints.all()] == [pause, 6]
    for mine, other in zip(state(resumed).values(), uninterrupted().values(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert (body != resumed.step.model.layers[0].kernel.numpy()).any()
    resumed.checkpoints.close()


def test_a_start_without_a_checkpoint_keeps_what_was_chosen(tmp_path):
    loop = make_loop(directory=tmp_path)
    loop.train_only([head(loop)])
    assert loop.restore() is None
    assert loop.step.trainable_mask == (False, False, True, True)
    loop.train(1)
    loop.save(wait=True)
    loop.train_only([loop.step.model])
    loop.restore()
    assert loop.step.trainable_mask == (False, False, True, True)
    loop.checkpoints.close()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda loop: [], "train_only needs a list of layers or variables"),
        (lambda loop: head(loop), "train_only needs a list of layers or variables"),
        (
            lambda loop: [keras.layers.Dropout(0.5, name="drop")],
            "drop has no variable that the step",
        ),
        (lambda loop: [mlp()], "has no variable that the step"),
    ],
)
def test_what_cannot_be_trained_is_refused(parts, message):
    loop = make_loop()
    with pytest.raises(UsageError, match=message):
        loop.train_only(parts(loop))
