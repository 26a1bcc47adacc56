"""The class and the sources of a step, which workers compare and checkpoints record."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
from helpers import make_loop, mlp

from ctl.control import code
from ctl.errors import CheckpointError
from ctl.step import TrainStep

OWN = """
import ctl

class Mine(ctl.TrainStep):
    factor = 1.0

class Other(Mine):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(name, source)`` imports a module of the user's."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def make(name: str, source: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        return importlib.import_module(name)

    yield make
    for name in names:
        sys.modules.pop(name, None)


def identity(step_class, **options) -> dict[str, str]:
    return code.identity(make_loop(step_class=step_class, **options).step)


def test_the_name_of_the_class(module, monkeypatch):
    mine = module("users_names", OWN)
    assert identity(TrainStep)["step"] == "ctl:TrainStep"
    assert identity(mine.Mine)["step"] == "users_names:Mine"
    # A script that is imported later, as --step=users_names:Mine does.
    monkeypatch.setitem(sys.modules, "__main__", mine)
    monkeypatch.setattr(mine.Mine, "__module__", "__main__")
    assert identity(mine.Mine)["step"] == "users_names:Mine"


def test_the_hash_is_that_of_the_users_code(module):
    first = module("users_first", OWN)
    moved = module("users_moved", OWN)
    changed = module("users_changed", OWN.replace("1.0", "2.0"))

    def source(step_class, **options):
        return identity(step_class, **options)["source"]

    plain = source(TrainStep)
    assert source(first.Mine) == source(moved.Mine) != plain
    assert source(changed.Mine) != source(first.Mine)
    assert source(changed.Other) != source(first.Other)  # by what it inherits

    def loss(labels, logits):
        return logits[:, 0]

    assert source(TrainStep, loss_fn=loss) != plain


def test_another_class_does_not_restore(module, tmp_path):
    mine, directory = module("users_steps", OWN), tmp_path / "checkpoints"

    def restore(step_class):
        loop = make_loop(step_class=step_class, model=mlp, directory=directory)
        try:
            return loop.restore()
        finally:
            loop.checkpoints.close()

    loop = make_loop(step_class=mine.Mine, model=mlp, directory=directory)
    loop.save()
    loop.checkpoints.close()
    assert restore(mine.Mine).step == 0
    for other in (mine.Other, TrainStep):
        with pytest.raises(CheckpointError) as refused:
            restore(other)
        names = f"users_steps:Mine, not by {code.class_name(make_loop(step_class=other).step)}:"
        assert names in str(refused.value) and "\n" not in str(refused.value)
