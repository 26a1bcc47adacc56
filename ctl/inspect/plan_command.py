"""The command ``ctl.inspect plan``: traces the step that the flags describe and prints its plan."""

from __future__ import annotations

import json

from absl import flags

from ctl import console, train
from ctl.flags import group
from ctl.flags import run as run_command

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Lists what a training step moves between replicas, read from its graph: no step is run.

  python -m ctl.inspect plan --replicas=2
  python -m ctl.inspect plan --model=resnet20 --replicas=4 --bytes_per_pack=262144 --json

Takes the flags of ctl.train. Under --strategy=multi_worker start it on every worker.
"""


def run() -> None:
    """The command line."""
    with group("Plan"):
        flags.DEFINE_boolean("json", False, "Print the plan as one JSON object.")
    train.define_flags(model_dir_required=False)
    run_command(main, _USAGE)


def main() -> None:
    """Traces, and prints the plan."""
    console.log_to_terminal()
    console.load_tensorflow()

    from ctl.inspect.plan_table import show

    loop = train.make_loop(*train.prepare())
    plan = loop.step.plan()
    if FLAGS.json:
        print(json.dumps(plan.to_json()))
    else:
        show(plan)
