"""A small run of the benchmark of embedding tables."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_embeddings(tmp_path):
    small = "--rows=50 --width=4 --batch=8 --ids=3 --rounds=2 --seconds=0 --optimizers=adam"
    found, done = results(tmp_path, f"embeddings.py {small} --kinds=ctl,plain,fit,torch")
    (one,) = found["results"]
    assert (one["rows"], one["table_bytes"]) == (50, 50 * 4 * 4)
    assert {"ctl", "plain", "fit"} <= one["step_seconds"].keys()
    assert one["ratios"].keys() == one["step_seconds"].keys() - {"ctl"}
    assert all(r["min"] <= r["median"] <= r["max"] for r in one["ratios"].values())
    for kind in one["step_seconds"]:
        assert f"        50  {kind} " in done.stdout


def test_tables_of_two_workers(tmp_path):
    small = "--model=bag --workers=2 --rows=300000 --batch=64 --rounds=1 --seconds=0"
    found, done = results(tmp_path, f"embeddings.py {small} --kinds=ctl --optimizers=sgd")
    (one,) = found["results"]
    assert one["table_bytes"] == 300_000 * 64 * 4
    assert 0.3 < one["memory"]["ctl"] < 4  # a table of 73 MiB, beside all that TensorFlow needs
    assert 0.9 < one["wire"]["ctl"] < 1.5
    assert "wire" in done.stdout
