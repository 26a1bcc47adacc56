"""The benchmark of the all-reduce: what it counts, and a small run."""

from __future__ import annotations

import json
import sys

import pytest
from paths import BENCHMARKS
from scripts import results

from ctl.errors import CtlError
from ctl.inspect.measure import link
from ctl.inspect.measure.link import AlphaBeta, PiecewiseLinear, Point

sys.path.insert(0, str(BENCHMARKS))

from jobs import Effort, Job, held_out, percentile, recommend  # noqa: E402

pytestmark = pytest.mark.slow  # starts processes


class Canned:
    """A process that answers what it was told to."""

    def __init__(self, ready, done, call=0.0, wrong=0):
        self.ready, self.done, self.call, self.wrong = ready, done, call, wrong
        self.asked = []

    def say(self, line):
        self.asked.append(json.loads(line))

    def answer(self, seconds):
        n = self.asked[-1]["iterations"]
        return {
            "ready": [self.ready] * n,
            "done": [self.done] * n,
            "call": [self.call] * n,
            "wrong": self.wrong,
        }


def job(*peers, seconds=10.0, **kwargs):
    return Job("ring", peers, 4, "", Effort(50, seconds, 3, 1.0), **kwargs)


def test_time_is_from_the_last_arrival_to_the_last_end():
    """A worker that comes late makes nobody's all-reduce slow."""
    early, late = Canned(10.0, 12.5, call=0.1), Canned(12.0, 12.25, call=0.2)
    row = job(early, late).measure(3000)
    assert row["seconds"] == row["p99"] == 0.5 and row["call"] == 0.2
    assert row["algbw"] == 6000 and row["busbw"] == 6000 * 1.5
    assert "busbw" not in job(early, late, has_bus=False).measure(3000)


def test_every_process_runs_as_many_iterations_as_fit():
    peers = Canned(0.0, 0.5), Canned(0.0, 0.25)
    job(*peers, seconds=10.0).measure(8)
    assert [[r["iterations"] for r in peer.asked] for peer in peers] == [[3, 20]] * 2
    for seconds, iterations in ((0.0, 5), (1000.0, 50)):
        job(*peers, seconds=seconds).measure(8)
        assert peers[0].asked[-1]["iterations"] == iterations


def test_a_wrong_sum_ends_the_run():
    with pytest.raises(CtlError, match="ring: wrong sums of 2 elements in tensors of 8 bytes"):
        job(Canned(0.0, 1.0), Canned(0.0, 1.0, wrong=1)).measure(8)


def test_percentile():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([1.0, 5.0], 99) == 5.0


def test_the_smallest_pack_near_the_best_is_recommended():
    rows = [{"bytes": 2**k, "algbw": bw} for k, bw in enumerate([1.0, 8.9, 9.1, 10.0, 4.0])]
    assert recommend(rows) == 4


def test_two_workers(tmp_path):
    found, done = results(
        tmp_path,
        "all_reduce.py --strategy=multi_worker --operations=ring --beside=copy,tcp "
        "--max_bytes=65536 --factor=4 --iterations=10",
    )
    measured = link.read(tmp_path / "out.json")
    assert (measured.strategy, measured.operation, measured.replicas) == ("multi_worker", "ring", 2)
    assert [p.bytes for p in measured.points] == [1024, 4096, 16384, 65536]
    assert list(found["operations"]) == ["ring", "copy", "tcp"]
    for row in found["points"]:
        assert 0 < row["seconds"] <= row["p99"] < 60 and row["wrong"] == 0
        assert 5 <= row["iterations"] <= 10 and row["call"] > 0
    assert found["bytes_per_pack"]["recommended"] in (0, *(p.bytes for p in measured.points))
    assert "held-out error" in done.stdout and "recommended for ring" in done.stdout


def test_held_out_points_are_not_seen():
    points = [Point(1000 * 2**i, 1e-3 + 1000 * 2**i / 5e8) for i in range(12)]
    assert held_out(AlphaBeta.fit, points).mean < 1e-9
    points[5] = Point(points[5].bytes, 10 * points[5].seconds)
    error = held_out(PiecewiseLinear, points)
    assert error.worst_bytes == points[6].bytes or error.worst_bytes == points[4].bytes
    assert error.worst > 1  # its neighbours are promised to take far longer than they do
    outlier = PiecewiseLinear(points).seconds(points[5].bytes)
    assert outlier == points[5].seconds
    assert held_out(AlphaBeta.fit, points[:3]) is None
