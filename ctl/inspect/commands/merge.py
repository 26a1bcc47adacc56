"""The command ``ctl.inspect merge``: joins the files of all workers; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command
from ctl.inspect.show.results import define_bandwidth_flag

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Joins the files that `ctl.inspect run` wrote on each worker, model_dir/inspect/worker-I.json.

  python -m ctl.inspect merge /tmp/run/inspect

Prints the tables and the verdict, and writes report.html and trace.json to that directory.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Merge"):
        define_bandwidth_flag()
    run_command(main, _USAGE, takes_command=True)


def main(arguments: Sequence[str]) -> None:
    """Joins the windows of all workers, which are in the directory that ``arguments`` name.

    Raises:
        UsageError: not one directory, or its files are not the windows of one run.
        CheckpointError: the page or the trace cannot be written.
    """
    if len(arguments) != 1:
        raise UsageError("name one directory: python -m ctl.inspect merge /tmp/run/inspect")

    from ctl.inspect.measure.timeline import join
    from ctl.inspect.measure.window import read_all
    from ctl.inspect.show.results import show

    directory = Path(arguments[0])
    show(join(read_all(directory)), FLAGS.bandwidth, directory)
