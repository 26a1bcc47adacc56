"""Updates that are alike share a function, and change no bit by it."""

from __future__ import annotations

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.phases import apply
from ctl.phases.apply import Updater
from ctl.phases.optimizers import PROVEN
from ctl.phases.shared_programs import ProgramCache, make_parts

pytestmark = pytest.mark.compiled_update


def train(strategy, updater, steps: int, without=()) -> list[np.ndarray]:
    """Updates with fixed gradients; returns the weights, slots, averages and counters."""
    rng = np.random.default_rng(0)
    gradients = [
        None if n in without else tf.constant(rng.normal(size=v.shape), tf.float32)
        for n, v in enumerate(updater.trainable_variables)
    ]

    @tf.function
    def run():
        def replica():
            tf.distribute.get_replica_context().merge_call(updater, args=(gradients, None))

        strategy.run(replica)

    for _ in range(steps):
        run()
    state = [v for group in updater.state().values() for v in group]
    state += [v.value for v in updater.variables]
    return [c.numpy() for v in state for c in strategy.experimental_local_results(v)]


@pytest.fixture
def traced(monkeypatch):
    """The number of variables of each function that was traced."""
    sizes, update = [], Updater._update_device

    def noted(self, indices, *args):
        sizes.append(len(indices))
        update(self, indices, *args)

    monkeypatch.setattr(Updater, "_update_device", noted)
    return sizes


def one_of_each(strategy) -> Updater:
    """A group for each proven optimizer, of two variables of each shape; one has a constraint."""
    with strategy.scope():
        groups, rng = [], np.random.default_rng(1)
        for kind in PROVEN:
            values = [rng.normal(size=size).astype("float32") for size in (3, (2, 2)) * 2]
            variables = [keras.Variable(v, name=f"v{n}") for n, v in enumerate(values)]
            optimizer = kind(0.1, weight_decay=0.1)
            optimizer.exclude_from_weight_decay(var_names=["v0", "v2"])
            groups.append((optimizer, variables))
        groups[0][1][0].constraint = keras.constraints.NonNeg()
        statistics = [keras.Variable(np.ones(2, "float32"), trainable=False) for _ in range(2)]
        variables = [v for _, of in groups for v in of]
        return Updater(groups, variables, statistics=statistics, ema_decay=0.9)


@pytest.mark.slow
def test_sharing_changes_no_bit(mirrored, monkeypatch, traced):
    """Every proven optimizer, with averages, and some variables without decay or gradient."""
    monkeypatch.setattr(apply, "_VARIABLES_PER_UPDATE", len(PROVEN) * 2)
    variables = len(PROVEN) * 4 + 2
    without = 4, 6  # of one shape
    shared = train(mirrored(1), one_of_each(mirrored(1)), 3, without)
    # Half of them, and the other half of the pair of the one with a constraint.
    assert sum(traced) == variables // 2 + 1
    traced.clear()
    monkeypatch.setattr(Updater, "_kind", lambda self, index, gradient: index)
    separate = train(mirrored(1), one_of_each(mirrored(1)), 3, without)
    assert sum(traced) == variables
    np.testing.assert_equal(shared, separate)


def test_a_hundred_alike_are_traced_once_and_those_of_a_user_each(mirrored, traced):
    class ByName(keras.optimizers.SGD):
        """A user's own, which treats each variable in another way."""

        def update_step(self, gradient, variable, learning_rate):
            number = variable.name.removesuffix(":0").removeprefix("v")
            super().update_step(gradient, variable, learning_rate * float(number))

    moved = []
    for kind, expected in ((keras.optimizers.SGD, 25), (ByName, 100)):
        with mirrored(1).scope():
            variables = [keras.Variable(np.zeros(2, "float32"), name=f"v{n}") for n in range(100)]
            updater = Updater(kind(0.5), variables)
        moved.append(np.stack(train(mirrored(1), updater, 1)[-100:]))
        assert sum(traced) == expected
        traced.clear()
    assert (np.abs(moved[0]).min(axis=1) > 0).all()
    np.testing.assert_allclose(moved[1], moved[0] * np.arange(100.0)[:, np.newaxis], rtol=1e-6)


def test_what_is_not_known_of_a_function_is_not_shared():
    """Here, the second variable of each function; the number of the call is common to them."""
    number, *variables = [tf.Variable(float(n)) for n in range(5)]
    runs = []

    def move(pair, amount):
        runs.append(pair)
        pair[0].assign_add(amount + number)
        pair[1].assign_sub(amount)

    def run(known: int) -> list[float]:
        compiled = ProgramCache()
        for pair in (variables[:2], variables[2:]):
            function = functools.partial(move, pair)
            compiled.call(function, "kind", pair[:known], [number], tf.constant(10.0))
        return [float(v) for v in variables]

    assert run(known=2) == [11, -8, 13, -6] and len(runs) == 1
    number.assign(1.0)
    assert run(known=1) == [22, -18, 24, -16] and len(runs) == 3


def test_parts_have_each_variable_once_and_few_differ():
    assert make_parts([1, 1, 2], 3) == [[0, 1, 2]]
    rng = random.Random(0)
    for _ in range(200):
        kinds = [rng.choice("abcde"[: rng.randint(1, 5)]) for _ in range(rng.randint(0, 90))]
        most = rng.randint(1, 40)
        parts = make_parts(kinds, most)
        assert sorted(i for part in parts for i in part) == list(range(len(kinds)))
        assert all(len(part) <= most for part in parts)

    def differ(kinds):
        parts = [tuple(kinds[i] for i in part) for part in make_parts(kinds, 32)]
        return len(parts), sum(map(len, set(parts)))

    assert differ("a" * 100) == (4, 25)
    layers = "".join(map(chr, range(16))) * 12  # a Transformer of 12 layers, with 16 variables each
    assert differ(layers) == (6, 32)
    assert differ("xyz" + layers) == (7, 35)
    assert differ(list(range(100))) == (4, 100)
