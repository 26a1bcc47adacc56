"""Every recipe trains two workers as it trains two replicas of one process."""

from __future__ import annotations

import numpy as np
import pytest
import recipes_worker
from helpers import largest_difference
from paths import ROOT, SUPPORT
from worker_jobs import codes, said

NOT_STEPS = {"__init__", "lr_range", "population", "samples", "tutorial"}


@pytest.fixture(scope="module")
def out(job, tmp_path_factory):
    """Where two workers left the weights that they trained."""
    out = tmp_path_factory.mktemp("recipes")
    with job(out, program=SUPPORT / "recipes_worker.py") as processes:
        assert codes(processes) == [0, 0], said(out, 0)[-2000:]
    return out


@pytest.mark.parametrize("name", recipes_worker.LOOPS)
def test_two_workers_equal_two_replicas(mirrored, out, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    expected = recipes_worker.trained(mirrored(2), name)
    for worker, wanted in enumerate(expected):
        saved = np.load(out / f"process-{worker}" / f"{name}.npz")
        assert largest_difference(saved.values(), wanted) <= 1e-6


def test_no_recipe_is_left_out():
    files = {path.stem for path in (ROOT / "ctl" / "recipes").glob("*.py")}
    assert {name.split()[0] for name in recipes_worker.LOOPS} == files - NOT_STEPS
