"""The benchmark of checkpoints says what it did; no time is judged."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_checkpoint(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    found, done = results(
        tmp_path, f"checkpoint.py --megabytes=0.1 --variables=3 --rounds=2 --directory={there}"
    )
    (result,) = found["results"]
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
