"""Every recipe resumes bit for bit; those that ask what workers are train two of them as they train
two replicas of one process."""

from __future__ import annotations

import ast
import functools
import re

import numpy as np
import pytest
import recipes_worker
from helpers import largest_difference
from paths import ROOT, SUPPORT
from worker_jobs import run_job

from ctl import testing

NOT_STEPS = {"__init__", "lr_range", "population", "pretrained", "samples", "tutorial"}
# The tests of the first two pause at other steps, and on one replica, too.
NOT_RESUMED = {"sam", "unfreezing", *recipes_worker.LIKE_ANOTHER}
# These have on each replica a state of its own. Of seeds, which all have, see test_loop_resume.py.
RESUMED_ON_TWO = {"compressed", "powersgd", "dp_sgd", "zero1", "local_sgd", "diloco", "moe"}
RESUMED_WITH = {
    "gradient_noise_scale": {"accumulate_steps": 2},
    "mixup": {"accumulate_steps": 2},
}


@pytest.fixture(scope="module")
def out(job, tmp_path_factory):
    """Where two workers left the weights that they trained."""
    out = tmp_path_factory.mktemp("recipes")
    run_job(job, out, program=SUPPORT / "recipes_worker.py")
    return out


@pytest.mark.parametrize("name", recipes_worker.ON_WORKERS)
def test_two_workers_equal_two_replicas(mirrored, out, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    expected = recipes_worker.trained(mirrored(2), name)
    for worker, wanted in enumerate(expected):
        saved = np.load(out / f"process-{worker}" / f"{name}.npz")
        assert largest_difference(saved.values(), wanted) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in recipes_worker.LOOPS if n not in NOT_RESUMED])
def test_a_resume_changes_no_bit(tmp_path, monkeypatch, name):
    """After 2 of 4 steps: of `LocalSGD` and `DiLoCo`, within a round."""
    monkeypatch.chdir(tmp_path)
    replicas = 1 + (name.split()[0] in RESUMED_ON_TWO)
    make = functools.partial(recipes_worker.LOOPS[name], **RESUMED_WITH.get(name, {}))
    testing.check_resumed(lambda strategy, saved: make(strategy, checkpoints=saved), replicas)


def test_no_recipe_is_left_out():
    files = {path.stem for path in (ROOT / "ctl" / "recipes").glob("*.py")}
    assert {name.split()[0] for name in recipes_worker.LOOPS} == files - NOT_STEPS


def lines_of_code(text: str) -> int:
    """Without empty lines, comments, imports and docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        text_alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text_alone or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(re.match(r"\s*[^\s#]", line)) for i, line in lines if i not in left_out)


def test_the_page_counts_lines_of_code():
    folder = ROOT / "ctl" / "recipes"
    rows = re.findall(
        r"^\| `(\w+\.py)` .* (\d+) \| \d+ \|$", (folder / "README.md").read_text(), re.M
    )
    assert len(rows) == 22
    found = {name: lines_of_code((folder / name).read_text("utf-8")) for name, _ in rows}
    assert found == {name: int(count) for name, count in rows}
