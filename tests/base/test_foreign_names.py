"""Who writes what Keras or Lightning would take is told what ctl takes."""

from __future__ import annotations

import functools
import inspect
import re

import keras
import pytest
from helpers import make_loop

import ctl
from ctl.base.foreign_names import ARGUMENTS, METHODS, OF_HISTORY, OF_PACKAGES, OF_STEPS
from ctl.errors import UsageError


@pytest.fixture(scope="module")
def loop():
    return make_loop()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument(loop, name):
    for function in (ctl.Loop, loop.train, loop.train_and_evaluate):
        where = "Loop" if function is ctl.Loop else f"Loop.{function.__name__}"
        if function is not ctl.Loop and name in ("callbacks", "epochs"):
            continue
        with pytest.raises(UsageError) as error:
            function(1, 2, **{name: 3})
        assert str(error.value) == f"{where} has no argument {name}: {ARGUMENTS[name]}"


@pytest.mark.parametrize("name", METHODS)
def test_a_method(loop, name):
    assert not hasattr(loop, name)
    with pytest.raises(AttributeError) as error:
        getattr(loop, name)
    assert str(error.value) == f"'Loop' object has no attribute {name!r}: {METHODS[name]}"


def test_a_name_of_the_history_or_a_package(loop):
    packages = [(getattr(ctl, n[4:]) if n[4:] else ctl, of) for n, of in OF_PACKAGES.items()]
    for owner, known in [(loop.history, OF_HISTORY), *packages]:
        for name, advice in known.items():
            with pytest.raises(AttributeError, match=f"{name!r}: {re.escape(advice)}$"):
                getattr(owner, name)
    for advice in OF_PACKAGES["ctl.schedule"].values():
        assert hasattr(ctl.schedule, advice.rpartition(".")[2])
    with pytest.raises(AttributeError, match="module 'ctl' has no attribute 'spam'$"):
        ctl.spam  # noqa: B018
    with pytest.raises(AttributeError, match="'History' object has no attribute 'spam'$"):
        loop.history.spam  # noqa: B018


@pytest.mark.parametrize("name", [*OF_STEPS, "callbacks", "validation_data", "batch_size"])
def test_an_argument_of_a_step(name):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
    for step in (ctl.TrainStep, ctl.EvalStep):
        with pytest.raises(UsageError) as error:
            step(model, **{name: 3})
        assert str(error.value).startswith(f"{step.__name__} has no argument {name}: ")
    known = inspect.signature(ctl.TrainStep).parameters.keys()
    assert {*re.findall(r"call it (\w+)", str(error.value))} <= known


def test_other_names_are_python_s(loop):
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'spam'$"):
        loop.train(1, spam=2)
    with pytest.raises(AttributeError, match="'Loop' object has no attribute 'spam'$"):
        loop.spam  # noqa: B018
    with pytest.raises(
        TypeError, match=r"TrainStep\(\) got an unexpected keyword argument 'spam'$"
    ):
        ctl.TrainStep(keras.Sequential([keras.Input([2]), keras.layers.Dense(2)]), spam=2)


def test_a_close_name_is_offered(loop):
    class Own(ctl.TrainStep):
        test_foreign_rate: float = ctl.option(0.5, "A rate.")

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
    for function, wrong, right in (
        (loop.train, "epoch", "epochs"),
        (functools.partial(ctl.Loop, 1, 2), "action", "actions"),
        (functools.partial(ctl.EvalStep, model), "metric", "metrics"),
        (functools.partial(ctl.TrainStep, model), "clip_nrm", "clip_norm"),
        (functools.partial(Own, model), "test_foreign_rat", "test_foreign_rate"),
        (functools.partial(Own, model), "ema_deca", "ema_decay"),
    ):
        with pytest.raises(TypeError, match=f"'{wrong}'. Did you mean '{right}'\\?$"):
            function(**{wrong: 1})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ctl.schedule.Cosine(0.1, decay_steps=9), "Cosine.* Did you mean 'total_steps'"),
        (lambda: ctl.EarlyStopping("loss", patiance=9), "EarlyStopping.* Did you mean 'patience'"),
    ],
)
def test_other_classes(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def test_a_schedule_of_ones_own_takes_what_it_wants():
    class Own(ctl.schedule.Constant):
        def __init__(self, **options):
            super().__init__(options["height"])

    assert Own(height=0.5).get_config()["learning_rate"] == 0.5
