"""Deferred rows, without a model: each optimizer against Keras, and against NumPy in float64."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.phases import deferred as module
from ctl.phases.deferred import Deferred, rule_of, why_not_lazy
from ctl.phases.optimizers import read_rows, update_rows, update_variable, with_rate

ROWS, WIDTH, UPDATES, TOUCHED = 200, 3, 1000, 12
EPSILON = 2.0**-23


def sgd(w, g, s, rate, update, momentum=0.0, nesterov=False):
    s["m"] = momentum * s.get("m", 0.0) - rate * g
    return w + (momentum * s["m"] - rate * g if nesterov else s["m"])


def adagrad(w, g, s, rate, update, initial_accumulator_value, epsilon):
    s["a"] = s.get("a", initial_accumulator_value) + g * g
    return w - rate * g / np.sqrt(s["a"] + epsilon)


def rmsprop(w, g, s, rate, update, rho, epsilon, momentum=0.0, centered=False):
    s["v"] = rho * s.get("v", 0.0) + (1 - rho) * g * g
    s["g"] = rho * s.get("g", 0.0) + (1 - rho) * g
    divisor = s["v"] - (s["g"] ** 2 if centered else 0.0) + epsilon
    s["m"] = momentum * s.get("m", 0.0) + rate * g / np.sqrt(divisor)
    return w - s["m"]


def adam(w, g, s, rate, update, beta_1, beta_2, epsilon):
    s["m"] = beta_1 * s.get("m", 0.0) + (1 - beta_1) * g
    s["v"] = beta_2 * s.get("v", 0.0) + (1 - beta_2) * g * g
    alpha = rate * np.sqrt(1 - beta_2**update) / (1 - beta_1**update)
    return w - alpha * s["m"] / (np.sqrt(s["v"]) + epsilon)


def ftrl(w, g, s, rate, update, l1, l2, beta):
    before = s.get("n", 0.125)
    s["n"] = before + g * g
    s["z"] = s.get("z", 0.0) + g - (np.sqrt(s["n"]) - np.sqrt(before)) / rate * w
    divisor = (beta + np.sqrt(s["n"])) / rate + 2 * l2
    return (np.clip(s["z"], -l1, l1) - s["z"]) / divisor


# Numbers that float32 has: Keras rounds some of them to it, for float64, too.
BETAS = {"beta_1": 0.875, "beta_2": 1 - 2**-10, "epsilon": EPSILON}
DECAY = {"weight_decay": 2**-5}
CASES = {
    "decay": ("SGD", sgd, DECAY),
    "momentum": ("SGD", sgd, {"momentum": 0.875}),
    "nesterov": ("SGD", sgd, {"momentum": 0.9375, "nesterov": True, **DECAY}),
    "adagrad": (
        "Adagrad",
        adagrad,
        {**DECAY, "initial_accumulator_value": 0.125, "epsilon": EPSILON},
    ),
    "rmsprop": ("RMSprop", rmsprop, {"rho": 0.875, "epsilon": EPSILON}),
    "rmsprop momentum": (
        "RMSprop",
        rmsprop,
        {"rho": 0.875, "momentum": 0.75, "centered": True, "epsilon": EPSILON},
    ),
    "ftrl": ("Ftrl", ftrl, {"l1": 2**-9, "l2": 2**-7, "beta": 0.25}),
    "adam": ("Adam", adam, BETAS),
    "adam, other betas": ("Adam", adam, {**BETAS, "beta_1": 0.75, "beta_2": 1 - 2**-7}),
    "adam, large epsilon": ("Adam", adam, {**BETAS, "epsilon": 2**-10}),
    "adamw": ("AdamW", adam, {**BETAS, **DECAY}),
}


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The table, and of each update rows (the first often, the last once in some hundreds), their
    gradients and a rate that warms up and falls."""
    random = np.random.default_rng(1)
    odds = 1.0 / np.arange(1, ROWS + 1) ** 1.2
    odds /= odds.sum()
    rows = np.stack([random.choice(ROWS, TOUCHED, False, odds) for _ in range(UPDATES)])
    sizes = 10.0 ** random.uniform(-6, 0, [ROWS, 1])  # some near epsilon
    gradients = random.normal(size=(UPDATES, TOUCHED, WIDTH)) * sizes[rows]
    steps = np.arange(UPDATES)
    rates = 0.01 * np.minimum(1.0, (steps + 1) / 100) * (1 + np.cos(np.pi * steps / UPDATES)) / 2
    table = random.normal(size=(ROWS, WIDTH)) * 0.1
    return table, rows, gradients.astype("float32"), rates.astype("float32")


def in_float64(formula, options) -> np.ndarray:
    weights, rows, gradients, rates = drawn()
    options, slots = dict(options), {}
    decay = options.pop("weight_decay", 0.0)
    for update in range(UPDATES):
        gradient, rate = np.zeros_like(weights), float(rates[update])
        gradient[rows[update]] = gradients[update]
        decayed = weights * (1 - decay * rate)
        weights = formula(decayed, gradient, slots, rate, update + 1, **options)
    return weights


def lazily_in_float64(formula, options) -> np.ndarray:
    """Each row has a life of its own: only its gradients move it."""
    weights, rows, gradients, rates = drawn()
    options, slots = dict(options), [{} for _ in range(ROWS)]
    decay = options.pop("weight_decay", 0.0)
    for update in range(UPDATES):
        rate = float(rates[update])
        for row, gradient in zip(rows[update], gradients[update].astype("float64"), strict=True):
            decayed = weights[row] * (1 - decay * rate)
            weights[row] = formula(decayed, gradient, slots[row], rate, update + 1, **options)
    return weights


