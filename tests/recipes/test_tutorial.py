"""The tutorial runs, and a model that was loaded gives what the trained one gave."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.slow  # starts a process
def test_it_trains_saves_and_loads(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import ctl.recipes.tutorial"],
        cwd=ROOT,
        env={"PATH": "", "TMPDIR": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(re.findall(r"^(.+): loss [\d.]+, accuracy ([\d.]+)$", done.stdout, re.MULTILINE))
    assert [*results] == ["step 78", "step 156", "loaded without the scope", "loaded in the scope"]
    assert float(results["step 156"]) > 0.7
    assert len({*results.values()}) == 2  # all but that of the first epoch are equal
    (run,) = tmp_path.glob("ctl-tutorial-*")
    names = {path.name for path in run.iterdir()}
    assert {"checkpoints", "train", "eval", "model.keras"} <= names
