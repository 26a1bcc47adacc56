"""Small runs of the benchmark of the number of variables."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize("what", ["--variables=4,8", "--variables=4 --plain"])
def test_model_size(tmp_path, what):
    small = "--rows=16 --batch=4 --blocks=1 --steps=2 --long_steps=3"
    found, done = results(tmp_path, f"model_size.py {what} {small}")
    first, *others = found["rows"]
    assert abs(first["grown_bytes"]) < first["peak_bytes"]
    assert not any("grown_bytes" in row for row in others)
    for row in found["rows"]:  # one block each
        assert row["gradient_bytes"] == 4 * 16**2
        assert row["beyond_seconds"] == pytest.approx(row["step_seconds"] - row["own_seconds"])
    for key in ("first_seconds", "step_seconds"):
        for second, power in zip(others, found["powers"][key], strict=True):
            assert first[key] * 2**power == pytest.approx(second[key])
    assert "memory after 3 more steps of 4 variables" in done.stdout
