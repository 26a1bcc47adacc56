"""Small runs of the benchmark of models of many kinds."""

from __future__ import annotations

import pytest
from scripts import results

pytestmark = pytest.mark.slow  # starts processes


def test_model_kinds(tmp_path):
    small = "--kinds=recommender,text_cnn --rounds=2 --seconds=0"
    found, done = results(tmp_path, f"model_kinds.py {small}")
    assert [*found["kinds"]] == ["recommender", "text_cnn"]
    for rows in found["kinds"].values():
        assert [*rows] == ["ctl", "ctl, XLA off", "plain"]
        for row in rows.values():
            assert len(row["ms"]) == len(row["CPU ms"]) == 2
            assert min(row["CPU ms"]) > 0 and max(row["ms"]) < row["first s"] * 1e3
    ones = [line.split() for line in done.stdout.splitlines() if " plain " in line]
    assert [(one[0], one[-2]) for one in ones[-2:]] == [
        ("recommender", "1.00"),
        ("text_cnn", "1.00"),
    ]
