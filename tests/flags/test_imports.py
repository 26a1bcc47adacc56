"""Code of the user's that a command line names: found before it is parsed."""

from __future__ import annotations

import sys

import pytest
from absl import flags

from ctl.errors import UsageError
from ctl.flags import imports


@pytest.fixture
def values(monkeypatch):
    """The flags of a command that takes --step and --dataset, and no --model."""
    values = flags.FlagValues()
    for name in ("step", "dataset", "other"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_string("flagfile", "", "", flag_values=values)
    monkeypatch.setattr(imports.flags, "FLAGS", values)
    return values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--step=a.b:C", "--dataset=mnist"], {"step": "a.b:C"}),
        (["-step", "a:C", "--dataset", "a:f"], {"step": "a:C", "dataset": "a:f"}),
        (["--temperature", "0.5", "word", "--step=a:C"], {"step": "a:C"}),  # not known yet
        (["--step=a:C", "--step=a:D"], {"step": "a:D"}),
        (["--model=a:f", "--other=a:f", "--step"], {}),
        (["--", "--step=a:C"], {}),
        (["--step=mnist:3.0.1"], {}),
    ],
    ids=" ".join,
)
def test_named(values, arguments, expected):
    assert imports.named(arguments) == expected


def test_named_in_a_file(values, tmp_path):
    (tmp_path / "flags").write_text("# mine\n--step=a:C\n")
    assert imports.named([f"--flagfile={tmp_path}/flags"]) == {"step": "a:C"}
    with pytest.raises(flags.Error):
        imports.named(["--flagfile=/nonexistent/no"])


MODULES = {
    "users_fine": "def function(): pass\nnumber = 3",
    "users_missing": "import no_such_package",
    "users_error": "\n\n1 / 0",
    "users_syntax": "def",
    "users_seed": "from absl import flags\nflags.DEFINE_integer('verbosity', 0, '')",
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot import the step .*no_such_module.*PYTHONPATH"),
        ("users_missing:f", "cannot import the step .*no_such_package"),
        ("users_error:f", r"ZeroDivisionError: division by zero \(.*users_error.py:3\)"),
        ("users_syntax:f", r"SyntaxError: .*users_syntax.py, line 1"),
        ("users_seed:f", "The flag 'verbosity' is defined twice.* Rename yours"),
        ("users_fine:f", "cannot find the step .*: users_fine has no class or function 'f'"),
        ("users_fine:number", "users_fine has no class or function 'number'"),
    ],
)
def test_what_cannot_be_imported_is_one_line(tmp_path, monkeypatch, name, message):
    monkeypatch.syspath_prepend(tmp_path)
    for module, source in MODULES.items():
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UsageError, match=message) as caught:
        imports.find("step", name)
    assert "\n" not in str(caught.value)
    assert callable(imports.find("step", "users_fine:function"))
