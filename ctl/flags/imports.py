"""Imports code of the user's by its name, ``package.module:attribute``.

`ctl.flags.parsing` does so before it parses a command line, because a module may define flags.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from ctl.base.names import is_function_name
from ctl.errors import UsageError

# The flags whose value may name code.
NAMING = ("step", "model", "dataset", "loss", "metrics")


def named(arguments: Sequence[str]) -> dict[str, str]:
    """The code that a command line names, by the flag, before it is parsed.

    Raises:
        absl.flags.Error: a file of ``--flagfile`` cannot be read.
    """
    values = {}
    following = iter(flags.FLAGS.read_flags_from_files(list(arguments)))
    for argument in following:
        if argument == "--":
            break
        name, given, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in NAMING and name in flags.FLAGS:
            values[name] = value if given else next(following, "")
    return {name: value for name, value in values.items() if is_function_name(value)}


def find(what: str, name: str) -> Any:
    """Imports the class or function ``name``. ``what`` describes it in messages.

    Raises:
        UsageError: its module cannot be imported or has no such class or function.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {error}; is its folder on PYTHONPATH?"
        ) from error
    except flags.DuplicateFlagError as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {str(error).splitlines()[0]} Rename yours"
        ) from error
    except Exception as error:
        raise UsageError(
            f"cannot import the {what} {name!r}: {type(error).__name__}: {error} ({_where(error)})"
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


def _where(error: Exception) -> str:
    """The line that raised ``error``, as ``file:line``."""
    at: Any = error.__traceback__
    while at.tb_next:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
