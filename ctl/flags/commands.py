"""Commands with sub-commands: `ctl` and `ctl.inspect`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

from ctl.base import __version__
from ctl.base.names import check_name
from ctl.flags.parsing import exit_codes


def run_one_of(commands: Mapping[str, tuple[str, str]], usage: str) -> None:
    """Runs the sub-command that the command line names first, with the rest of the command line.

    Without a name, prints ``usage`` and the sub-commands; with ``--version``, the version of ctl.

    Args:
        commands: by name: a module with a function ``run``, and a line that describes it.
        usage: the first part of ``--help``.

    Raises:
        SystemExit: the sub-command is unknown (2), or help or version were printed (0).
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in commands:
        module, _ = commands[name]
        sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
        importlib.import_module(module).run()
        return
    with exit_codes():
        if name.lstrip("-") in ("h", "help", "helpshort", "helpfull"):
            width = max(map(len, commands))
            lines = [f"  {name:<{width}}  {what}" for name, (_, what) in commands.items()]
            print("\n".join([usage.strip(), "", *lines]))
        elif name == "--version":
            print(f"ctl {__version__}")
        else:
            check_name("command", name, commands)
