"""Imports code of the user's by its name: ``package.module:attribute`` or ``file.py:attribute``.

`ctl.flags.parsing` does so before it parses a command line, because a module may define flags.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Container, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags

from ctl.base import tracebacks
from ctl.base.names import NAMING, code_name, is_function_name
from ctl.errors import UsageError


def named(arguments: Sequence[str]) -> dict[str, str]:
    """The code that a command line names, by the flag, before it is parsed.

    Raises:
        absl.flags.Error: a file of ``--flagfile`` cannot be read.
    """
    values = _given(arguments, NAMING)
    return {name: value for name, value in values.items() if is_function_name(value)}


def seed(arguments: Sequence[str]) -> None:
    """Seeds all generators with the ``--seed`` of a command line, before it is parsed: a module may
    draw numbers as it is imported, such as the weights of a model."""
    import keras

    text = _given(arguments, ["seed"]).get("seed", "0")
    keras.utils.set_random_seed(int(text) % 2**32 if text.isdecimal() else 0)


def _given(arguments: Sequence[str], names: Container[str]) -> dict[str, str]:
    """The values that ``arguments`` give those of the flags ``names`` that there are."""
    values = {}
    following = iter(flags.FLAGS.read_flags_from_files(list(arguments)))
    for argument in following:
        if argument == "--":
            break
        name, given, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in names and name in flags.FLAGS:
            values[name] = value if given else next(following, "")
    return values


def find(what: str, name: str) -> Any:
    """Imports the class or function ``name``. ``what`` describes it in messages.

    The folder of a file is searched for modules from then on, as that of a script is.

    Raises:
        UsageError: its module cannot be imported or has no such class or function, or another
            module has the name of the file.
    """
    module_name, attribute, file = code_name(name)
    try:
        module = _run(file) if file else importlib.import_module(module_name)
    except UsageError as error:
        raise UsageError(f"cannot import the {what} {name!r}: {error}") from error
    except ImportError as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {error}{_where(error)}; is its folder on "
            "PYTHONPATH?"
        ) from error
    except flags.DuplicateFlagError as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {str(error).splitlines()[0]} Rename yours"
        ) from error
    except Exception as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {type(error).__name__}: {error}{_where(error)}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UsageError(
            f"cannot find the {what} {name!r}: {module_name} has no class or function {attribute!r}"
        )
    return found


def flags_of(package: str) -> list[str]:
    """The flags that modules of ``package`` have defined."""
    values = flags.FLAGS
    modules = {name: str(values.find_module_defining_flag(name)) for name in values._flags()}
    return [name for name, module in modules.items() if f"{module}.".startswith(f"{package}.")]


def search_current_folder() -> None:
    """Makes Python search the current folder for modules, as ``python -m`` does. An installed
    command searches its own folder first."""
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(1, os.getcwd())


def _run(file: Path) -> ModuleType:
    """The module of ``file``, which is run unless it has been imported."""
    name, folder = file.stem, str(file.parent)
    loaded = sys.modules.get(name)
    if loaded:
        other = getattr(loaded, "__file__", None) or "built in"
        if os.path.realpath(other) == os.path.realpath(file):
            return loaded
        raise UsageError(f"there is another module {name} ({other}): rename the file")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _where(error: Exception) -> str:
    """The user's line that raised ``error``, as `` (file:line)``; empty if there is none."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    theirs = [f"{file}:{line}" for file, line in frames if tracebacks.is_of_the_user(file)]
    return f" ({theirs[-1]})" if theirs else ""
