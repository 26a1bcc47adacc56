"""Several processes that run one operation together, timed from the last arrival to the last end.

The part of `all_reduce.py` that knows neither flags nor tables.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from processes import Peer

from ctl.errors import CtlError
from ctl.inspect.measure.link import bus_factor

_LEAST_ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of each size: ``warm_up`` iterations that do not count, then as many as fit in
    ``seconds``, ``iterations`` at most; ``timeout`` seconds for one answer of a process."""

    iterations: int
    seconds: float
    warm_up: int
    timeout: float


@dataclasses.dataclass
class Job:
    """An operation and the processes that run it together; ``has_bus`` is false for a limit, which
    no replicas take part in."""

    name: str
    peers: Sequence[Peer]
    replicas: int
    device: str
    effort: Effort
    has_bus: bool = True
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Runs ``request`` on all processes; see `peers/all_reduce_worker.py`.

        Returns:
            ``seconds`` of each iteration, from when the last replica of all was ready to when the
            last was done; the longest ``call`` of each; how many elements were ``wrong`` in all.
        """
        for peer in self.peers:
            peer.say(json.dumps(request))
        answers = [peer.answer(self.effort.timeout) for peer in self.peers]

        def latest(key: str) -> list[float]:
            return [max(values) for values in zip(*(a[key] for a in answers), strict=True)]

        pairs = zip(latest("done"), latest("ready"), strict=True)
        return {
            "seconds": [max(1e-6, done - ready) for done, ready in pairs],  # ticks of 1 µs
            "call": latest("call"),
            "wrong": sum(a["wrong"] for a in answers),
        }

    def measure(self, size: int, **request: Any) -> dict[str, Any]:
        """One size: a row of the table."""
        warm = self.ask(size=size, iterations=self.effort.warm_up, **request)
        typical = min(warm["seconds"]) + max(0.0, min(warm["call"]))
        wanted = max(_LEAST_ITERATIONS, int(self.effort.seconds / typical))
        seen = self.ask(size=size, iterations=min(wanted, self.effort.iterations), **request)
        if wrong := warm["wrong"] + seen["wrong"]:
            raise CtlError(f"{self.name}: {wrong} elements of {size} bytes were summed wrongly")
        seconds = statistics.median(seen["seconds"])
        row = {
            "bytes": size,
            "seconds": seconds,
            "p99": percentile(seen["seconds"], 99),
            "call": statistics.median(seen["call"]),
            "algbw": size / seconds,
            "wrong": seen["wrong"],
            "iterations": len(seen["seconds"]),
        }
        if self.has_bus:
            row["busbw"] = row["algbw"] * bus_factor(self.replicas)
        return row


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(-(-len(ordered) * percent // 100)) - 1)]


def recommend(rows: Sequence[dict[str, Any]]) -> int:
    """The smallest pack whose bandwidth is within 10 % of the best: small packs are ready early in
    the backward pass, and each costs the latency of a collective."""
    best = max(row["algbw"] for row in rows)
    return min(row["bytes"] for row in rows if row["algbw"] >= 0.9 * best)
