"""The benchmark of the start says what it did; no time is judged."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_startup(tmp_path):
    found, done = results(tmp_path, "startup.py --what=python,bad_flag,ctl --rounds=1")
    seconds = {name: of["rounds"] for name, of in found["what"].items()}
    assert list(seconds) == ["python", "bad_flag", "ctl"]
    assert 0 < seconds["python"][0] < seconds["ctl"][0]  # one of them imports TensorFlow
    assert "bad_flag " in done.stdout
