"""Finds the workers of a job from flags, from ``TF_CONFIG``, or from Slurm.

Imports no TensorFlow, so that a wrong description is refused at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ctl.distributed.cluster import slurm
from ctl.errors import UsageError

_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}")

# What can be raised while a ``TF_CONFIG`` is read that is none.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


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

    @property
    def fingerprint(self) -> str:
        """A hash of all addresses, in hexadecimal, which is equal for the workers of a job."""
        return _hash(self.workers)

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
    def fingerprint(self) -> str:
        """A hash of all addresses, in hexadecimal, which is equal for the tasks of a job."""
        return _hash((self.coordinator, *self.workers, "", *self.ps))

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
        kind, index = _task(config)
    except _UNREADABLE as error:
        raise UsageError(
            "--strategy=parameter_server needs a TF_CONFIG with a chief (the coordinator), workers "
            f"and ps, as ctl.launch --ps=1 sets it ({type(error).__name__}: {error})"
        ) from error
    if kind not in jobs:
        raise UsageError(f"TF_CONFIG: this task is a {kind!r}, not chief, worker or ps")
    if len(jobs["chief"]) != 1 or not jobs["worker"] or not jobs["ps"]:
        counts = ", ".join(f"{len(addresses)} {kind}" for kind, addresses in jobs.items())
        raise UsageError(
            f"TF_CONFIG must name 1 chief, and at least 1 worker and 1 ps, not {counts}"
        )
    check_addresses([address for job in jobs.values() for address in job], "TF_CONFIG")
    _check_index(kind, index, len(jobs[kind]), "TF_CONFIG")
    return Tasks(jobs["chief"][0], jobs["worker"], jobs["ps"], kind, index)


def resolve(
    workers: Sequence[str] | None = None,
    worker_index: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Cluster:
    """Returns the cluster of ``--workers`` and ``--worker_index``, else ``TF_CONFIG``, else Slurm.

    Raises:
        UsageError: there is no description, or it contradicts itself.
    """
    if workers:
        if worker_index is None:
            raise UsageError(
                "--workers needs --worker_index: the position of this process in it, from 0"
            )
        return _checked(workers, worker_index, "--workers")
    if worker_index is not None:
        raise UsageError("--worker_index needs --workers=HOST:PORT,HOST:PORT,…")
    if environ.get("TF_CONFIG"):
        return _from_tf_config(environ["TF_CONFIG"])
    if slurm.VARIABLE in environ:  # started by srun
        return _checked(*slurm.tasks(environ), "Slurm")
    raise UsageError(
        "--strategy=multi_worker finds no cluster: give --workers=HOST:PORT,… and --worker_index, "
        "set TF_CONFIG, or start with ctl.launch or srun"
    )


def strategy_for(environ: Mapping[str, str]) -> str:
    """Returns the ``--strategy`` for ``TF_CONFIG``; "" if it names fewer than two processes.

    Raises:
        UsageError: ``TF_CONFIG`` cannot be read.
    """
    try:
        jobs = json.loads(environ.get("TF_CONFIG") or "{}").get("cluster", {})
        counts = {kind: len(addresses) for kind, addresses in jobs.items()}
    except _UNREADABLE as error:
        raise _unreadable(error) from error
    if counts.get("ps"):
        return "parameter_server"
    return "multi_worker" if sum(counts.values()) > 1 else ""


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        jobs, (kind, index) = config["cluster"], _task(config)
        # TensorFlow calls the first worker chief, or formerly master.
        groups = {name: [*jobs.get(name, [])] for name in ("chief", "master", "worker")}
    except _UNREADABLE as error:
        raise _unreadable(error) from error
    if kind not in groups:
        raise UsageError(f"TF_CONFIG: this task is a {kind!r}; multi_worker has workers only")
    _check_index(kind, index, len(groups[kind]), "TF_CONFIG")
    workers: list[Any] = []
    for name, group in groups.items():
        if name == kind:
            index += len(workers)
        workers += group
    return _checked(workers, index, "TF_CONFIG")


def _task(config: dict[str, Any]) -> tuple[str, int]:
    """Returns kind and index of the task; raises one of `_UNREADABLE`."""
    kind, index = config["task"]["type"], config["task"]["index"]
    # int() would also take 1.7 and true.
    if type(index) not in (int, str):
        raise ValueError(f"the index {index!r} is not a whole number")
    return str(kind), int(index)


def _unreadable(error: Exception) -> UsageError:
    return UsageError(
        f"TF_CONFIG is malformed ({type(error).__name__}: {error}); give it in this form: "
        '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
        '"task": {"type": "worker", "index": 0}}'
    )


def _checked(workers: Sequence[Any], index: int, source: str) -> Cluster:
    check_addresses(workers, source)
    _check_index("worker", index, len(workers), source)
    return Cluster(tuple(map(str, workers)), index, source)


def _check_index(kind: str, index: int, count: int, source: str) -> None:
    if not 0 <= index < count:
        raise UsageError(f"{source}: there is no {kind} {index}; it names {count}, counted from 0")


def check_addresses(addresses: Sequence[Any], source: str) -> None:
    """Raises `UsageError`, which names their ``source``, if one is not ``host:port``, or two are
    the same."""
    seen: dict[tuple[str, int], str] = {}
    for address in map(str, addresses):
        host, _, port = address.rpartition(":")
        if host.count(":") > 1 and not (host.startswith("[") and host.endswith("]")):
            raise UsageError(
                f"{source}: {address!r} has an IPv6 address without brackets: write [ADDRESS]:PORT"
            )
        valid = (_is_ipv6(host) or _HOST.fullmatch(host)) and _PORT.fullmatch(port)
        if not valid or not 0 < int(port) < 65536:
            raise UsageError(f"{source}: {address!r} is not HOST:PORT")
        place = (_machine(host), int(port))
        if place in seen:
            raise UsageError(f"{source}: an address occurs twice: {seen[place]} and {address}")
        seen[place] = address


def _is_ipv6(host: str) -> bool:
    """Whether ``host`` is an IPv6 address in brackets. One with the name of an interface is not:
    other machines have other names."""
    try:
        socket.inet_pton(socket.AF_INET6, host[1:-1])
    except OSError:
        return False
    return host[0] + host[-1] == "[]"


def _machine(host: str) -> str:
    """Returns the same for two spellings of a host, as far as no name server need be asked."""
    if _is_ipv6(host):
        address = ipaddress.IPv6Address(host[1:-1])
        host = str(address.ipv4_mapped or ("127.0.0.1" if address.is_loopback else address))
    name = host.lower().removesuffix(".")
    try:
        name = socket.inet_ntoa(socket.inet_aton(name))  # it also reads 127.1
    except OSError:
        return "127.0.0.1" if name == "localhost" else name
    # TensorFlow listens on all interfaces, so a port of one address of loopback is taken on all.
    return "127.0.0.1" if name.startswith(("127.", "0.")) else name


def _hash(addresses: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(addresses).encode()).hexdigest()