def trained(kind: str, options, dtype: str, how: str) -> np.ndarray:
    """The table after all updates: of rows, `deferred` or `lazy`, or of `dense` gradients as Keras
    makes them."""
    table, rows, gradients, rates = map(tf.constant, drawn())
    names = {"l1": "l1_regularization_strength", "l2": "l2_regularization_strength"}
    options = {names.get(name, name): value for name, value in options.items()}
    if kind == "Ftrl":
        options["initial_accumulator_value"] = 0.125
    optimizer = getattr(keras.optimizers, kind)(0.01, **options)
    variable = keras.Variable(tf.cast(table, dtype), dtype=dtype, name="table")
    optimizer.build([variable])
    rule = rule_of(optimizer, variable)
    assert not isinstance(rule, str)
    late = Deferred(variable, optimizer, rule, tf.distribute.get_strategy())

    def update(number: tf.Tensor) -> None:
        numbers, gradient = rows[number], tf.cast(gradients[number], dtype)
        on = with_rate(optimizer, rates[number])
        slices = tf.IndexedSlices(gradient, numbers)
        if how == "deferred":
            update_rows(on, variable, slices, *late.read(numbers))
            late.note_update(numbers, rates[number])
        elif how == "lazy":
            update_rows(on, variable, slices, *read_rows(variable, optimizer, numbers))
        else:
            whole = tf.scatter_nd(numbers[:, tf.newaxis], gradient, [ROWS, WIDTH])
            update_variable(on, variable, whole)
        optimizer.iterations.value.assign_add(1)

    @tf.function
    def train(first: tf.Tensor, last: tf.Tensor) -> None:
        for number in tf.range(first, last):
            update(number)

    done = 0
    while done < UPDATES:
        last = min(UPDATES, done + late.make_room())
        train(tf.constant(done), tf.constant(last))
        done = last
    return (late.value() if how == "deferred" else variable.value).numpy()


@pytest.mark.parametrize("case", CASES)
def test_in_float64_it_equals_a_dense_loop_of_numpy(case):
    kind, formula, options = CASES[case]
    want, got = in_float64(formula, options), trained(kind, options, "float64", "deferred")
    assert np.abs(got - want).max() < 2e-8 * np.abs(want).max()


@pytest.mark.parametrize(
    "case", ["nesterov", "adagrad", "rmsprop momentum", "ftrl", "adam", "adamw"]
)
def test_in_float32_it_equals_dense_updates_of_keras(case):
    kind, _, options = CASES[case]
    want, got = (trained(kind, options, "float32", how) for how in ("dense", "deferred"))
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("case", ["nesterov", "rmsprop momentum", "ftrl", "adam", "adamw"])
def test_lazily_a_row_moves_by_its_own_gradients_only(case):
    kind, formula, options = CASES[case]
    want, got = lazily_in_float64(formula, options), trained(kind, options, "float64", "lazy")
    assert np.abs(got - want).max() < 2e-8 * np.abs(want).max()
    assert np.abs(got - in_float64(formula, options)).max() > 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("case", ["nesterov", "adamw"])
def test_equals_them_where_all_rows_are_brought_up_to_date_now_and_then(case, monkeypatch):
    monkeypatch.setattr(module, "HISTORY", 50)
    monkeypatch.setattr(module, "_ROWS_AT_A_TIME", 64)
    kind, formula, options = CASES[case]
    want, got = in_float64(formula, options), trained(kind, options, "float64", "deferred")
    assert np.abs(got - want).max() < 2e-8 * np.abs(want).max()


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (
            lambda: keras.optimizers.Ftrl(l2_shrinkage_regularization_strength=0.1),
            "its l2_shrinkage or weight_decay takes all rows",
        ),
        (lambda: keras.optimizers.Lamb(), "Lamb moves rows that have no gradient"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad keeps a maximum"),
        (lambda: keras.optimizers.Adam(beta_1=0.99, beta_2=0.9), "its moves do not fade"),
        (lambda: keras.optimizers.SGD(momentum=1.0), "a momentum of 1 does not fade"),
    ],
)
def test_says_what_cannot_be_deferred(optimizer, words):
    assert words in rule_of(optimizer(), keras.Variable(np.zeros([4, 2]), dtype="float32"))


def test_says_which_optimizers_are_not_lazy():
    assert why_not_lazy(keras.optimizers.Nadam()).startswith("Nadam is none of SGD, ")
    assert why_not_lazy(keras.optimizers.Adam(amsgrad=True)) is None


def test_half_precision_is_not_deferred():
    table = keras.Variable(np.zeros([4, 2]), dtype="bfloat16")
    assert rule_of(keras.optimizers.SGD(momentum=0.9), table) == "its type is bfloat16"
    assert rule_of(keras.optimizers.SGD(), table) is None


def test_a_changed_setting_is_refused():
    optimizer = keras.optimizers.SGD(momentum=0.9)
    variable = keras.Variable(np.zeros([4, 2]), dtype="float32", name="table")
    optimizer.build([variable])
    strategy = tf.distribute.get_strategy()
    table = Deferred(variable, optimizer, rule_of(optimizer, variable), strategy)
    table.check()
    optimizer.momentum = 0.5
    with pytest.raises(UsageError, match="SGD.momentum was changed from 0.9 to 0.5, and table is"):
        table.check()
