"""Runs one operation in several processes, and times it from the last arrival to the last end.

`all_reduce.py` and `scaling.py` use it; flags and tables are there.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from processes import Peer, ask_all

from ctl.errors import CtlError
from ctl.inspect.measure.link import AlphaBeta, PiecewiseLinear, Point, bus_factor

_LEAST_ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long each size is measured.

    Attributes:
        iterations: at most so many.
        seconds: as many iterations as fit in this time, but at least 5.
        warm_up: iterations before, which do not count.
        timeout: seconds for one answer of a process.
    """

    iterations: int
    seconds: float
    warm_up: int
    timeout: float


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Relative errors of a fit at sizes that are left out of it, one at a time.

    Attributes:
        mean: the mean of the absolute errors.
        worst: the error with the largest absolute value; negative if the fit is too fast.
        worst_bytes: the size of that error.
    """

    mean: float
    worst: float
    worst_bytes: int


def held_out(
    fit: Callable[[Sequence[Point]], AlphaBeta | PiecewiseLinear], points: Sequence[Point]
) -> HeldOut | None:
    """The errors of ``fit`` at points that it is not given; None for fewer than four points.

    The smallest and the largest point are never left out: a fit need not extrapolate.
    """
    if len(points) < 4:
        return None
    points = sorted(points, key=lambda p: p.bytes)
    errors = []
    for index, point in enumerate(points[1:-1], 1):
        predicted = fit([*points[:index], *points[index + 1 :]]).seconds(point.bytes)
        errors.append((predicted / point.seconds - 1, point.bytes))
    worst = max(errors, key=lambda e: abs(e[0]))
    return HeldOut(sum(abs(e) for e, _ in errors) / len(errors), *worst)


@dataclasses.dataclass
class Job:
    """An operation and the processes that run it together. ``has_bus``: whether replicas exchange
    data, so that there is a bus bandwidth; a limit (`limits.py`) has none."""

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
            ``seconds``: for each iteration, from the time when the last replica was ready to the
            time when the last one was done. ``call``: the longest of each iteration, in seconds.
            ``wrong``: the number of wrong elements in all.
        """
        answers = ask_all(self.peers, self.effort.timeout, **request)

        def latest(key: str) -> list[float]:
            return [max(values) for values in zip(*(a[key] for a in answers), strict=True)]

        pairs = zip(latest("done"), latest("ready"), strict=True)
        return {
            "seconds": [max(1e-6, done - ready) for done, ready in pairs],  # ticks of 1 µs
            "call": latest("call"),
            "wrong": sum(a["wrong"] for a in answers),
        }

    def measure(self, size: int, **request: Any) -> dict[str, Any]:
        """Measures ``size`` bytes and returns a row of the table; times in seconds, bandwidths in
        bytes per second. Raises `CtlError` if a sum is wrong."""
        warm = self.ask(size=size, iterations=self.effort.warm_up, **request)
        typical = min(warm["seconds"]) + max(0.0, min(warm["call"]))
        wanted = max(_LEAST_ITERATIONS, int(self.effort.seconds / typical))
        seen = self.ask(size=size, iterations=min(wanted, self.effort.iterations), **request)
        if wrong := warm["wrong"] + seen["wrong"]:
            raise CtlError(
                f"{self.name}: wrong sums of {wrong} elements in tensors of {size} bytes"
            )
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
    """The smallest of ``values`` that at least ``percent`` per cent of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(-(-len(ordered) * percent // 100)) - 1)]


def recommend(rows: Sequence[dict[str, Any]]) -> int:
    """The smallest size in bytes whose bandwidth is within 10 % of the best. Small packs are ready
    early in the backward pass, but each costs the latency of a collective."""
    best = max(row["algbw"] for row in rows)
    return min(row["bytes"] for row in rows if row["algbw"] >= 0.9 * best)
