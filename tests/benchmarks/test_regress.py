"""A commit is compared with itself; and how sure a median is."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from paths import BENCHMARKS
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_regress(tmp_path):
    """A commit against itself is not slower."""
    git = subprocess.run(["git", "-C", BENCHMARKS, "rev-parse", "HEAD"], capture_output=True)
    if git.returncode:
        pytest.skip("no git repository")
    how = "--processes=1 --rounds=6 --block_seconds=0.02 --tolerance=9 HEAD"
    rows = results(tmp_path, f"regress.py --rows=recommender {how}")[0]["rows"]
    assert rows["recommender"]["verdict"] == "equal"
    assert len(rows["recommender"]["rounds"][0]) == 6


def test_bounds_of_a_median(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from processes import bounds

    assert bounds(range(6)) == (0, 5)  # 2 / 2^6 is 0.031
    assert bounds(range(11)) == (1, 9)  # 2 * 12 / 2^11 is 0.012, and 2 * 67 / 2^11 too much
    random = np.random.default_rng(0)
    found = [bounds(random.lognormal(size=15)) for _ in range(2000)]
    inside = np.mean([low <= 1.0 <= high for low, high in found])  # 1: the median of all
    assert 0.95 <= inside <= 0.98
