"""The time of an all-reduce of any size, from a few measured sizes.

Reads the output of ``benchmarks/all_reduce.py --json=FILE``: ``{"schema": 1, "strategy": str,
"operation": str, "replicas": int, "points": [{"bytes": int, "seconds": float, ...}], ...}``.
Units are those of nccl-tests: sizes are the bytes of one replica's tensor, 1 GB is 1e9 bytes,
``algbw = bytes / seconds`` and ``busbw = algbw * 2(n-1)/n`` for n replicas.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
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
        import numpy as np  # slow, and not for --help

        if len(points) < 2:
            raise UsageError("a latency and a bandwidth need at least two sizes")
        seconds = np.array([p.seconds for p in points])
        # Minimises the sum of (alpha * u + slope * v - 1)^2.
        u, v = 1 / seconds, np.array([p.bytes for p in points]) / seconds
        (alpha, slope), *_ = np.linalg.lstsq(np.stack([u, v], axis=1), np.ones(len(u)), rcond=None)
        if alpha < 0:  # then 0 is the best that is not negative
            alpha, slope = 0.0, v.sum() / (v @ v)
        elif slope <= 0:
            alpha, slope = u.sum() / (u @ u), 0.0
        return cls(float(alpha), float(1 / slope) if slope else math.inf)


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
        import numpy as np

        last = self.points[-1]
        if size > last.bytes:
            return size / last.bytes * last.seconds
        sizes, seconds = zip(*((p.bytes, p.seconds) for p in self.points), strict=True)
        return float(np.interp(size, sizes, seconds))


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
