"""Whether somebody looks at this process: at a terminal, in Python's shell, or in a notebook."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from absl import flags

from ctl.errors import UsageError

_FLAG = re.compile(r"--(\w+)(?:=((?:[\w.]+(?:,[\w.]+)*)?))?")
_LISTS = "features", "labels"  # arguments that take lists
_SPLITS = "train_split", "eval_split"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_shell() -> bool:
    """Whether lines are entered one by one: in the shell of Python or IPython, or in a notebook."""
    return hasattr(sys, "ps1")


def is_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process. Does not import IPython."""
    ipython: Any = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def is_watched() -> bool:
    """Whether standard output is a terminal or the cell of a notebook."""
    try:
        return is_notebook() or sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def in_command() -> bool:
    """Whether a command of ctl that trains or evaluates runs, whose user gives flags, and no
    program."""
    return "model_dir" in flags.FLAGS


def another_directory() -> str:
    """What to choose where the directory of a run cannot be used."""
    return "another --model_dir" if in_command() else "another directory"


def names_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``function``, whose `UsageError` names flags if a command runs, and else the
    arguments of the same names."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            if in_command():
                raise
            raise UsageError(_FLAG.sub(_argument, str(error))) from error

    return call


def _argument(flag: re.Match[str]) -> str:
    name, value = flag.groups()
    if name == "loss":  # what the labels are follows from it
        kinds = {"mean_squared_error": "numbers", "binary_cross_entropy": "binary"}
        name, value = "loss_of", kinds.get(value or "")
    name = "split" if name in _SPLITS else name
    if not value:
        return f"{name}="
    return f"{name}={value.split(',') if name in _LISTS else repr(value)}"
