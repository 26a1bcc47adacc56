"""Small runs of the benchmark of the number of variables."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize("plain", ["--noplain", "--plain"])
def test_model_size(tmp_path, plain):
    small = "--variables=4,8 --rows=16 --batch=4 --blocks=1 --steps=2 --long_steps=3"
    found, done = results(tmp_path, f"model_size.py {small} {plain}")
    first, second = found["rows"]
    assert first["gradient_bytes"] == second["gradient_bytes"] == 4 * 16**2
    assert abs(first["grown_bytes"]) < first["peak_bytes"] and "grown_bytes" not in second
    for row in (first, second):  # one block each
        assert row["beyond_seconds"] == pytest.approx(row["step_seconds"] - row["own_seconds"])
    for key in ("first_seconds", "step_seconds"):
        (power,) = found["powers"][key]
        assert first[key] * 2**power == pytest.approx(second[key])
    assert "memory after 3 more steps of 4 variables" in done.stdout
