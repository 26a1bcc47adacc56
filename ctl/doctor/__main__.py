"""The command ``ctl.doctor``: checks this machine alone or, with several workers, together."""

from __future__ import annotations

import json
import os
import sys

from absl import flags

from ctl.base import console
from ctl.distributed import cluster
from ctl.distributed.cluster.slurm import VARIABLE as SLURM
from ctl.doctor.examine import alone, together
from ctl.doctor.table import as_json, is_fine, printed, summary
from ctl.errors import UsageError
from ctl.flags.devices import define_address_flags
from ctl.flags.parsing import define_path, group, run_command

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Looks for what would stop a job, or make it slow: on this machine and, started on all machines of a
job at once, between them.

  python -m ctl.doctor --model_dir=/shared/run
  python -m ctl.doctor --workers=host0:2222,host1:2222 --worker_index=0 --model_dir=/shared/run
  python -m ctl.launch --workers=2 -- python -m ctl.doctor      # two workers of this machine

Prints a line for each check: what is fine, what is not, and what to do. Exits with 0 if all is
fine, else with 2. Worker 0 prints the table of all workers.
"""


def run() -> None:
    """Defines the flags and runs the command."""
    with group("Job"):
        define_address_flags()
        flags.DEFINE_float(
            "startup_timeout",
            60.0,
            "Seconds to wait for the doctors of the other workers.",
            lower_bound=1,
        )
        define_path("model_dir", None, "Directory of the run, which all workers must see.")
        flags.DEFINE_float(
            "all_reduce_seconds",
            10.0,
            "Seconds for which tensors are summed over all workers; 0 leaves it out.",
            lower_bound=0,
        )
    with group("Output"):
        flags.DEFINE_boolean("json", False, "Print one JSON object instead of the table.")
    run_command(main, _USAGE)


def main() -> None:
    """Checks, prints what was found, and exits.

    Raises:
        UsageError: the description of the job contradicts itself.
        SystemExit: something is not fine (2).
    """
    job = _cluster()
    count = len(job.workers) if job else 1
    if job and count > 1:
        rows, heard = together(
            job, FLAGS.model_dir, FLAGS.all_reduce_seconds, FLAGS.startup_timeout
        )
    else:
        rows, heard = alone(FLAGS.model_dir, FLAGS.all_reduce_seconds), {0}
    if FLAGS.json:
        print(json.dumps(as_json(rows, count)))
    elif job and not job.is_chief and 0 in heard:
        print(f"worker {job.index}: {summary(rows)}; worker 0 prints the table")
    else:
        print(printed(rows, count, console.columns(sys.stdout)))
    if not is_fine(rows):
        raise SystemExit(UsageError.exit_code)


def _cluster() -> cluster.Cluster | None:
    described = FLAGS.workers or FLAGS.worker_index is not None
    if described or os.environ.get("TF_CONFIG") or SLURM in os.environ:
        return cluster.resolve(FLAGS.workers, FLAGS.worker_index)
    return None


if __name__ == "__main__":
    run()
