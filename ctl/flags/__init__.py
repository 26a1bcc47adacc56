"""Command lines: parsing, groups of flags, and checks before TensorFlow is loaded.

For a command of one's own: `run_command` runs it, ``training.define_flags()`` defines the flags of
`ctl.train`, `group` adds a heading of ``--help``, and `check_flags` a check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.flags import training
    from ctl.flags.parsing import check_flags, group, run_command

__all__ = ["check_flags", "group", "run_command", "training"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    dict.fromkeys(("check_flags", "group", "run_command"), "ctl.flags.parsing"),
)
