"""Options of a step: keyword, flag and attribute."""

from __future__ import annotations

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
from absl import flags

import ctl
from ctl.base import names
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.flags import groups


class Step(ctl.TrainStep):
    test_rate: float = ctl.option(0.5, "A number.", lower_bound=0.0)
    test_many: int = ctl.option(3, "A count.", upper_bound=9)
    test_on: bool = ctl.option(False, "Whether.")
    test_kind: str = ctl.option("a", "Which.", choices=["a", "b"])
    test_file: str | None = ctl.option(None, "A path.", type=str)


class Other(Step):
    test_more: float = ctl.option(1.0, "Of the subclass.")


class Evaluation(ctl.EvalStep):
    test_shown: int = ctl.option(8, "Of the evaluation.")


def make(kind=Step, **own):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
    return kind(model, keras.optimizers.SGD(0.1), **own)


def values(step) -> list:
    return [getattr(step, f"test_{name}") for name in ("rate", "many", "on", "kind", "file")]


def test_a_keyword_is_first_then_the_flag():
    assert values(make()) == [0.5, 3, False, "a", None]
    flags.FLAGS["test_rate"].parse("0.25")
    try:
        assert values(make(test_many=4)) == [0.25, 4, False, "a", None]
        assert make(test_rate=0.75).test_rate == 0.75
    finally:
        flags.FLAGS["test_rate"].unparse()
    given = make(Other, test_rate=1, test_on=True, test_file=Path("x"), test_more=2.0)
    assert [*values(given), given.test_more] == [1.0, 3, True, "a", "x", 2.0]
    assert Evaluation(given.model, test_shown=1).test_shown == 1


def test_flags_belong_to_the_module_of_the_class():
    assert flags.FLAGS.find_module_defining_flag("test_rate") == __name__
    assert flags.FLAGS.find_module_defining_flag("test_more") == __name__
    assert flags.FLAGS["test_kind"].parser.enum_values == ["a", "b"]


@pytest.mark.parametrize(
    "own, says",
    [
        ({"test_rate": -1}, "test_rate=-1"),
        ({"test_rate": float("nan")}, "finite"),
        ({"test_rate": "much"}, "test_rate='much'"),
        ({"test_rate": None}, "test_rate=None"),
        ({"test_many": 10}, "test_many=10"),
        ({"test_many": 0.5}, "test_many=0.5"),
        ({"test_on": 2}, "test_on=2"),
        ({"test_kind": "c"}, "test_kind='c'"),
    ],
)
def test_a_wrong_value_is_one_line(own, says):
    with pytest.raises(UsageError, match=says) as error:
        make(**own)
    assert "\n" not in str(error.value)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="Step.. got an unexpected keyword argument 'test_rat'"):
        make(test_rat=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'test_many'"):
        Evaluation(make().model, test_many=1)


@pytest.mark.parametrize("name", ["clip_norm", "loss", "metrics", "test_rate"])
def test_a_name_of_a_base_class_is_refused(name):
    with pytest.raises(UsageError, match=f"has '{name}': rename the option"):
        type("Mine", (Step,), {name: ctl.option(1.0, "Mine.")})


@pytest.mark.parametrize("name", ["learning_rate", "momentum"])
def test_a_flag_of_the_optimizer_is_refused(name):
    with pytest.raises(UsageError, match=f"Mine.{name}: --{name} is a flag of the optimizer"):
        type("Mine", (ctl.TrainStep,), {name: ctl.option(0.1, "Of nothing.")})


def test_all_flags_of_the_rate_are_known():
    values = flags.FlagValues()
    groups.define_schedule_flags(values)
    assert "learning_rate" in values and {*values} <= {*names.OPTIMIZER_FLAGS}


def test_a_class_that_hides_an_option_is_refused():
    with pytest.raises(UsageError, match="Mine.test_rate hides an option: give --test_rate"):
        type("Mine", (Step,), {"test_rate": 0.2})


def test_an_option_of_a_mixin():
    class Mixin:
        test_mixed: float = ctl.option(0.5, "Of a class that is no step.")

    class Mixed(Mixin, ctl.TrainStep):
        pass

    assert make(Mixed).test_mixed == 0.5
    assert make(Mixed, test_mixed=1.0).test_mixed == 1.0


def test_a_fixed_option_may_not_change():
    class Fixed(ctl.TrainStep):
        test_fixed: int = ctl.option(2, "Used up.", fixed=True)
        test_free: int = ctl.option(2, "Read in each trace.")

    step = make(Fixed)
    loop = ctl.Loop(
        step, InMemory((np.zeros([8, 2], "float32"), np.zeros(8, int)), global_batch_size=4)
    )
    loop.train(1)
    step.test_free = 3
    loop.train(2)
    step.test_fixed = 3
    with pytest.raises(UsageError, match="Fixed.test_fixed was changed from 2 to 3"):
        loop.train(3)


def test_a_default_of_another_type_is_refused():
    with pytest.raises(TypeError, match="needs a type="):
        ctl.option(None, "Nothing.")
    with pytest.raises(TypeError, match="bool, int, float or str"):
        ctl.option([1], "A list.")


def test_a_class_may_be_defined_again_and_another_may_not_share_its_flag():
    def define(default, name="Again"):
        body = {"test_again": ctl.option(default, "Twice."), "__module__": __name__}
        return type(name, (ctl.TrainStep,), body)

    define(1.0)
    assert make(define(2.0)).test_again == 2.0
    with pytest.raises(flags.DuplicateFlagError):
        define(3.0, name="Another")


def test_help_names_an_option_of_the_users(zygote, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import ctl\n\n\nclass Mine(ctl.TrainStep):\n"
        '    sharpness: float = ctl.option(0.5, "How sharp.", lower_bound=0.0)\n'
    )
    command = functools.partial(zygote.run, "ctl.train", "--step=mine:Mine", path=[tmp_path])
    shown = command("--help").stdout
    assert "--sharpness" in shown and "How sharp. (default: 0.5" in shown
    wrong = command("--model_dir=x", "--sharpness=-1", exit_code=2)
    assert "sharpness" in wrong.stderr.strip().splitlines()[-1]
