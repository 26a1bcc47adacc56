"""The command ``ctl.inspect``: runs a sub-command with the rest of the command line.

Each sub-command is a module with a function ``run``, as is `ctl.train`.
"""

from __future__ import annotations

import importlib
import sys

from ctl.errors import UsageError
from ctl.flags.parsing import exit_codes

# Name -> (module, line in --help).
COMMANDS = {
    "plan": ("ctl.inspect.plan_command", "what a step will move; no step is run"),
    "predict": ("ctl.inspect.predict_command", "time and efficiency on 2 to 100,000 replicas"),
    "run": ("ctl.inspect.run_command", "runs some steps: where their time goes, who is late"),
    "merge": ("ctl.inspect.merge_command", "joins what several workers saw"),
    "hang": ("ctl.inspect.hang_command", "who kept the workers of a run waiting, after the fact"),
}

_USAGE = """
Sees through the all-reduce of a training run.

  python -m ctl.inspect plan --replicas=2              # flags as for ctl.train
  python -m ctl.inspect predict --measured=/tmp/run --link=link.json
  python -m ctl.inspect run --replicas=2 --steps=20    # and so here
  python -m ctl.inspect hang /tmp/ctl-workers          # a --model_dir

Each has its own --help: python -m ctl.inspect plan --help

"""


def run() -> None:
    """Runs the command line; also installed as ``ctl-inspect``.

    Raises:
        SystemExit: the sub-command is unknown.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        module, _ = COMMANDS[name]
        sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
        importlib.import_module(module).run()
    elif name.lstrip("-") in ("h", "help", "helpshort", "helpfull"):
        lines = [f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items()]
        with exit_codes():
            print("\n".join([_USAGE.strip(), "", *lines]))
    else:
        with exit_codes():
            raise UsageError(f"unknown sub-command {name!r}: choose one of {', '.join(COMMANDS)}")


if __name__ == "__main__":
    run()
