"""The benchmark runs and says what it did; what it measured is never judged here."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from paths import BENCHMARKS

pytestmark = pytest.mark.slow  # starts processes


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "step_time.py", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_step_time(tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    done = run(
        "--variants=ctl,fit,plain,bound,orbit,torch,fabric",
        "--global_batch_size=32",
        "--processes=1",
        "--rounds=3",
        "--blocks=2",
        "--steps=40",
        "--warm_up=2",
        f"--json={out}",
        f"--svg={picture}",
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["runs"][0]
    assert results["settings"]["global_batch_size"] == 32
    rows = results["variants"]
    assert list(rows) == ["ctl", "fit", "plain", "bound", "orbit", "torch", "fabric"]
    for name in ("orbit", "torch", "fabric"):  # where it is not installed, how to
        if "failure" in rows[name]:
            assert "is not installed" in rows.pop(name)["failure"]
    for name, row in rows.items():
        assert len(row["rounds"]) == 3
        ms = row["milliseconds"]
        assert 0 < ms["min"] <= ms["median"] <= ms["max"]
        assert ms["median"] == sorted(row["rounds"])[1]
        assert row["cpu_milliseconds"]["min"] > 0
        assert row["versions"]
        assert f"{name} " in done.stdout
    assert rows["plain"]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # A fixed batch is learned by heart; the others see all of the data.
    losses = {name: row["loss"] for name, row in rows.items()}
    assert losses["bound"] < min(losses["ctl"], losses["fit"], losses["plain"]) < 1.0
    bars = xml.etree.ElementTree.parse(picture)
    assert "global batch 32" in "".join(bars.getroot().itertext())


SHORT = ["--processes=1", "--rounds=1", "--blocks=1", "--steps=10", "--warm_up=1"]


def test_step_time_of_several_workers(tmp_path):
    out = tmp_path / "out.json"
    done = run(*SHORT, "--variants=ctl,fit", "--reference=ctl", "--workers=2", f"--json={out}")
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(out.read_text())["runs"]
    # Keras 3 does not train over several workers: a peer that fails is a result.
    assert "its process ended" in measured["variants"]["fit"]["failure"]
    assert measured["variants"]["ctl"]["milliseconds"]["min"] > 0


def test_step_time_of_several_settings(tmp_path):
    out = tmp_path / "out.json"
    done = run(*SHORT, "--variants=plain", "--global_batch_size=32,64", f"--json={out}")
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert [r["settings"]["global_batch_size"] for r in runs] == [32, 64]
    assert all(r["variants"]["plain"]["milliseconds"]["min"] > 0 for r in runs)


def test_a_variant_that_learns_something_else_is_an_error():
    done = run(*SHORT, "--variants=ctl,plain", "--tolerance=0")
    assert done.returncode == 1
    assert "does not learn what the others do" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--variants=plane"], "unknown variant 'plane'"),
        (["--variants=ctl"], "--reference=plain is not among --variants"),
        (["--model=denze"], "did you mean 'dense'?"),
        (["--replicas=0"], "--replicas=0: must be a whole number of 1 or more"),
        (["--replicas=3"], "--global_batch_size=64 is not divisible by 3 replicas"),
        (["--variants=plain", "--timeout=0.01"], "plain: no answer in 0.01 s"),
        (
            ["--variants=plain", "--model=no_where:model"],
            "cannot import the model 'no_where:model'",
        ),
    ],
)
def test_an_error_is_one_line(arguments, says):
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
