"""The benchmarks of input, checkpoints and start run and say what they did; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from paths import BENCHMARKS
from scripts import run

pytestmark = pytest.mark.slow  # starts processes


def test_checkpoint(tmp_path):
    out, there = tmp_path / "out.json", tmp_path / "there"
    there.mkdir()
    done = run(
        "checkpoint.py",
        "--megabytes=0.1",
        "--variables=3",
        "--rounds=2",
        f"--directory={there}",
        f"--json={out}",
    )
    (result,) = json.loads(out.read_text())["results"]
    assert result["bytes"] == pytest.approx(1e5, rel=1e-3) and len(result["rounds"]) == 3
    for who in ("ctl", "tf"):
        of = result["seconds"][who]
        assert set(of) == {"stands_still", "delay", "durable", "restored"}
        assert 0 < of["stands_still"]["min"] <= of["durable"]["max"]
        assert result["first"][who] == result["rounds"][0][who]["stands_still"]
    ours, theirs = (result["rounds"][1][who]["durable"] for who in ("ctl", "tf"))
    ratio = result["ratio"]["durable"]
    assert ratio["min"] <= ours / theirs <= ratio["max"]
    assert "0.1 MB in 3 variables" in done.stdout
    assert list(there.iterdir()) == []  # nothing is left behind


def test_input_pipeline(tmp_path):
    out = tmp_path / "out.json"
    run(
        "input_pipeline.py",
        "--replicas=2",
        "--pipelines=tutorial,ctl",
        "--rounds=2",
        "--steps=80",
        "--warm_up=1",
        f"--json={out}",
    )
    rows = json.loads(out.read_text())["replicas"]["2"]
    assert rows["tutorial"]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # One epoch or so: the images are those of the same dataset, in the same units.
    assert rows["ctl"]["mean"] == pytest.approx(rows["tutorial"]["mean"], rel=0.02)
    rounds = rows["ctl"]["rounds"]
    assert [r["images"] for r in rounds] == [80 * 128] * 2
    assert rows["ctl"]["images_per_second"]["max"] == max(
        r["images"] / r["seconds"] for r in rounds
    )


def test_low_communication(tmp_path):
    """The plan counts the bytes on the wire, and the network card does, headers included."""
    out = tmp_path / "out.json"
    arguments = ["--methods=all_reduce,diloco", "--models=dense", "--workers=2", "--mbit=100"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "low_communication.py", *arguments]
        + ["--rounds=1", "--seconds=0.1", "--warm_up=2", f"--json={out}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if any(text in done.stderr for text in ("namespaces", "iproute2", "ip netns", "ip link")):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    whole, rare = content["rows"]
    assert (whole["method"], rare["method"]) == ("all_reduce", "diloco")
    for row in (whole, rare):
        assert row["planned"] < row["sent"] < 1.3 * row["planned"]
        assert row["fast"] > 0 and row["predicted"] > row["fast"]
    assert 45 * rare["planned"] < whole["planned"]
    assert 45 * rare["sent"] < 1.1 * whole["sent"]
    (cell,) = content["cells"]
    assert cell["among"] == "all" and f"predicted in {cell['loses'] == 0:d} of 1" in done.stdout


def test_regress(tmp_path):
    """A commit against itself is not slower."""
    out = tmp_path / "out.json"
    git = subprocess.run(["git", "-C", BENCHMARKS, "rev-parse", "HEAD"], capture_output=True)
    if git.returncode:
        pytest.skip("no git repository")
    run(
        "regress.py",
        "--rows=dense",
        "--processes=1",
        "--rounds=6",
        "--tolerance=9",
        f"--json={out}",
        "HEAD",
    )
    one = json.loads(out.read_text())["rows"]["dense"]
    assert one["verdict"] == "equal" and len(one["rounds"][0]) == 6


def test_bounds_of_a_median(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from processes import bounds

    assert bounds(range(6)) == (0, 5)  # 2 / 2^6 is 0.031
    assert bounds(range(11)) == (1, 9)  # 2 * 12 / 2^11 is 0.012, and 2 * 67 / 2^11 too much
    random = np.random.default_rng(0)
    found = [bounds(random.lognormal(size=15)) for _ in range(2000)]
    inside = np.mean([low <= 1.0 <= high for low, high in found])  # 1: the median of all
    assert 0.95 <= inside <= 0.98


def test_streams(tmp_path):
    out = tmp_path / "out.json"
    options = ["--stream_images=1500", "--rounds=1", "--stream_steps=30", f"--json={out}"]
    done = run("input_pipeline.py", *options)
    rows = json.loads(out.read_text())["streams"]["png"]
    where = ("", ", 2 replicas", ", worker 1 of 2")
    peers = ("ctl", "tf.data, tuned", "tf.data, tutorial", "Grain")
    assert {f"{peer}{of}" for peer in peers for of in where} < set(rows)
    missing = {name for name, row in rows.items() if not row["steps"]}
    assert missing in (set(), {f"Grain{of}" for of in where})
    assert done.stdout.count("not installed: pip install grain") == len(missing)
    of = {name: row["steps"][0] for name, row in rows.items() if name not in missing}
    for name, answer in of.items():
        assert f"\n{name} " in done.stdout
        assert min(answer[key] for key in ("seconds", "cpu_seconds", "peak_mib")) > 0
    for worker in (1, 2):
        share = of[f"ctl, worker {worker} of 2"]["bytes"] / of["ctl"]["bytes"]
        assert 0.3 < share < 0.7
    for theirs in ("tf.data, tuned", "tf.data, tutorial, 2 replicas"):
        assert f"\nctl / {theirs}: images/s " in done.stdout


def test_startup(tmp_path):
    out = tmp_path / "out.json"
    done = run("startup.py", "--what=python,bad_flag,ctl", "--rounds=1", f"--json={out}")
    seconds = {name: of["rounds"] for name, of in json.loads(out.read_text())["what"].items()}
    assert list(seconds) == ["python", "bad_flag", "ctl"]
    assert 0 < seconds["python"][0] < seconds["ctl"][0]  # one of them imports TensorFlow
    assert "bad_flag " in done.stdout


@pytest.mark.parametrize(
    "script, argument, says",
    [
        ("checkpoint.py", "--megabytes=1,x", "--megabytes=x: must be a positive number"),
        ("input_pipeline.py", "--pipelines=ctl", "--pipelines needs tutorial"),
        ("input_pipeline.py", "--replicas=3", "is not divisible by 3 replicas"),
        ("startup.py", "--what=helpp", "nothing is called 'helpp'"),
    ],
)
def test_an_error_is_one_line(script, argument, says):
    done = run(script, argument, exit_code=2)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
