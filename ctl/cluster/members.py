"""Finds the workers of a job from flags, from ``TF_CONFIG``, or from Slurm.

Imports no TensorFlow, so that a wrong description is refused at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ctl.cluster import slurm
from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a job. Worker 0 is the chief: it writes checkpoints and logs.

    Attributes:
        workers: ``host:port`` of each worker.
        index: index of this process in ``workers``.
        source: where the description was found, for the log.
    """

    workers: tuple[str, ...]
    index: int
    source: str

    @property
    def is_chief(self) -> bool:
        """Whether this process is worker 0."""
        return self.index == 0

    def tf_config(self) -> str:
        """The JSON that TensorFlow expects in ``TF_CONFIG``."""
        return json.dumps(
            {
                "cluster": {"worker": self.workers},
                "task": {"type": "worker", "index": self.index},
            }
        )


@dataclasses.dataclass(frozen=True)
class Tasks:
    """The tasks of a job with parameter servers, all named by ``TF_CONFIG``.

    Attributes:
        coordinator: ``host:port`` of the task that TensorFlow calls the chief.
        workers: ``host:port`` of each worker.
        ps: ``host:port`` of each parameter server.
        kind: kind of this process: "chief", "worker" or "ps".
        index: index of this process within its kind.
    """

    coordinator: str
    workers: tuple[str, ...]
    ps: tuple[str, ...]
    kind: str
    index: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this process is the coordinator."""
        return self.kind == "chief"

    @property
    def name(self) -> str:
        """The name of this process in messages and logs."""
        return "the coordinator" if self.is_coordinator else f"{self.kind} {self.index}"

    @property
    def servers(self) -> dict[str, str]:
        """``host:port`` of every task except the coordinator, by name."""
        return {f"ps {i}": address for i, address in enumerate(self.ps)} | {
            f"worker {i}": address for i, address in enumerate(self.workers)
        }


def resolve_tasks(environ: Mapping[str, str] = os.environ) -> Tasks:
    """Returns the tasks of a job with parameter servers, from ``TF_CONFIG``.

    Raises:
        UsageError: ``TF_CONFIG`` is missing or contradicts itself.
    """
    try:
        config = json.loads(environ["TF_CONFIG"])
        jobs = {
            kind: tuple(map(str, config["cluster"][kind])) for kind in ("chief", "worker", "ps")
        }
        kind, index = str(config["task"]["type"]), int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "--strategy=parameter_server needs a TF_CONFIG with a chief (the coordinator), workers "
            f"and ps, as ctl.launch --ps=1 sets it ({type(error).__name__}: {error})"
        ) from error
    if kind not in jobs:
        raise UsageError(f"TF_CONFIG: this task is a {kind!r}, not chief, worker or ps")
    if len(jobs["chief"]) != 1 or not jobs["worker"] or not jobs["ps"]:
        counts = ", ".join(f"{len(addresses)} {kind}" for kind, addresses in jobs.items())
        raise UsageError(f"TF_CONFIG: one chief, workers and ps are needed, not {counts}")
    _check_addresses([address for job in jobs.values() for address in job], "TF_CONFIG")
    if not 0 <= index < len(jobs[kind]):
        raise UsageError(f"TF_CONFIG: there is no {kind} {index}; it names {len(jobs[kind])}")
    return Tasks(jobs["chief"][0], jobs["worker"], jobs["ps"], kind, index)


def resolve(
    workers: Sequence[str] | None,
    worker_index: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Cluster:
    """Returns the cluster of ``--workers`` and ``--worker_index``, else ``TF_CONFIG``, else Slurm.

    Raises:
        UsageError: there is no description, or it contradicts itself.
    """
    if workers:
        if worker_index is None:
            raise UsageError("--workers needs --worker_index: which of them this process is")
        return _checked(workers, worker_index, "--workers")
    if worker_index is not None:
        raise UsageError("--worker_index needs --workers=HOST:PORT,HOST:PORT,…")
    if environ.get("TF_CONFIG"):
        return _from_tf_config(environ["TF_CONFIG"])
    if slurm.is_task(environ):
        return _checked(*slurm.tasks(environ), "Slurm")
    raise UsageError(
        "--strategy=multi_worker finds no cluster: give --workers=HOST:PORT,… and --worker_index, "
        "set TF_CONFIG, or start with ctl.launch or srun"
    )


def strategy_for(environ: Mapping[str, str]) -> str:
    """Returns the ``--strategy`` for ``TF_CONFIG``; "" if it names fewer than two processes."""
    try:
        jobs = json.loads(environ["TF_CONFIG"])["cluster"]
        counts = {kind: len(addresses) for kind, addresses in jobs.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return ""
    if counts.get("ps"):
        return "parameter_server"
    return "multi_worker" if sum(counts.values()) > 1 else ""


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        jobs, task = config["cluster"], config["task"]
        kind, index = task["type"], int(task["index"])
        # TensorFlow calls the first worker chief, or formerly master.
        chiefs = [*jobs.get("chief", []), *jobs.get("master", [])]
        workers = [*chiefs, *jobs.get("worker", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"TF_CONFIG is not as TensorFlow wants it ({type(error).__name__}: {error}); e.g. "
            '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
            '"task": {"type": "worker", "index": 0}}'
        ) from error
    if kind not in ("worker", "chief", "master"):
        raise UsageError(f"TF_CONFIG: this task is a {kind!r}; multi_worker has workers only")
    return _checked(workers, index + (len(chiefs) if kind == "worker" else 0), "TF_CONFIG")


def _check_addresses(addresses: Sequence[Any], source: str) -> None:
    for address in addresses:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"{source}: {address!r} is not HOST:PORT")
    if len(set(addresses)) != len(addresses):
        raise UsageError(f"{source}: an address occurs twice in {', '.join(addresses)}")


def _checked(workers: Sequence[Any], index: int, source: str) -> Cluster:
    _check_addresses(workers, source)
    if not 0 <= index < len(workers):
        raise UsageError(f"{source}: there is no worker {index}; it names {len(workers)}")
    return Cluster(tuple(map(str, workers)), index, source)
