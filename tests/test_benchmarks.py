"""The benchmark runs and says what it did; what it measured is never judged here."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "step_time.py", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_step_time(tmp_path):
    out = tmp_path / "out.json"
    done = run(
        "--variants=ctl,plain,bound",
        "--global_batch_size=32",
        "--processes=1",
        "--rounds=3",
        "--blocks=2",
        "--steps=40",
        "--warm_up=2",
        f"--json={out}",
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["settings"]["global_batch_size"] == 32
    assert list(results["variants"]) == ["ctl", "plain", "bound"]
    for name, row in results["variants"].items():
        assert len(row["rounds"]) == 3
        ms = row["milliseconds"]
        assert 0 < ms["min"] <= ms["median"] <= ms["max"]
        assert ms["median"] == sorted(row["rounds"])[1]
        assert row["cpu_milliseconds"]["min"] > 0
        assert set(row["versions"]) == {"tensorflow", "keras"}
        assert f"{name} " in done.stdout
    assert results["variants"]["plain"]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # A fixed batch is learned by heart; the others see all of the data.
    losses = {name: row["loss"] for name, row in results["variants"].items()}
    assert losses["bound"] < min(losses["ctl"], losses["plain"]) < 1.0


def test_a_variant_that_learns_something_else_is_an_error():
    done = run(
        "--variants=ctl,plain",
        "--processes=1",
        "--rounds=1",
        "--blocks=1",
        "--steps=5",
        "--warm_up=1",
        "--tolerance=0",
    )
    assert done.returncode == 1
    assert "does not learn what the others do" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--variants=plane"], "unknown variant 'plane'"),
        (["--variants=ctl"], "--reference=plain is not among --variants"),
        (["--model=denze"], "did you mean 'dense'?"),
        (["--variants=plain", "--timeout=0.01"], "plain: no answer in 0.01 s"),
        (["--variants=plain", "--model=no_where:model"], "plain: its process ended: cannot import"),
    ],
)
def test_an_error_is_one_line(arguments, says):
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
