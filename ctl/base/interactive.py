"""Whether somebody looks at this process: at a terminal, in Python's shell, or in a notebook."""

from __future__ import annotations

import sys
from typing import Any

from absl import flags


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
