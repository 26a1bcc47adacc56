"""ctl.schedule against float64 formulas, in graphs and in Keras; its flags; its picture."""

from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from ctl import schedule
from ctl.errors import UsageError
from ctl.flags import durations
from ctl.flags.durations import SCHEDULES
from ctl.flags.groups import define_schedule_flags, schedule_arguments
from ctl.schedule import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Piecewise,
    Plateau,
    Polynomial,
    Schedule,
    make_schedule,
    schedules,
)

BILLION = 10**9
PI = np.float64(math.pi)


def warm(step, warmup):
    return min(1.0, (step + 1) / (warmup + 1)) if warmup else 1.0


# The formulas, with the arguments of the schedules.


def constant(step, rate, warmup_steps=0):
    return warm(step, warmup_steps) * rate


def cosine(step, rate, total, warmup_steps=0, end_learning_rate=0.0):
    left = max(total - max(step, warmup_steps), 0) / (total - warmup_steps)
    # 1 - cos(a) = 2 sin(a/2)^2: the textbook form loses its digits where the rate goes to 0.
    decayed = (rate - end_learning_rate) * np.sin(PI / 2 * left) ** 2
    return warm(step, warmup_steps) * (end_learning_rate + decayed)


def polynomial(step, rate, total, warmup_steps=0, end_learning_rate=0.0, power=1.0):
    left = max(total - max(step, warmup_steps), 0) / (total - warmup_steps)
    decayed = (rate - end_learning_rate) * np.power(left, power)
    return warm(step, warmup_steps) * (end_learning_rate + decayed)


def exponential(step, rate, decay, every, warmup_steps=0):
    decayed = rate * np.power(decay, max(step - warmup_steps, 0) / every)
    return warm(step, warmup_steps) * decayed


def inverse_sqrt(step, rate, warmup_steps=0):
    rising, falling = (step + 1) / (warmup_steps + 1), np.sqrt((warmup_steps + 1) / (step + 1))
    return rate * min(rising, falling)


def piecewise(step, boundaries, values, warmup_steps=0):
    passed = sum(step >= boundary for boundary in boundaries)
    return warm(step, warmup_steps) * values[passed]


def case(kind, formula, *arguments, **options):
    return kind(*arguments, **options), lambda step: formula(step, *arguments, **options)


