"""The time of an all-reduce on links of a given latency and bandwidth: the formulas.

A message of m bytes takes ``alpha + m / beta`` seconds on a link (Hockney 1994), which sends others
during ``alpha``. The additions themselves take no time, or are part of a measured ``beta``. Pure
Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ctl.base.units import MIB
from ctl.errors import UsageError
from ctl.inspect.measure.link import AlphaBeta, Measured


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
    algorithms for clusters of workstations", section 3).
    """
    return _around(network, replicas, size / replicas, 2 * (replicas - 1))


def _around(network: Network, replicas: int, chunk: float, steps: int) -> float:
    """Seconds of a ring in which every replica passes on ``chunk`` bytes in each step.

    A replica sends what it has received in the step before. So the time is that of the chunk that
    goes from host to host most often, or that of the slowest link, if it is never idle.
    """
    hosts, local = network.shape(replicas)
    crossings = math.ceil(steps * hosts / replicas) if hosts > 1 else 0
    seconds = busiest = 0.0
    for link, flows, hops in (
        (network.outer, hosts, crossings),
        (network.inner, local, steps - crossings),
    ):
        if hops and flows > 1:
            assert link is not None  # checked by Network
            each = link.seconds(chunk, flows)
            seconds += hops * each
            busiest = max(busiest, steps * (each - link.alpha))
    return max(seconds, busiest)


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
    MPICH", section 3.1).
    """
    return _around(network, replicas, size, replicas - 1)


def tree(network: Network, replicas: int, size: float) -> float:
    """Seconds of a pipelined double binary tree between hosts, with a chain inside each host.

    Each of the two trees sums half of the bytes and sends the sums back. The way has
    2·floor(log2 h) links between h hosts, and 2(g-1) in a host of g replicas: so many latencies.
    A host is an inner node of one tree, which receives half from each of two children and the sum
    of its half, and a leaf of the other, which receives a sum: twice the bytes, as an inner
    replica of a chain does. In many small chunks, the latencies and the transfer of the busiest
    link add up (Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", section 2; NCCL 2.4 and later).
    """
    hosts, local = network.shape(replicas)
    latency = transfer = 0.0
    for link, members, depth, received in (
        (network.outer, hosts, hosts.bit_length() - 1, min(2.0, hosts / 2)),
        (network.inner, local, local - 1, min(2.0, local - 1)),
    ):
        if members > 1:
            assert link is not None  # checked by Network
            latency += 2 * depth * link.alpha
            of_all = 2 * (members - 1) if link.shared else received
            transfer = max(transfer, of_all * size / link.beta)
    return latency + transfer


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
