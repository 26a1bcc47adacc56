"""The class, sources and settings of a step, which workers compare and checkpoints record."""

from __future__ import annotations

import functools
import importlib
import sys
import types

import keras
import pytest
from helpers import CLASSES, FEATURES, make_loop, mlp

from ctl.base.differences import differences
from ctl.control import agreement, source_hash
from ctl.distributed import workers
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
    return source_hash.identity(make_loop(step_class=step_class, **options).step)


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
        names = (
            f"users_steps:Mine, not by {source_hash.class_name(make_loop(step_class=other).step)}:"
        )
        assert names in str(refused.value) and "\n" not in str(refused.value)


def hidden(activation: str = "relu", units: int = 8) -> keras.Model:
    layers = keras.layers.Dense(units, activation), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input([FEATURES]), *layers])


def test_the_modules_of_the_user(module, tmp_path, monkeypatch):
    """By name, wherever they are; of ctl, of what is installed and of Python, none."""
    helper = module("users_helper", "def scale(x): return 2 * x")
    script = module("users_script", "import users_helper")
    before = source_hash.of_modules()
    assert {"users_helper", "users_script", "test_source_hash", "helpers"} <= before.keys()
    names = {name.partition(".")[0] for name in before}
    assert not {"ctl", "keras", "numpy", "absl", "json", "pytest", "_pytest"} & names
    assert not [name for name in before if "autograph_generated" in name]
    monkeypatch.setitem(sys.modules, "__main__", script)  # as `python users_script.py`
    assert source_hash.of_modules() == before
    for folder, source, changed in (
        ("same", "def scale(x): return 2 * x", []),
        ("other", "def scale(x): return x", ["users_helper"]),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "users_helper.py").write_text(source)
        monkeypatch.setattr(helper, "__file__", str(tmp_path / folder / "users_helper.py"))
        assert list(differences([before, source_hash.of_modules()])) == changed


def test_workers_compare_what_the_model_computes(module, monkeypatch):
    """Not the numbers in Keras's names: a worker may have made other models before."""
    compared = []
    monkeypatch.setattr(workers, "check_agreement", lambda _, *facts: compared.append(facts))
    monkeypatch.setattr(workers, "barrier", lambda *_: None)
    helper = module("users_helper", "def scale(x): return 2 * x")
    for activation in ("relu", "tanh"):
        loop = make_loop(model=functools.partial(hidden, activation))
        agreement.agree(loop.step, loop.dataset, lambda: None, loop.plan)
    (ours, modules), (_, plan), (theirs, _), _ = [(*one, {})[:2] for one in compared]
    assert differences([ours, theirs]) == {"layer dense: activation": ["relu", "tanh"]}
    assert ours["the version of Keras"] == keras.__version__
    assert f"the source of the module {helper.__name__}" in modules and not plan


def test_a_resume_says_what_computes_otherwise(module, tmp_path, warnings_of):
    """A model may be made again in one process, where Keras gives its layers other names."""
    helper = module("users_helper", "def scale(x): return 2 * x")
    makes = [functools.partial(hidden, activation) for activation in ("relu", "relu", "tanh")]
    for number, make in enumerate(makes):
        if number == 2:
            other = tmp_path / "other.py"
            other.write_text("def scale(x): return x")
            helper.__file__ = str(other)
        loop = make_loop(model=make, directory=tmp_path / "checkpoints")
        assert (loop.restore() is None) == (number == 0)
        loop.save()
        loop.checkpoints.close()
        said = [warning for warning in warnings_of() if "code" in warning]
        assert len(said) == (number == 2)
    assert said[0].endswith(
        'step-0000000000 was written by other code: layer dense: activation was "relu", is "tanh"; '
        "the source of the module users_helper; the run continues with the present code"
    )


def test_code_by_which_a_checkpoint_does_not_fit_is_in_its_error_alone(tmp_path, warnings_of):
    loop = make_loop(model=hidden, directory=tmp_path / "checkpoints")
    loop.save()
    loop.checkpoints.close()
    wider = functools.partial(hidden, units=9)
    loop = make_loop(model=wider, directory=tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="fit: layer dense: units was 8, is 9; model.0. is"):
        loop.restore()
    loop.checkpoints.close()
    assert not [warning for warning in warnings_of() if "code" in warning]