W, FAR = 1000, 2**24 + 1  # FAR is the first whole number that a float32 cannot hold.
TO_A_TENTH = {"end_learning_rate": 0.1, "power": 2.5}
CASES = {
    "constant": case(Constant, constant, 0.3),
    "constant warm": case(Constant, constant, 0.3, warmup_steps=W),
    "constant long warm": case(Constant, constant, 0.3, warmup_steps=FAR),
    "piecewise": case(Piecewise, piecewise, [W, FAR, BILLION], [1e-1, 1e-2, 1e-3, 1e-4]),
    "piecewise warm": case(Piecewise, piecewise, [W + 1, FAR], [1e-1, 1.0, 0.0], warmup_steps=W),
    "cosine": case(Cosine, cosine, 1e-3, BILLION),
    "cosine warm": case(Cosine, cosine, 1e-3, FAR, end_learning_rate=1e-5, warmup_steps=W),
    "line": case(Polynomial, polynomial, 2.0, BILLION),
    "polynomial warm": case(Polynomial, polynomial, 2.0, FAR, **TO_A_TENTH, warmup_steps=W),
    "exponential": case(Exponential, exponential, 0.1, 0.97, 10**7),
    "exponential warm": case(Exponential, exponential, 1e-6, 10.0, BILLION // 4, warmup_steps=W),
    "inverse sqrt": case(InverseSqrt, inverse_sqrt, 0.1),
    "inverse sqrt warm": case(InverseSqrt, inverse_sqrt, 0.1, warmup_steps=W),
}
ALL = pytest.mark.parametrize(("schedule", "reference"), CASES.values(), ids=CASES.keys())
STEPS = sorted(
    {max(0, at + d) for at in (0, W, FAR, BILLION) for d in (-2, -1, 0, 1, 2)}
    | {int(step) for step in np.geomspace(1, 2 * BILLION, 60)}
)


@pytest.mark.parametrize("jit_compile", [False, True])
@ALL
def test_formula_at_every_scale(schedule, reference, jit_compile):
    """The float64 formula, right to the last bit of a float32 or the next, under XLA too."""
    call = tf.function(
        schedule, input_signature=[tf.TensorSpec([], tf.int64)], jit_compile=jit_compile
    )
    got = np.array([call(tf.constant(step, tf.int64)) for step in STEPS])
    expected = np.array([np.float32(reference(step)) for step in STEPS])
    assert got.dtype == np.float32
    np.testing.assert_array_max_ulp(got, expected, maxulp=1)


@ALL
def test_any_kind_of_step(schedule, reference):
    expected = np.float32(reference(1500))
    variables = tf.Variable(1500, dtype=tf.int64), keras.Variable(1500, dtype="int64")
    for step in (1500, tf.constant(1500), *variables):
        rate = schedule(step)
        assert rate.shape == () and rate.dtype == tf.float32
        np.testing.assert_array_max_ulp(rate.numpy(), expected, maxulp=1)


@ALL
def test_in_a_loop_on_the_device(schedule, reference):
    step = tf.Variable(W - 5, dtype=tf.int64)

    @tf.function
    def total():
        result = tf.constant(0.0)
        for _ in tf.range(10):
            result += schedule(step)
            step.assign_add(1)
        return result

    expected = sum(reference(s) for s in range(W - 5, W + 5))
    assert float(total()) == pytest.approx(expected, rel=1e-6)


@ALL
def test_keras_keeps_it(schedule, reference):
    text = json.dumps(keras.saving.serialize_keras_object(schedule))
    assert keras.saving.deserialize_keras_object(json.loads(text)) == schedule
    optimizer = keras.optimizers.SGD(schedule)
    again = keras.optimizers.SGD.from_config(optimizer.get_config())
    variable = keras.Variable(0.0)
    again.build([variable])
    for _ in range(3):
        again.apply([tf.constant(1.0)])
    assert float(variable) == pytest.approx(-sum(reference(s) for s in range(3)), rel=1e-5)


def test_on_replicas(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        step = tf.Variable(5, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    schedule = Cosine(1e-3, 100, warmup_steps=10)
    durations = tf.function(lambda: strategy.run(lambda: schedule(step)))().values
    assert [float(rate) for rate in durations] == [float(schedule(5))] * 2


def test_saved_with_a_model(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    schedule = Piecewise([3, 7], [1e-3, 1e-4, 1e-5], warmup_steps=2)
    model.compile(keras.optimizers.Adam(schedule), "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()


def test_the_classic_epochs():
    """1e-3 before epoch 3, 1e-4 before epoch 7, 1e-5 after, with batches that straddle epochs."""
    per_epoch = 60_000 / 128  # 468.75: epoch 3 begins within step 1406, epoch 7 within step 3281.
    pieces = {"boundaries": ["3ep", "7ep"], "values": ["1e-3", "1e-4", "1e-5"]}
    schedule = make_schedule("piecewise", **pieces, steps_per_epoch=per_epoch)
    assert schedule == Piecewise([1407, 3282], [1e-3, 1e-4, 1e-5])
    assert [float(schedule(step)) for step in (0, 1406, 1407, 3281, 3282, 5625)] == pytest.approx(
        [1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5]
    )


@pytest.mark.parametrize(
    ("duration", "per_epoch", "steps"),
    [
        ("500", None, 500),
        (500, None, 500),
        ("1e4", None, 10_000),
        ("0", None, 0),
        ("0.5ep", 156.0, 78),
        (".5ep", 156.25, 79),
        ("3ep", 156.25, 469),
        ("4ep", 156.25, 625),
        ("2.ep", 10, 20),
        ("0ep", 10, 0),
        # Whole products that floating point puts a little above or below.
        ("97ep", 60_000 / 97, 60_000),
        ("49ep", 1 / 49, 1),
        ("0.1ep", 30.0, 3),
        ("1e3ep", 1e6, 10**9),
    ],
)
def test_durations(duration, per_epoch, steps):
    assert durations.steps_from("x", duration, per_epoch) == steps


@pytest.mark.parametrize(
    "text", ["", "ep", "-5", "3x", "3 ep s", "nan", "inf", "1e", "0x10", "1,2"]
)
def test_not_durations(text):
    with pytest.raises(UsageError, match="--warmup: .* is not a duration: write .*500.*0.5ep"):
        durations.steps_from("--warmup", text, 10.0)


def test_durations_that_need_more():
    with pytest.raises(UsageError, match=r"whole numbers, got 0.5: .*write ep \(0.5ep\)"):
        durations.steps_from("x", "0.5", 10.0)
    with pytest.raises(UsageError, match="length of an epoch is unknown"):
        durations.steps_from("x", "3ep", None)


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 0.1), ("linear", 0.1 * 16), ("sqrt", 0.1 * 4)]
)
def test_scaling(rule, expected):
    assert durations.scale_learning_rate(0.1, 4096, 256, rule) == pytest.approx(expected)
    rates = {"learning_rate": 0.1, "end_learning_rate": 0.01}
    scaled = make_schedule("cosine", **rates, total_steps=10, global_batch_size=4096, scaling=rule)
    assert scaled.learning_rate == pytest.approx(expected)
    assert scaled.end_learning_rate == pytest.approx(expected / 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 8, 8, "linear"), "learning rate must be a number of at least 0, got -0.1"),
        ((0.1, 0, 8, "linear"), "global batch size must be above 0, got 0"),
        ((0.1, 8, -8, "none"), "base batch size must be above 0, got -8"),
        ((0.1, 8, 8, "lineal"), "unknown scaling rule 'lineal': did you mean 'linear'"),
    ],
)
def test_scaling_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        durations.scale_learning_rate(*arguments)


