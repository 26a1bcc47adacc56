"""Finds all tasks of a Slurm job step (``srun``) from the environment of one of them.

TensorFlow's ``SlurmClusterResolver`` reads the same variables, but fails without ``nvidia-smi`` and
gives all jobs on a node the same ports. It also sorts hosts by name: of ``n9`` and ``n10``, each
takes itself for the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from ctl.errors import UsageError

VARIABLE = "SLURM_STEP_NUM_TASKS"  # ``srun`` sets it for its tasks

# The number of a job selects its ports, so that jobs on one node rarely share any.
_FIRST_PORT, _PORTS_PER_JOB, _JOBS = 10_000, 10, 2_000

_HOSTS = re.compile(r"([^,\[\]]|\[[\d,-]+\])+(,([^,\[\]]|\[[\d,-]+\])+)*")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def tasks(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns ``host:port`` of every task of the job step, by rank, and the rank of this one.

    Raises:
        UsageError: a variable is missing or malformed, or the nodes do not hold blocks of ranks.
    """
    try:
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
        counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        rank, job = int(environ["SLURM_PROCID"]), int(environ["SLURM_JOB_ID"])
        placed = list(zip(hosts, counts, strict=True))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"cannot read the cluster from Slurm's variables: {error}; start with srun"
        ) from error
    port = _FIRST_PORT + job % _JOBS * _PORTS_PER_JOB
    addresses = [f"{host}:{port + i}" for host, count in placed for i in range(count)]
    here = environ.get("SLURMD_NODENAME")
    if here in hosts and addresses[rank : rank + 1] and not addresses[rank].startswith(f"{here}:"):
        raise UsageError(
            f"Slurm: task {rank} should be on {addresses[rank].rpartition(':')[0]}, but is on "
            f"{here}: start with srun --distribution=block"
        )
    return addresses, rank


def expand_hosts(text: str) -> list[str]:
    """Expands ``"n[9-10],gpu3"`` to ``["n9", "n10", "gpu3"]``.

    Raises:
        ValueError: ``text`` is not a list of hosts.
    """
    if not _HOSTS.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of hosts")
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[]+)", name)
        choices = [[literal] if literal else list(_numbers(ranges)) for ranges, literal in pieces]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def expand_counts(text: str) -> list[int]:
    """Expands ``"2(x3),1"`` to ``[2, 2, 2, 1]``.

    Raises:
        ValueError: ``text`` is not a list of counts.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            raise ValueError(f"{text!r} is not a list of numbers of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
