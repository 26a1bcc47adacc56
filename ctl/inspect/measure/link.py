"""The time of an all-reduce of any size, from a few measured sizes.

Reads the output of ``benchmarks/all_reduce.py --json=FILE``: ``{"schema": 1, "strategy": str,
"operation": str, "replicas": int, "points": [{"bytes": int, "seconds": float, ...}], ...}``.
Units are those of nccl-tests: sizes are the bytes of one replica's tensor, 1 GB is 1e9 bytes,
``algbw = bytes / seconds`` and ``busbw = algbw * 2(n-1)/n`` for n replicas. Pure Python.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctl.errors import UsageError

SCHEMA = 1

_MOST_POINTS = 1000  # in a file


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured size: ``bytes`` of a replica's tensor, ``seconds`` to all-reduce it."""

    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class AlphaBeta:
    """``seconds = alpha + bytes / beta`` (Hockney 1994, "The communication challenge for MPP").

    Attributes:
        alpha: the latency: seconds of an all-reduce of 0 bytes.
        beta: the bandwidth of a large all-reduce (algbw), bytes per second.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""
        return self.alpha + size / self.beta

    @classmethod
    def fit(cls, points: Sequence[Point]) -> AlphaBeta:
        """Fits by least squares of the relative error; the largest size dominates absolute errors.

        Raises:
            UsageError: fewer than two points.
        """
        if len(points) < 2:
            raise UsageError("a latency and a bandwidth need at least two sizes")
        # Minimises the sum of (alpha * u + v / beta - 1)^2 with u = 1/t and v = bytes/t.
        u = [1 / p.seconds for p in points]
        v = [p.bytes / p.seconds for p in points]
        uu, vv = sum(a * a for a in u), sum(b * b for b in v)
        uv = sum(a * b for a, b in zip(u, v, strict=True))
        determinant = uu * vv - uv * uv
        alpha = (sum(u) * vv - sum(v) * uv) / determinant if determinant else -1.0
        if alpha < 0:  # then 0 is the best that is not negative
            return cls(0.0, vv / sum(v))
        slope = (sum(v) * uu - sum(u) * uv) / determinant
        if slope <= 0:
            return cls(sum(u) / uu, math.inf)
        return cls(alpha, 1 / slope)


class PiecewiseLinear:
    """Linear interpolation between measured sizes.

    Below the smallest size the time is constant; above the largest, the bandwidth is constant.

    Raises:
        UsageError: ``points`` is empty.
    """

    def __init__(self, points: Sequence[Point]):
        if not points:
            raise UsageError("no size was measured")
        self.points = sorted(points, key=lambda p: p.bytes)

    def seconds(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""
        after = bisect.bisect_left([p.bytes for p in self.points], size)
        if after == 0:
            return self.points[0].seconds
        if after == len(self.points):
            return size / self.points[-1].bytes * self.points[-1].seconds
        low, high = self.points[after - 1 : after + 1]
        share = (size - low.bytes) / (high.bytes - low.bytes)
        return low.seconds + share * (high.seconds - low.seconds)


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


def bus_factor(replicas: int) -> float:
    """busbw / algbw of n replicas, 2(n-1)/n: bytes on each link of a ring per byte of the tensor.

    Source: nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    return 2 * (replicas - 1) / replicas


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured all-reduces of one machine.

    Attributes:
        strategy: ``mirrored`` or ``multi_worker``.
        operation: the implementation that was measured.
        replicas: the number of replicas that took part.
        points: ascending by size.
    """

    strategy: str
    operation: str
    replicas: int
    points: tuple[Point, ...]

    def seconds(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes, interpolated."""
        return PiecewiseLinear(self.points).seconds(size)

    def algbw(self, size: float) -> float:
        """Bytes of the tensor per second in an all-reduce of ``size`` bytes."""
        return size / self.seconds(size)


def read_json(path: str | Path) -> Any:
    """The value in a JSON file that the user names.

    Raises:
        UsageError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def read(path: str | Path) -> Measured:
    """Reads the output of ``benchmarks/all_reduce.py --json``.

    Raises:
        UsageError: the file cannot be read, or is not such an output.
    """
    content = read_json(path)
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r} instead of {SCHEMA}")
        if not 0 < len(content["points"]) <= _MOST_POINTS:
            raise ValueError(f"{len(content['points'])} points")
        points = [Point(int(p["bytes"]), float(p["seconds"])) for p in content["points"]]
        measured = Measured(
            strategy=_name(content["strategy"]),
            operation=_name(content["operation"]),
            replicas=int(content["replicas"]),
            points=tuple(sorted(points, key=lambda p: p.bytes)),
        )
        _check(measured)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise UsageError(
            f"{path} is not from benchmarks/all_reduce.py --json ({what}): run it again"
        ) from error
    return measured


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.replace("_", "").isalnum() or len(value) > 40:
        raise ValueError(f"{str(value)[:40]!r} is not a name")
    return value


def _check(measured: Measured) -> None:
    if not 2 <= measured.replicas <= 1_000_000:
        raise ValueError(f"{measured.replicas} replicas")
    sizes = [p.bytes for p in measured.points]
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ValueError("repeated sizes, or sizes below 1 byte")
    if not all(0 < p.seconds < math.inf for p in measured.points):
        raise ValueError("seconds that are not positive")
