"""The benchmark of a step says what it did; what it measured is not judged."""

from __future__ import annotations

import json
import xml.etree.ElementTree

import pytest
from scripts import results, run_changed

pytestmark = pytest.mark.slow  # starts processes


def test_step_time(tmp_path):
    picture = tmp_path / "out.svg"
    what = "--variants=ctl,fit,plain,bound,orbit,torch,fabric --global_batch_size=32"
    how = "--processes=1 --rounds=3 --blocks=1 --steps=40 --warm_up=1"
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


# The command with measurements that are given, instead of those of processes.
GIVEN_TIMES = """
import step_time


def measure(arguments, where):
    measured = {"ctl": step_time.Measured(), "plain": step_time.Measured()}
    for its in measured.values():
        its.times, its.cpu_times = [2.0], [3.0]
    measured["ctl"].loss, measured["plain"].loss = 0.5, 0.6
    return measured


step_time.measure = measure
step_time.run_command(step_time.main, "")
"""


@pytest.mark.parametrize(("tolerance", "settings"), [(0.2, [32, 64]), (0.0, [32])])
def test_step_time_of_several_settings(tmp_path, tolerance, settings):
    """After one in which a variant learns something else, there is no other."""
    flags = ["--variants=ctl,plain", "--global_batch_size=32,64", f"--tolerance={tolerance}"]
    done = run_changed(GIVEN_TIMES, *flags, f"--json={tmp_path / 'out.json'}")
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["settings"]["global_batch_size"] for run in runs] == settings
    assert all(run["variants"]["ctl"]["milliseconds"]["min"] == 2.0 for run in runs)
    assert done.returncode == (0 if tolerance else 1), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == (0 if tolerance else 1)
    assert all("does not learn what the others do" in line for line in said)
