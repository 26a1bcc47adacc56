"""A small run of the benchmark of models of many kinds."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_model_kinds(tmp_path):
    small = "--kinds=recommender --rounds=2 --seconds=0"
    found, done = results(tmp_path, f"model_kinds.py {small}")
    rows = found["kinds"]["recommender"]
    by_xla = {loop: row["XLA"] for loop, row in rows.items()}
    assert by_xla == {"ctl": True, "ctl_off": False, "plain": False}
    for row in rows.values():
        assert len(row["ms"]) == len(row["CPU ms"]) == 2 and min(row["CPU ms"]) > 0
        assert max(row["ms"]) < row["first s"] * 1e3 and row["peak MiB"] > 0
        assert row["loss"] == pytest.approx(rows["plain"]["loss"], abs=0.05)
    assert "1.00 (1.00-1.00)   1.00 (1.00-1.00)   1.00\n" in done.stdout  # plain over itself
