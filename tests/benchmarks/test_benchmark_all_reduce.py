"""The benchmarks of the all-reduce and of scaling: what they count and refuse, and small runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import BENCHMARKS

from ctl.errors import CtlError
from ctl.inspect.measure import link
from ctl.inspect.predict import cost

sys.path.insert(0, str(BENCHMARKS))

from jobs import Effort, Job, percentile, recommend  # noqa: E402

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
    with pytest.raises(CtlError, match="ring: 2 elements of 8 bytes were summed wrongly"):
        job(Canned(0.0, 1.0), Canned(0.0, 1.0, wrong=1)).measure(8)


def test_percentile():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([1.0, 5.0], 99) == 5.0


def test_the_smallest_pack_near_the_best_is_recommended():
    rows = [{"bytes": 2**k, "algbw": bw} for k, bw in enumerate([1.0, 8.9, 9.1, 10.0, 4.0])]
    assert recommend(rows) == 4


def run(*arguments: str, script: str = "all_reduce.py") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_two_workers(tmp_path):
    out = tmp_path / "link.json"
    done = run(
        "--strategy=multi_worker",
        "--operations=ring",
        "--beside=copy,tcp",
        "--max_bytes=65536",
        "--factor=4",
        "--iterations=10",
        f"--json={out}",
    )
    assert done.returncode == 0, done.stderr
    measured = link.read(out)
    assert (measured.strategy, measured.operation, measured.replicas) == ("multi_worker", "ring", 2)
    assert [p.bytes for p in measured.points] == [1024, 4096, 16384, 65536]
    results = json.loads(out.read_text())
    assert list(results["operations"]) == ["ring", "copy", "tcp"]
    for row in results["points"]:
        assert 0 < row["seconds"] <= row["p99"] < 60 and row["wrong"] == 0
        assert 5 <= row["iterations"] <= 10 and row["call"] > 0
    assert results["bytes_per_pack"]["recommended"] in (0, *(p.bytes for p in measured.points))
    assert "held-out error" in done.stdout and "recommended for ring" in done.stdout


def test_scaling(tmp_path):
    """The table follows from the blocks and the link that are in the file."""
    out = tmp_path / "scaling.json"
    small = ["--batch=8", "--layers=1", "--width=16", "--rounds=3", "--steps=3"]
    small += ["--strategy=mirrored", "--counts=1,2", f"--json={out}"]
    done = run(*small, script="scaling.py")
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    size = results["settings"]["gradient_bytes"]
    assert size == 4 * (784 * 16 + 16 + 16 * 10 + 10)
    link_of_two = cost.Link(**results["link"])
    assert link_of_two.shared
    medians = {
        (name, b["strong"], b["alone"]): sorted(b["milliseconds"])[1]
        for name, blocks in results["blocks"].items()
        for b in blocks
    }
    assert len(medians) == 5  # one replica has nothing to share or to leave out
    for kind, strong in (("weak", False), ("strong", True)):
        one, two = results[kind]
        assert (one["replicas"], one["step"]) == (1, medians["1 replicas", False, False])
        step, alone = (medians["2 replicas", strong, alone] for alone in (False, True))
        assert (two["step"], two["alone"], two["exposed"]) == (step, alone, step - alone)
        assert two["efficiency"] == one["step"] / step / (2 if strong else 1)
        predicted = 1e3 * cost.ring(cost.Network(link_of_two), 2, size)
        assert two["predicted_all_reduce"] == pytest.approx(predicted)
        assert two["predicted_step"] == pytest.approx(alone + predicted)
        assert f"{kind} scaling: 8 examples" in done.stdout


@pytest.mark.parametrize("plain", ["--noplain", "--plain"])
def test_model_size(tmp_path, plain):
    out = tmp_path / "size.json"
    small = ["--variables=4,8", "--rows=16", "--batch=4", "--blocks=1", plain]
    done = run(*small, "--steps=2", "--long_steps=3", f"--json={out}", script="model_size.py")
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    first, second = results["rows"]
    assert first["gradient_bytes"] == second["gradient_bytes"] == 4 * 16**2
    assert abs(first["grown_bytes"]) < first["peak_bytes"] and "grown_bytes" not in second
    for row in (first, second):  # one block each
        assert row["beyond_seconds"] == pytest.approx(row["step_seconds"] - row["own_seconds"])
    for key in ("first_seconds", "step_seconds"):
        (power,) = results["powers"][key]
        assert first[key] * 2**power == pytest.approx(second[key])
    assert "memory after 3 more steps of 4 variables" in done.stdout


@pytest.mark.parametrize(
    "script, arguments, says",
    [
        ("scaling.py", ["--counts=2,3"], "1 and 2 among them"),
        ("scaling.py", ["--counts=1,2,5"], "--batch=192 is not divisible by 5"),
        ("scaling.py", ["--mbit=5", "--strategy=mirrored"], "--mbit is the positive rate"),
        ("model_size.py", ["--variables=4,x"], "whole numbers, 1 or more"),
        ("model_size.py", ["--plain", "--replicas=2"], "--plain has one replica"),
    ],
)
def test_an_error_of_the_others_is_one_line(script, arguments, says):
    done = run(*arguments, script=script)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--operations=ringg"], "unknown operation 'ringg'"),
        (["--strategy=multi_worker", "--operations=hierarchical_copy"], "nccl, ring"),
        (["--max_bytes=100"], "--max_bytes=100 is below --min_bytes=1024"),
    ],
)
def test_an_error_is_one_line(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
