"""What an all-reduce costs on links that are described by a latency and a bandwidth: the formulas.

A message of m bytes takes ``alpha + m / beta`` seconds on a link (Hockney 1994). Reducing costs
nothing beside moving, or is inside ``beta`` where that was measured. Pure Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ctl.errors import UsageError
from ctl.inspect.measure.link import AlphaBeta, Measured, bus_factor


@dataclasses.dataclass(frozen=True)
class Link:
    """What a replica, or a host, sends over.

    Attributes:
        alpha: seconds that an empty message takes, software included.
        beta: bytes per second in each direction.
        shared: all who send at the same time share it, as processes of one machine share its
            loopback and its cores; otherwise everyone has one of its own.
    """

    alpha: float
    beta: float
    shared: bool = False

    def seconds(self, size: float, flows: int = 1) -> float:
        """A message of ``size`` bytes while ``flows`` are sent at the same time."""
        return self.alpha + size * (flows if self.shared else 1) / self.beta


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts of ``per_host`` replicas each: ``inner`` links replicas of a host, ``outer`` hosts."""

    outer: Link
    inner: Link | None = None
    per_host: int = 1

    def __post_init__(self) -> None:
        if self.per_host > 1 and self.inner is None:
            raise UsageError(f"{self.per_host} replicas on a host need an inner link: --inner")

    def shape(self, replicas: int) -> tuple[int, int]:
        """Hosts, and replicas on the fullest of them."""
        return math.ceil(replicas / self.per_host), min(replicas, self.per_host)


def ring(network: Network, replicas: int, size: float) -> float:
    """Seconds of one ring through all replicas, those of a host one after the other.

    2(n-1) steps, in each of which every replica sends size/n bytes: 2(n-1)·alpha +
    2(n-1)/n·size/beta on equal links (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", section 3). All wait for the slowest link.
    """
    hosts, local = network.shape(replicas)
    chunk = size / replicas
    step = 0.0
    if hosts > 1:
        step = network.outer.seconds(chunk, flows=hosts)
    if local > 1:
        step = max(step, network.inner.seconds(chunk, flows=local))
    return 2 * (replicas - 1) * step


def hierarchical(network: Network, replicas: int, size: float) -> float:
    """Seconds of reduce-scatter in each host, rings between hosts, all-gather in each host.

    With g replicas on a host and h hosts: (g-1) steps of size/g inside, then g rings at once, one
    for each shard of size/g, which share the host's outer link: 2(h-1) steps of size/h in all; then
    (g-1) steps of size/g inside (Mikami et al. 2018, arXiv:1811.05233, section 3.2: 2D-torus).
    """
    hosts, local = network.shape(replicas)
    seconds = 0.0
    if local > 1:
        seconds += 2 * (local - 1) * network.inner.seconds(size / local, flows=local)
    if hosts > 1:
        seconds += 2 * (hosts - 1) * network.outer.seconds(size / hosts, flows=hosts)
    return seconds


def tree(network: Network, replicas: int, size: float) -> float:
    """Seconds of a double binary tree between hosts, a chain inside each, pipelined.

    Up and down are d = 2·ceil(log2 h) stages between h hosts and 2(g-1) in a host. Cut into k
    chunks it takes (d + k)(alpha + w/k), where w is the time of all the bytes on the busiest link,
    2(h-1)/h·size/beta as in a ring, because each replica is inner node of one tree and leaf of the
    other. The best k, sqrt(d·w/alpha), makes this (sqrt(d·alpha) + sqrt(w))^2 (Sanders, Speck and
    Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", section 2;
    NCCL 2.4 and later).
    """
    hosts, local = network.shape(replicas)
    stages, latency, transfer = 0, 0.0, 0.0
    for link, members, depth in (
        (network.outer, hosts, 2 * math.ceil(math.log2(hosts))),
        (network.inner, local, 2 * (local - 1)),
    ):
        if members > 1:
            stages += depth
            latency += depth * link.alpha
            flows = members if link.shared else 1
            transfer = max(transfer, bus_factor(members) * size * flows / link.beta)
    if stages and transfer * stages < latency / stages:  # less than one chunk: nothing to pipeline
        return (stages + 1) * (latency / stages + transfer)
    return (math.sqrt(latency) + math.sqrt(transfer)) ** 2


ALGORITHMS: dict[str, Callable[[Network, int, float], float]] = {
    "ring": ring,
    "hierarchical": hierarchical,
    "tree": tree,
}


def link_of(measured: Measured, *, shared: bool, most_bytes: int = 16 << 20) -> Link:
    """The link under an all-reduce that was measured, if that is a `ring`.

    Sizes above ``most_bytes`` are left out: there other limits of a machine set in, and a line does
    not fit.
    """
    points = [p for p in measured.points if p.bytes <= most_bytes]
    line = AlphaBeta.fit(points if len(points) >= 2 else measured.points)
    steps = 2 * (measured.replicas - 1)
    # `ring`, solved for the link: a step moves size/n bytes, or all n of them over a shared one.
    chunk = 1.0 if shared else 1 / measured.replicas
    return Link(line.alpha / steps, line.beta * steps * chunk, shared)
