"""Each batch is played by the policy as it is, so the weights are those of a plain loop."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from references import assert_trains_as

from ctl.examples import reinforcement_learning as example

pytestmark = pytest.mark.slow
STEPS = 4


def plain_tensorflow(model: keras.Model) -> None:
    """One game, one update of Adam, and so on."""
    optimizer = keras.optimizers.Adam(0.01)
    for number in range(STEPS):
        game = example.play(model, number)
        with tf.GradientTape() as tape:
            right = tf.sigmoid(model(game["state"])[:, 0])
            chosen = tf.where(game["right"] == 1.0, right, 1.0 - right)
            loss = -tf.reduce_mean(game["advantage"] * tf.math.log(chosen))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)


def test_it_equals_plain_tensorflow():
    loop = example.make_loop()
    plain = keras.models.clone_model(loop.step.model)
    assert_trains_as(loop, plain, plain_tensorflow, steps=STEPS)


def test_a_game_begins_when_the_step_before_it_has_ended(monkeypatch):
    """The step of a small policy is so fast that a game which begins too early ends as it should,
    so the weights would tell it rarely."""
    play, steps = example.play, []

    def watched(policy, number):
        steps.append(loop.global_step)
        return play(policy, number)

    monkeypatch.setattr(example, "play", watched)
    loop = example.make_loop()
    loop.train(STEPS)
    assert steps == [*range(STEPS)]


def pushed(state: list[float], right: bool) -> list[float]:
    """One cart, as Gym's CartPole has it."""
    x, speed, angle, spin = state
    sine, cosine = math.sin(angle), math.cos(angle)
    mass_cart, mass_pole, half_length = 1.0, 0.1, 0.5
    mass, moment = mass_cart + mass_pole, mass_pole * half_length
    force = 10.0 if right else -10.0
    temp = (force + moment * spin**2 * sine) / mass
    turn = (9.8 * sine - cosine * temp) / (half_length * (4.0 / 3.0 - mass_pole * cosine**2 / mass))
    push = temp - moment * turn * cosine / mass
    return [x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn]


def test_a_cart_moves_as_that_of_gym():
    states = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    right = np.arange(9) % 2 == 0
    wanted = [pushed(state.tolist(), go) for state, go in zip(states, right, strict=True)]
    np.testing.assert_allclose(example.push(states, right), wanted, rtol=1e-5, atol=1e-6)


def test_an_advantage_is_how_much_longer_than_the_others_a_pole_stands(monkeypatch):
    """Poles that fall after 1, 2 and 4 moves: what is left is 4, 2, 1; 3, 1; 2; 1."""
    monkeypatch.setattr(example, "POLES", 3)
    falls = iter([(1, 0, 0), (1, 1, 0), (1, 1, 0), (1, 1, 1)])

    def push(states, right):
        return np.outer(np.array(next(falls)), [9.0, 0, 0, 0]).astype("float32")

    monkeypatch.setattr(example, "push", push)
    game = example.play(lambda states: tf.zeros([len(states), 1]), 0)
    left = np.array([1, 2, 4, 1, 3, 2, 1]) - np.array([7 / 3] * 3 + [2, 2, 2, 1])
    np.testing.assert_allclose(game["advantage"], left / left.std(), rtol=1e-4)
    assert [len(game[name]) for name in game] == [7, 7, 7]


def test_the_program_learns_to_balance(monkeypatch, capsys):
    monkeypatch.setattr(example, "STEPS", 20)
    example.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 20: a pole stands for ")