def test_make_every_schedule():
    common = {"total_steps": 100, "steps_per_epoch": 10.0, "warmup_steps": "0.5ep"}
    made = {
        "constant": Constant(1e-3, warmup_steps=5),
        "piecewise": Piecewise([30, 50], [3.0, 2.0, 1.0], warmup_steps=5),
        "cosine": Cosine(1e-3, 100, warmup_steps=5),
        "polynomial": Polynomial(1e-3, 100, warmup_steps=5),
        "exponential": Exponential(1e-3, 0.95, 10, warmup_steps=5),
        "inverse_sqrt": InverseSqrt(1e-3, warmup_steps=5),
        "plateau": Plateau(1e-3, "loss", 0.1, 10, warmup_steps=5),
    }
    assert set(made) == set(SCHEDULES)
    kinds = {type(one) for one in made.values()}
    classes = [c for c in vars(schedules).values() if isinstance(c, type)]
    public = {c for c in classes if issubclass(c, Schedule) and not c.__name__.startswith("_")}
    assert kinds == public - {Schedule}
    assert {c.__name__ for c in public} | {"make_schedule"} == set(schedule.__all__)
    for name, expected in made.items():
        pieces = {"boundaries": ["30", "5ep"], "values": [3, 2, 1]} if name == "piecewise" else {}
        assert make_schedule(name, **common, **pieces) == expected
    assert make_schedule("polynomial", **common, power=2.0).power == 2.0
    assert make_schedule("exponential", **common, decay_rate=0.5, decay_steps="2ep") == Exponential(
        1e-3, 0.5, 20, warmup_steps=5
    )
    options = {"metric": "accuracy", "patience": 3, "decay_rate": 0.5, "end_learning_rate": 1e-5}
    assert make_schedule("plateau", **common, **options) == Plateau(
        1e-3, "accuracy", 0.5, 3, end_learning_rate=1e-5, warmup_steps=5
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_those_that_depend_on_the_length_are_named(name):
    pieces = {"boundaries": [30], "values": [2, 1]} if name == "piecewise" else {}
    short, long = (
        make_schedule(name, total_steps=n, steps_per_epoch=10.0, **pieces) for n in (50, 60)
    )
    assert (short != long) == (name in durations.OF_A_LENGTH)


def test_a_name_without_a_branch_is_not_another_schedule(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "linear", SCHEDULES["polynomial"])
    with pytest.raises(AssertionError, match="linear is in SCHEDULES, and has no branch"):
        make_schedule("linear", total_steps=10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1e-3), "learning rate must be a number of at least 0, got -0.001"),
        (lambda: Constant(math.inf), "learning rate .* got inf"),
        (
            lambda: Constant(0.1, warmup_steps=-1),
            "warm-up must be a whole number of steps >= 0, got -1",
        ),
        (lambda: Constant(0.1, warmup_steps=0.5), "warm-up must be .* got 0.5"),
        (lambda: Cosine(0.1, 10, warmup_steps=10), "warm-up of 10 .* shorter .* 10 steps"),
        (lambda: Cosine(0.1, 0), "number of steps must be above 0, got 0"),
        (lambda: Cosine(0.1, 10, end_learning_rate=-1), "end learning rate .* got -1"),
        (lambda: Polynomial(0.1, 10, power=0), "power must be above 0, got 0"),
        (lambda: Exponential(0.1, 0, 10), "decay rate must be above 0, got 0"),
        (lambda: Exponential(0.1, 0.5, 0), "decay steps must be above 0, got 0"),
        (lambda: Piecewise([7, 3], [1, 1, 1]), "increasing, got 7,3"),
        (lambda: Piecewise([3, 3], [1, 1, 1]), "increasing, got 3,3"),
        (lambda: Piecewise([0], [1, 1]), "above 0 and increasing, got 0"),
        (lambda: Piecewise([3], [1]), "one more rate than boundaries, got 1 rates and 1"),
        (lambda: Piecewise([3], [1, -1]), "rates must be a number of at least 0, got -1"),
        (lambda: Piecewise([3], [1, 1], warmup_steps=3), "warm-up of 3 .* before .* step 3"),
        (lambda: Plateau(0.1, factor=1.0), "factor must be between 0 and 1, got 1.0"),
        (lambda: Plateau(0.1, end_learning_rate=1.0), "end learning rate 1 is above .*, 0.1"),
        (lambda: make_schedule("cosin"), "unknown schedule 'cosin': did you mean 'cosine'"),
        (lambda: make_schedule("cosine"), "cosine schedule needs the number of training steps"),
        (lambda: make_schedule("piecewise"), "needs rates, e.g. --rates"),
        (lambda: make_schedule("exponential"), "1ep counts epochs, and the length of an epoch"),
        (lambda: make_schedule("constant", values=[1.0]), "--rates is for --schedule=piecewise"),
        (lambda: make_schedule("constant", scaling="sqrt"), "needs the global batch size"),
        (
            lambda: make_schedule("inverse_sqrt", warmup_steps=9, total_steps=9),
            "warm-up of 9 .* shorter",
        ),
    ],
)
def test_wrong_arguments_are_one_line(make, message):
    with pytest.raises(UsageError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def parse(*arguments):
    values = flags.FlagValues()
    define_schedule_flags(values)
    values(["program", *arguments])
    return values


def test_flags_make_the_schedule():
    values = parse(
        "--schedule=piecewise", "--boundaries=3ep,700", "--rates=1e-3,1e-4,1e-5", "--warmup=0.5ep"
    )
    made = make_schedule(total_steps=1000, steps_per_epoch=100.0, **schedule_arguments(values))
    assert made == Piecewise([300, 700], [1e-3, 1e-4, 1e-5], warmup_steps=50)
    values = parse("--schedule=polynomial", "--power=2", "--learning_rate=0.4", "--lr_scaling=sqrt")
    made = make_schedule(total_steps=9, global_batch_size=64, **schedule_arguments(values))
    assert made == Polynomial(0.2, 9, power=2.0)
    assert make_schedule(total_steps=9, **schedule_arguments(parse())) == Cosine(1e-3, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule=cosine --rates=1,2", "^--rates is for --schedule=piecewise, not for cosine$"),
        ("--boundaries=3", "^--boundaries is for --schedule=piecewise, not for cosine$"),
        ("--power=2", "^--power is for --schedule=polynomial, not for cosine$"),
        ("--decay_rate=.5", "^--decay_rate is for --schedule=exponential"),
        ("--decay_steps=5", "^--decay_steps is for --schedule=exponential"),
        (
            "--schedule=constant --end_learning_rate=0",
            r"^--end_learning_rate is for --schedule=cosine\|polynomial",
        ),
        ("--schedule=piecewise --rates=1 --learning_rate=1", "not for piecewise; give --rates$"),
        ("--schedule=piecewise", "^--schedule=piecewise needs --rates"),
        ("--schedule=piecewise --boundaries=3 --rates=1,2,3", "got 3 rates and 1 boundaries$"),
        ("--schedule=piecewise --boundaries=7ep,3ep --rates=1,2,3", "increasing, got 7ep,3ep$"),
        ("--schedule=piecewise --boundaries=3x --rates=1,2", "^--boundaries: '3x' is not"),
        ("--schedule=piecewise --boundaries=3 --rates=1,b", "^--rates must be a number .* got b$"),
        ("--learning_rate=-1", "^--learning_rate must be a number of at least 0, got -1.0$"),
        ("--schedule=cosine --end_learning_rate=nan", "^--end_learning_rate must be a number"),
        ("--schedule=exponential --decay_rate=0", "^--decay_rate must be above 0, got 0$"),
        ("--schedule=exponential --decay_steps=0ep", "^--decay_steps must be above 0"),
        ("--schedule=polynomial --power=-1", "^--power must be above 0, got -1$"),
        ("--warmup=half", "^--warmup: 'half' is not a duration"),
        ("--lr_scaling=linear --base_batch_size=0", "^--base_batch_size must be above 0"),
        ("--base_batch_size=64", "^--base_batch_size has no effect without --lr_scaling"),
    ],
)
def test_flag_errors(arguments, message):
    with pytest.raises(flags.Error, match=message) as caught:
        parse(*arguments.split())
    assert "\n" not in str(caught.value)


def test_boundaries_in_both_units_wait_for_the_length_of_an_epoch():
    arguments = schedule_arguments(
        parse("--schedule=piecewise", "--boundaries=3ep,200", "--rates=1,2,3")
    )
    assert make_schedule(steps_per_epoch=50.0, **arguments).boundaries == (150, 200)
    with pytest.raises(UsageError, match="increasing, got 300,200"):
        make_schedule(steps_per_epoch=100.0, **arguments)
