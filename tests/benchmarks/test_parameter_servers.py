"""A small run of the benchmark of parameter servers."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_parameter_servers(tmp_path):
    found, done = results(tmp_path, "parameter_servers.py --rounds=2 --steps=9 --workers=1")
    assert {name: len(rates) for name, rates in found["rows"].items()} == {"ctl": 2, "tutorial": 2}
    assert all(rate > 0 for rates in found["rows"].values() for rate in rates)
    assert "over the tutorial: " in done.stdout
