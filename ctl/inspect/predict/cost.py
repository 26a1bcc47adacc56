"""The time of an all-reduce on links of a given latency and bandwidth: the formulas.

A message of m bytes takes ``alpha + m / beta`` seconds on a link (Hockney 1994). The additions
themselves take no time, or are part of a measured ``beta``. Pure Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ctl.base.units import MIB
from ctl.errors import UsageError
from ctl.inspect.measure.link import AlphaBeta, Measured, bus_factor


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of a replica or of a host.

    Attributes:
        alpha: the latency: seconds of an empty message, software included.
        beta: the bandwidth, bytes per second in each direction.
        shared: True if all simultaneous senders share it, as processes of one machine share its
            loopback and its cores; False if each sender has a link of its own.
    """

    alpha: float
    beta: float
    shared: bool = False

    def seconds(self, size: float, flows: int = 1) -> float:
        """Seconds of a message of ``size`` bytes, one of ``flows`` that are sent simultaneously."""
        return self.alpha + size * (flows if self.shared else 1) / self.beta


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts of ``per_host`` replicas each.

    Attributes:
        outer: the links between hosts.
        inner: the links between the replicas of a host; may be None for one replica on a host.
        per_host: the number of replicas on a host.

    Raises:
        UsageError: several replicas on a host, but no inner link.
    """

    outer: Link
    inner: Link | None = None
    per_host: int = 1

    def __post_init__(self) -> None:
        if self.per_host > 1 and self.inner is None:
            raise UsageError(
                f"{self.per_host} replicas on a host need a link between them: give --inner"
            )

    def shape(self, replicas: int) -> tuple[int, int]:
        """The number of hosts, and the number of replicas on the fullest host."""
        return math.ceil(replicas / self.per_host), min(replicas, self.per_host)


def ring(network: Network, replicas: int, size: float) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes; replicas of a host are neighbours in it.

    2(n-1) steps, in each of which every replica sends size/n bytes: 2(n-1)·alpha +
    2(n-1)/n·size/beta on equal links (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", section 3). Every step waits for the slowest link.
    """
    hosts, local = network.shape(replicas)
    chunk = size / replicas
    step = 0.0
    if hosts > 1:
        step = network.outer.seconds(chunk, flows=hosts)
    if local > 1:
        assert network.inner is not None  # checked by Network
        step = max(step, network.inner.seconds(chunk, flows=local))
    return 2 * (replicas - 1) * step


def hierarchical(network: Network, replicas: int, size: float) -> float:
    """Seconds of a reduce-scatter in each host, rings between hosts, an all-gather in each host.

    With g replicas on a host and h hosts: (g-1) steps of size/g inside each host. Then g rings at
    once, one for each shard of size/g; they share the host's outer link, so that they take 2(h-1)
    steps of size/h together. Then (g-1) steps of size/g inside each host (Mikami et al. 2018,
    arXiv:1811.05233, section 3.2: 2D-torus).
    """
    hosts, local = network.shape(replicas)
    seconds = 0.0
    if local > 1:
        assert network.inner is not None  # checked by Network
        seconds += 2 * (local - 1) * network.inner.seconds(size / local, flows=local)
    if hosts > 1:
        seconds += 2 * (hosts - 1) * network.outer.seconds(size / hosts, flows=hosts)
    return seconds


def gather(network: Network, replicas: int, size: float) -> float:
    """Seconds of a ring all-gather of ``size`` bytes of each replica.

    n-1 steps, in each of which every replica sends ``size`` bytes on: (n-1)(alpha + size/beta) on
    equal links (Thakur et al. 2005, "Optimization of collective communication operations in
    MPICH", section 3.1). Every step waits for the slowest link.
    """
    return ring(network, replicas, size * replicas) / 2


def tree(network: Network, replicas: int, size: float) -> float:
    """Seconds of a pipelined double binary tree between hosts, with a chain inside each host.

    The way up and down has d = 2·ceil(log2 h) stages between h hosts, and 2(g-1) in a host of g
    replicas. In k chunks it takes (d + k)(alpha + w/k). Here w is the time of all bytes on the
    busiest link: 2(h-1)/h·size/beta, as in a ring, because each replica is an inner node of one
    tree and a leaf of the other. The best k, sqrt(d·w/alpha), gives (sqrt(d·alpha) + sqrt(w))^2
    (Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", section 2; NCCL 2.4 and later).
    """
    hosts, local = network.shape(replicas)
    stages, latency, transfer = 0, 0.0, 0.0
    for link, members, depth in (
        (network.outer, hosts, 2 * math.ceil(math.log2(hosts))),
        (network.inner, local, 2 * (local - 1)),
    ):
        if members > 1:
            assert link is not None  # checked by Network
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


def link_of(measured: Measured, *, shared: bool, most_bytes: int = 16 * MIB) -> Link:
    """The link on which a `ring` would take the measured times.

    Args:
        measured: the all-reduce.
        shared: whether all replicas share the link.
        most_bytes: larger sizes are left out: other limits of a machine set in there, and a line
            does not fit.

    Raises:
        UsageError: fewer than two sizes were measured.
    """
    points = [p for p in measured.points if p.bytes <= most_bytes]
    line = AlphaBeta.fit(points if len(points) >= 2 else measured.points)
    steps = 2 * (measured.replicas - 1)
    # `ring`, solved for the link: a step moves size/n bytes, or n times as many over a shared link.
    chunk = 1.0 if shared else 1 / measured.replicas
    return Link(line.alpha / steps, line.beta * steps * chunk, shared)
