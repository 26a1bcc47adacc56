"""The command ``ctl.inspect run``: runs some steps and shows where their time goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags, logging

from ctl.base import console
from ctl.flags import training
from ctl.flags.parsing import group, run_command
from ctl.inspect import measure
from ctl.inspect.commands.merge import define_bandwidth_flag, show
from ctl.jobs import build, outputs

if TYPE_CHECKING:
    from ctl.inspect.measure.timeline import Timeline
    from ctl.loop import Loop

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Runs some steps and shows where their time goes: phases, packs, bandwidths, who is late.

  python -m ctl.inspect run --steps=20 --replicas=2
  python -m ctl.inspect run --steps=20 --profile --ablate --model=resnet20 --bytes_per_pack=262144

Takes the flags of ctl.train. With --model_dir, it writes model_dir/inspect/worker-I.json, a page
and a trace; checkpoints are neither read nor written. With --strategy=multi_worker, start it on
every worker.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Inspection"):
        flags.DEFINE_integer(
            "steps", 20, "Number of steps to measure.", lower_bound=1, upper_bound=10_000
        )
        flags.DEFINE_integer(
            "warm_up",
            measure.WARM_UP,
            "Number of steps before the measurement. TensorFlow schedules an operation by the "
            "cost of its first runs.",
            lower_bound=1,
        )
        flags.DEFINE_boolean(
            "profile",
            False,
            "Also run TensorFlow's profiler over these steps, and split the time of each pack "
            "further. This makes steps a few percent longer.",
        )
        flags.DEFINE_boolean(
            "ablate",
            False,
            "Also measure the exposed communication without time stamps: run the step with and "
            "without its all-reduce, in interleaved blocks.",
        )
        define_bandwidth_flag()
    training.define_flags(model_dir_required=False)
    run_command(main, _USAGE)


def main() -> None:
    """Warms up, measures some steps and shows them. Without marks, prints the step time only."""
    console.log_to_terminal()
    if not FLAGS.model_dir:
        return _main(None)
    with outputs.run_directory(FLAGS) as directory:
        _main(directory)


def _main(directory: Path | None) -> None:
    console.load_tensorflow()

    from ctl.base import tf_internals
    from ctl.distributed import workers
    from ctl.inspect.measure.ablate import ablate

    loop = build.make_loop(build.prepare())
    reason = tf_internals.why_no_timestamps()
    if reason:
        logging.warning("%s", reason)
        _time(loop)
    else:
        _look(loop, directory and directory / measure.FOLDER)
    if FLAGS.ablate:
        result = ablate(loop, steps=FLAGS.steps)
        if workers.is_chief(loop.strategy):
            print(result)
    workers.leave_together(loop.strategy)


def _look(loop: Loop, directory: Path | None) -> None:
    from ctl.distributed import workers
    from ctl.inspect.measure import window
    from ctl.inspect.measure.profile import profiled
    from ctl.inspect.session import Inspection

    with Inspection(loop, FLAGS.steps) as seen:
        logging.info("compiling and warming up: %d steps", FLAGS.warm_up)
        loop.train(FLAGS.warm_up, progress=False)
        with profiled(FLAGS.profile) as seen.traces:
            loop.train(FLAGS.warm_up + FLAGS.steps + 1, progress=False)
    if directory:
        multi_worker = workers.is_multi_worker(loop.strategy)
        mine = workers.cluster_of(loop.strategy).index if multi_worker else 0
        logging.info("stamps: %s", window.write(seen.windows[mine], directory))
    if workers.is_chief(loop.strategy):
        show(seen.timeline, FLAGS.bandwidth, directory, _input(loop, seen.timeline))


def _input(loop: Loop, timeline: Timeline) -> tuple[str, ...]:
    """Which part of the input is the slowest, where the input is the bound."""
    import numpy as np

    from ctl.inspect.measure.input_parts import explain, input_parts
    from ctl.inspect.measure.verdict import bounds

    if next(iter(bounds(timeline))) != "input":
        return ()
    logging.info("the input is the bound: timing its parts")
    return explain(input_parts(loop), float(np.median(timeline.step_seconds)))


def _time(loop: Loop) -> None:
    """Prints the time of a step, which needs no marks."""
    loop.train(FLAGS.warm_up, progress=False)
    start = time.perf_counter()
    loop.train(FLAGS.warm_up + FLAGS.steps, progress=False)
    seconds = (time.perf_counter() - start) / FLAGS.steps
    print(f"The step takes {seconds * 1e3:.2f} ms; its phases cannot be shown.")
