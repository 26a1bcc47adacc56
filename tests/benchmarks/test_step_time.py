"""The benchmark of a step says what it did; what it measured is not judged."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest
from scripts import results, run

pytestmark = pytest.mark.slow  # starts processes


def test_step_time(tmp_path):
    picture = tmp_path / "out.svg"
    what = "--variants=ctl,fit,plain,bound,orbit,torch,fabric --global_batch_size=32"
    how = "--processes=1 --rounds=3 --blocks=2 --steps=40 --warm_up=2"
    found, done = results(tmp_path, f"step_time.py {what} {how} --svg={picture}")
    (measured,) = found["runs"]
    assert measured["settings"]["global_batch_size"] == 32
    rows = measured["variants"]
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


SHORT = "step_time.py --processes=1 --rounds=1 --blocks=1 --steps=10 --warm_up=1"


def test_step_time_of_several_workers(tmp_path):
    found, _ = results(tmp_path, f"{SHORT} --variants=ctl,torch --reference=ctl --workers=2")
    (measured,) = found["runs"]
    # A peer that fails, as one that is not installed, is a result.
    torch = measured["variants"]["torch"]
    assert "milliseconds" in torch or "is not installed" in torch["failure"]
    assert measured["variants"]["ctl"]["milliseconds"]["min"] > 0


def test_step_time_of_several_settings(tmp_path):
    runs = results(tmp_path, f"{SHORT} --variants=plain --global_batch_size=32,64")[0]["runs"]
    assert [r["settings"]["global_batch_size"] for r in runs] == [32, 64]
    assert all(r["variants"]["plain"]["milliseconds"]["min"] > 0 for r in runs)


def test_a_variant_that_learns_something_else_is_an_error():
    done = run(f"{SHORT} --variants=ctl,plain --tolerance=0", exit_code=1)
    assert "does not learn what the others do" in done.stderr
    assert len(done.stderr.splitlines()) == 1
