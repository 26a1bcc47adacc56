"""The time of an all-reduce of any size: fits, their errors, and the file they are read from."""

from __future__ import annotations

import json
import math

import pytest

from ctl.errors import UsageError
from ctl.inspect.measure.link import (
    AlphaBeta,
    Measured,
    PiecewiseLinear,
    Point,
    bus_factor,
    read,
)

SIZES = [2**k for k in range(10, 25)]


def line(alpha: float, beta: float) -> list[Point]:
    return [Point(size, alpha + size / beta) for size in SIZES]


def test_a_line_is_found():
    fit = AlphaBeta.fit(line(1e-3, 5e8))
    assert math.isclose(fit.alpha, 1e-3) and math.isclose(fit.beta, 5e8)


def test_the_error_that_is_made_small_is_relative():
    """All sizes twice as slow and all twice as fast count alike, however small they are."""
    points = line(1e-3, 5e8)
    noisy = [Point(p.bytes, p.seconds * (1.1 if i % 2 else 0.9)) for i, p in enumerate(points)]
    fit = AlphaBeta.fit(noisy)
    for p in points:
        assert abs(fit.seconds(p.bytes) / p.seconds - 1) < 0.1


@pytest.mark.parametrize(
    ("points", "alpha", "beta"),
    [
        ([Point(1000, 1e-3), Point(2000, 3e-3)], 0.0, None),  # faster than in proportion
        ([Point(1000, 3e-3), Point(2000, 2e-3)], None, math.inf),  # the larger is faster
    ],
)
def test_no_negative_latency_or_bandwidth(points, alpha, beta):
    fit = AlphaBeta.fit(points)
    assert fit.alpha >= 0 and fit.beta > 0
    assert alpha is None or fit.alpha == alpha
    assert beta is None or fit.beta == beta
    for p in points:
        assert abs(fit.seconds(p.bytes) / p.seconds - 1) < 0.5


def test_piecewise_linear():
    fit = PiecewiseLinear([Point(2000, 4.0), Point(1000, 2.0), Point(4000, 16.0)])
    assert [fit.seconds(p.bytes) for p in fit.points] == [2.0, 4.0, 16.0]
    assert fit.seconds(1500) == 3.0 and fit.seconds(3000) == 10.0
    assert fit.seconds(10) == 2.0  # latency
    assert fit.seconds(8000) == 32.0  # at the bandwidth of the largest


@pytest.mark.parametrize(("replicas", "factor"), [(2, 1.0), (4, 1.5), (100, 1.98)])
def test_bus_factor_is_that_of_nccl_tests(replicas, factor):
    assert bus_factor(replicas) == factor


def test_bandwidth_between_sizes():
    measured = Measured("multi_worker", "ring", 4, (Point(1000, 1e-3), Point(3000, 2e-3)))
    assert measured.seconds(2000) == 1.5e-3
    assert measured.algbw(2000) == pytest.approx(2000 / 1.5e-3)


GOOD = {
    "schema": 1,
    "strategy": "multi_worker",
    "operation": "ring",
    "replicas": 2,
    "points": [{"bytes": 2048, "seconds": 2e-3, "algbw": 1.0}, {"bytes": 1024, "seconds": 1e-3}],
}


def test_read(tmp_path):
    path = tmp_path / "link.json"
    path.write_text(json.dumps(GOOD))
    measured = read(path)
    assert measured.points == (Point(1024, 1e-3), Point(2048, 2e-3))
    assert measured.strategy == "multi_worker" and measured.replicas == 2


BROKEN = [
    ({"schema": 2}, "schema 2"),
    ({"points": []}, "0 points"),
    ({"points": [{"bytes": 1024}]}, "no 'seconds'"),
    ({"points": [{"bytes": 1024, "seconds": -1}]}, "not positive"),
    ({"points": [{"bytes": 1024, "seconds": math.nan}]}, "not positive"),
    ({"points": [{"bytes": 0, "seconds": 1}]}, "below 1 byte"),
    ({"points": GOOD["points"] * 2}, "repeat"),
    ({"points": 7}, "has no len"),
    ({"replicas": 1}, "1 replicas"),
    ({"replicas": math.inf}, "infinity"),
    ({"strategy": "<b>bold</b>"}, "is not a name"),
    ({"operation": None}, "is not a name"),
]
BROKEN = [(json.dumps(GOOD | change), says) for change, says in BROKEN]


@pytest.mark.parametrize(
    ("text", "says"), [*BROKEN, (None, "cannot read"), ("{", "not JSON"), ("[1]", "not from")]
)
def test_a_file_that_is_something_else(tmp_path, text, says):
    path = tmp_path / "link.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        read(path)
    assert str(path) in str(error.value)
