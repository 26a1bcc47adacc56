"""Who writes what Keras or Lightning would take is told what ctl takes."""

from __future__ import annotations

import pytest
from helpers import make_loop

import ctl
from ctl.base.foreign_names import ARGUMENTS, METHODS
from ctl.errors import UsageError


@pytest.fixture(scope="module")
def loop():
    return make_loop()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument(loop, name):
    for function in (ctl.Loop, loop.train, loop.train_and_evaluate):
        where = "Loop.__init__" if function is ctl.Loop else f"Loop.{function.__name__}"
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


def test_other_names_are_python_s(loop):
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'spam'$"):
        loop.train(1, spam=2)
    with pytest.raises(AttributeError, match="'Loop' object has no attribute 'spam'$"):
        loop.spam  # noqa: B018
