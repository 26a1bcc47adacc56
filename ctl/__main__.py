"""The command ``ctl``: lists the commands, and runs one with the rest of the command line."""

from __future__ import annotations

from ctl.flags.parsing import run_one_of

# Name -> (module, line in --help).
COMMANDS = {
    "train": ("ctl.train", "trains; the same command again resumes"),
    "evaluate": ("ctl.evaluate", "evaluates a checkpoint of a run, or an exported model"),
    "compare": ("ctl.compare", "compares runs: flags that differ, results, learning curves"),
    "schedule": ("ctl.schedule.plot", "prints and draws a learning rate schedule"),
    "launch": ("ctl.launch", "starts the workers of a job on this machine, and restarts them"),
    "doctor": ("ctl.doctor.__main__", "looks for what would stop a job or make it slow"),
    "lr_range": ("ctl.recipes.lr_range", "tells which learning rates a model can train with"),
    "population": ("ctl.recipes.population", "trains several seeds: how much of a result is luck"),
    "inspect": ("ctl.inspect.__main__", "inspects the all-reduce of a training"),
    "completion": ("ctl.flags.completion", "prints a script that completes flags in a shell"),
}

_USAGE = """
Custom training loops for TensorFlow.

  python -m ctl train --model_dir=/tmp/run     # the same as python -m ctl.train
  python -m ctl train --help                   # the flags of a command
  python -m ctl --version
"""


def run() -> None:
    """The command line, also installed as ``ctl``."""
    run_one_of(COMMANDS, _USAGE)


if __name__ == "__main__":
    run()
