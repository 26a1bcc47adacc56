"""A small run of the benchmark of embedding tables."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_embeddings(tmp_path):
    small = "--rows=50,60 --width=4 --batch=8 --ids=3 --rounds=2 --seconds=0 --optimizers=adam"
    found, done = results(tmp_path, f"embeddings.py {small} --kinds=ctl,dense,plain,fit,torch")
    first, second = found["results"]
    assert (first["rows"], second["table_bytes"]) == (50, 60 * 4 * 4)
    assert {"ctl", "dense", "plain", "fit"} <= first["step_seconds"].keys()
    for one in found["results"]:
        assert one["ratios"].keys() == one["step_seconds"].keys() - {"ctl"}
        assert all(r["min"] <= r["median"] <= r["max"] for r in one["ratios"].values())
    assert "adam: from 50 to 60 rows, a step takes" in done.stdout
