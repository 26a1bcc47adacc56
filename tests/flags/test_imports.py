"""Code of the user's that a command line names: found before it is parsed."""

from __future__ import annotations

import subprocess
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
        (["--step=../a-b c.py:C"], {"step": "../a-b c.py:C"}),
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files that import each other; afterwards, Python is as it was."""
    (tmp_path / "beside.py").write_text("number = 3")
    (tmp_path / "users-file.py").write_text("import beside\ndef function(): return beside.number")
    (tmp_path / "users_wrong.py").write_text("import keras\nkeras.layers.Dense(-1)\n")
    (tmp_path / "absl.py").write_text("def function(): pass")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("beside", "users-file", "users_wrong"):
        sys.modules.pop(name, None)


def test_a_file_is_imported_once_with_what_is_beside_it(folder, monkeypatch):
    found = imports.find("model", f"{folder}/users-file.py:function")
    assert found() == 3 and found.__module__ == "users-file"
    monkeypatch.chdir(folder)
    assert imports.find("model", "users-file.py:function") is found
    monkeypatch.setenv("HOME", str(folder))
    assert imports.find("model", "~/users-file.py:function") is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_wrong.py:f", r"ValueError: .*units=-1 \(\S+/users_wrong.py:2\)$"),
        ("absl.py:function", r"there is another module absl \(.*__init__.py\): rename the file"),
        ("users-file.py:g", "users-file has no class or function 'g'"),
    ],
)
def test_what_is_wrong_with_a_file(folder, name, message):
    """An error in a library names the line of the file."""
    for _ in range(2):
        with pytest.raises(UsageError, match=f"model '{folder}/{name}': .*{message}"):
            imports.find("model", f"{folder}/{name}")


def test_an_installed_command_searches_the_current_folder(tmp_path):
    """Its own folder is the first of ``sys.path``, in place of the current one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ctl-train").write_text("from ctl.train import run\nrun()\n")
    (tmp_path / "mine.py").write_text("def model(): pass\n")
    command = [sys.executable, tmp_path / "bin/ctl-train", "--model_dir=run", "--model=mine:mod"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    hint = "mine has no class or function 'mod'; did you mean 'model'?"
    assert done.stderr == f"cannot find the model 'mine:mod': {hint}\n"
