"""The command ``ctl.inspect merge``: joins the files of workers, anywhere, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ctl.errors import UsageError
from ctl.flags import group
from ctl.flags import run as run_command
from ctl.inspect.results import define_bandwidth_flag

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Joins what `ctl.inspect run` left on each worker, model_dir/inspect/worker-I.json.

  python -m ctl.inspect merge /tmp/run/inspect

Prints the tables and the verdict, and leaves report.html and trace.json in that directory.
"""


def run() -> None:
    """The command line."""
    with group("Merge"):
        define_bandwidth_flag()
    run_command(main, _USAGE, takes_command=True)


def main(arguments: Sequence[str]) -> None:
    """Reads, joins and shows."""
    if len(arguments) != 1:
        raise UsageError("name one directory: python -m ctl.inspect merge /tmp/run/inspect")

    from ctl.inspect.results import show
    from ctl.inspect.timeline import join
    from ctl.inspect.window import read_all

    directory = Path(arguments[0])
    show(join(read_all(directory)), FLAGS.bandwidth, directory)
