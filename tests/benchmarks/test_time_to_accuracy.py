"""The race to an accuracy says what it did; no time is judged."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_time_to_accuracy(tmp_path):
    command = "time_to_accuracy.py --seeds=1 --variants=ctl,orbit,torch --steps=250"
    found, done = results(tmp_path, command)
    runs = {key.split()[1]: of for key, of in found["runs"].items()}
    assert set(runs) == {"ctl", "orbit", "torch"}
    for name in ("orbit", "torch"):  # where it is not installed, how to
        if "failure" in runs[name]:
            assert "is not installed" in runs.pop(name)["failure"]
    for of in runs.values():  # 250 steps do not reach the goal of 2,000
        assert of["step"] == 250 and of["seconds"] is None
        (accuracy,) = of["accuracies"]
        assert 0.7 < accuracy < 0.86
    assert "ctl          0 of 1      inf" in done.stdout
    _, again = results(tmp_path, command)  # goes on: there is nothing left to run
    assert "seed 1" in done.stdout and "seed 1" not in again.stdout
    assert again.stdout.splitlines()[1:] == [
        line for line in done.stdout.splitlines()[1:] if "seed 1" not in line
    ]
