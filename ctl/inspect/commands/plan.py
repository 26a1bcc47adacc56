"""The command ``ctl.inspect plan``: traces the step that the flags describe and prints its plan."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from absl import flags

from ctl.base import console
from ctl.flags import training
from ctl.flags.parsing import group, run_command
from ctl.jobs import build

if TYPE_CHECKING:
    import tensorflow as tf

    from ctl.phases.plan.plan import Plan

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Lists what a training step moves between replicas, read from its graph: no step is run.

  python -m ctl.inspect plan --replicas=2
  python -m ctl.inspect plan --model=resnet20 --replicas=4 --bytes_per_pack=262144 --json

Takes the flags of ctl.train. With --strategy=multi_worker, start it on every worker, like the
training, or with ctl.launch; worker 0 prints.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Plan"):
        flags.DEFINE_boolean("json", False, "Print the plan as one JSON object.")
        flags.DEFINE_boolean(
            "xla",
            False,
            "Also show how XLA would combine the all-reduces if it compiled the whole step.",
        )
    training.define_flags(model_dir_required=False)
    run_command(main, _USAGE)


def main() -> None:
    """Traces the step and prints its plan, on worker 0."""
    console.log_to_terminal()
    console.load_tensorflow()

    from ctl.distributed.workers import is_chief, is_multi_worker, leave_together
    from ctl.phases.plan.table import show

    loop = build.make_loop(build.prepare())
    chief = is_chief(loop.strategy)
    plan = loop.plan(xla=FLAGS.xla and chief)
    if is_multi_worker(loop.strategy):
        plan = _compared(loop.strategy, plan)
    if chief and FLAGS.json:
        print(json.dumps(plan.to_json()))
    elif chief:
        show(plan)
    leave_together(loop.strategy)


def _compared(strategy: tf.distribute.Strategy, plan: Plan) -> Plan:
    """``plan``, with a lint if the plans of the workers differ."""
    from ctl.distributed.workers import all_gather
    from ctl.phases.plan.lints import differing
    from ctl.phases.plan.plan import from_json

    texts = all_gather(strategy, json.dumps(plan.to_json()).encode(), "comparing the plans")
    plans = [from_json(json.loads(text)) for text in texts]
    return dataclasses.replace(plan, lints=(*plan.lints, *differing(plans)))
