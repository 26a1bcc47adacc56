"""The tutorial runs, and a model that was loaded gives what the trained one gave."""

from __future__ import annotations

import re

PROGRAM = """
import sys, tempfile

def run():
    tempfile.tempdir = sys.argv[1]
    import ctl.data
    load = ctl.data.load

    def load_part(name, training=True, **options):
        part = {"split": "train[:2560]"} if training else {}
        return load(name, training=training, **part, **options)

    ctl.data.load = load_part
    import ctl.recipes.tutorial
"""


def test_it_trains_saves_and_loads(zygote, tmp_path):
    """On a quarter of its training data."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = zygote.run("program", tmp_path, path=[tmp_path])
    results = dict(re.findall(r"^(.+): loss [\d.]+, accuracy ([\d.]+)$", done.stdout, re.MULTILINE))
    assert [*results] == ["step 20", "step 40", "loaded without the scope", "loaded in the scope"]
    assert float(results["step 40"]) > 0.65
    assert len({*results.values()}) == 2  # all but that of the first epoch are equal
    (run,) = tmp_path.glob("ctl-tutorial-*")
    names = {path.name for path in run.iterdir()}
    assert {"checkpoints", "train", "eval", "model.keras"} <= names
