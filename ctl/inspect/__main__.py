"""The command ``ctl.inspect``: runs a sub-command with the rest of the command line.

Each sub-command is a module with a function ``run``, as is `ctl.train`.
"""

from __future__ import annotations

from ctl.flags.parsing import run_one_of

# Name -> (module, line in --help).
COMMANDS = {
    "plan": ("ctl.inspect.commands.plan", "what a step will move, without running it"),
    "predict": ("ctl.inspect.commands.predict", "time and efficiency on 2 to 100,000 replicas"),
    "run": ("ctl.inspect.commands.run", "runs some steps: where their time goes, who is late"),
    "merge": ("ctl.inspect.commands.merge", "joins the measurements of several workers"),
    "time": ("ctl.inspect.commands.time_spent", "where the time of a run went, restarts included"),
    "hang": ("ctl.inspect.commands.hang", "names the worker that kept a run waiting"),
}

_USAGE = """
Inspects the all-reduce of a training run.

  python -m ctl.inspect plan --replicas=2              # flags as for ctl.train
  python -m ctl.inspect predict --measured=/tmp/run --link=link.json
  python -m ctl.inspect run --replicas=2 --steps=20    # and so here
  python -m ctl.inspect time /tmp/run                  # a --model_dir
  python -m ctl.inspect hang /tmp/ctl-workers          # and so here

Each has its own --help: python -m ctl.inspect plan --help
"""


def run() -> None:
    """Runs the command line; also installed as ``ctl-inspect``."""
    run_one_of(COMMANDS, _USAGE)


if __name__ == "__main__":
    run()
