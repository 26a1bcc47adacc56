"""A small run of the benchmark of embedding tables."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


SMALL = "embeddings.py --width=4 --batch=8 --ids=3 --rounds=2 --seconds=0 --optimizers=adam"


def test_embeddings(tmp_path):
    found, _ = results(tmp_path, f"{SMALL} --rows=50 --kinds=ctl,dense,plain,fit,torch")
    (one,) = found["results"]
    assert (one["rows"], one["table_bytes"]) == (50, 50 * 4 * 4)
    assert {"ctl", "dense", "plain", "fit"} <= one["step_seconds"].keys()
    assert one["ratios"].keys() == one["step_seconds"].keys() - {"ctl"}
    assert all(r["min"] <= r["median"] <= r["max"] for r in one["ratios"].values())


def test_embeddings_of_several_sizes(tmp_path):
    found, done = results(tmp_path, f"{SMALL} --rows=50,60 --kinds=ctl")
    assert [one["table_bytes"] for one in found["results"]] == [50 * 4 * 4, 60 * 4 * 4]
    assert "adam: from 50 to 60 rows, a step takes" in done.stdout
