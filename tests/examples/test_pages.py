"""What the pages "from ..." say of ctl runs, line by line. Where the other loop is installed, both
train the same weights.
"""

from __future__ import annotations

import ast
import functools
import re
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference
from paths import ROOT

import ctl

PAGES = {page.stem: page.read_text("utf-8") for page in ROOT.glob("ctl/examples/from_*.md")}
COMPARED = {"from_keras_fit": "keras", "from_the_tutorial": "tensorflow", "from_orbit": "orbit"}


def block(page: str, language: str) -> str:
    """The one fenced block of ``language``."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return text


def rows() -> list:
    """Of the tables: the page, the other loop's line, and the snippets of ctl; not its flags, which
    `tests/test_readme.py` checks."""
    found = []
    for page in sorted(PAGES):
        for theirs, ours in re.findall(r"^\| (`.*) \| (.*) \|$", PAGES[page], re.MULTILINE):
            snippets = [
                s for s in re.findall(r"`([^`]+)`", ours) if not s.startswith(("--", "python -m"))
            ]
            if snippets:
                runs = re.search(r"loop\.(train|eval)|\.(predict|export)\(", ours)
                slow = [pytest.mark.slow] if runs or page == "from_the_tutorial" else []
                found.append(pytest.param(page, snippets, id=f"{page}: {theirs}", marks=slow))
    return found


def prepared(page: str, snippets: list[str]) -> dict:
    """What the program of ``page`` makes before it trains and prints; its loop only if ``snippets``
    make no other, since a step belongs to one loop."""
    tree = ast.parse(block(page, "python"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    if any("ctl.Loop(" in snippet for snippet in snippets):
        tree.body = [node for node in tree.body if not ast.unparse(node).startswith("loop = ")]
    return run(tree, {"__name__": page})


def run(code: str | ast.Module, names: dict) -> dict:
    exec(compile(code, code if isinstance(code, str) else "program", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@functools.cache
def shared(page: str) -> dict:
    return prepared(page, [])


@pytest.mark.parametrize(("page", "snippets"), rows())
def test_a_line_of_a_table_runs(page, snippets):
    """After what the program of the page makes; lines that change none of it share it."""
    changes = re.search("[Ll]oop| = ", " ".join(snippets))
    names = prepared(page, snippets) if changes else dict(shared(page))
    for snippet in snippets:
        run(snippet, names)


def test_there_are_lines():
    counts = {page: sum(row.values[0] == page for row in rows()) for page in PAGES}
    assert len(counts) == 4 and min(counts.values()) > 12


@pytest.mark.slow
@pytest.mark.parametrize("page", COMPARED)
def test_both_train_the_same_weights(page, capsys):
    pytest.importorskip(COMPARED[page])
    program = block(page, "python")
    shared, marker, _ = program.partition("\n# With ctl\n")
    assert marker
    ours = run(program, {"__name__": page})["model"]
    assert capsys.readouterr().out.strip(), "a program of a page shows what it does"
    theirs = run(shared + block(page, "py"), {"__name__": page})["model"]
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-5


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(240, 8)).astype("float32")
Y = RANDOM.integers(0, 2, 240)
DECAY = keras.optimizers.schedules.CosineDecay(0.1, 30)
COSINE = ctl.schedule.Cosine(0.1, total_steps=30)

# Lines of the table: of Keras's Adam, of its data, and of the step and the loop here.
LINES = {
    "accumulate": ({"gradient_accumulation_steps": 2}, (X, Y), {"accumulate_steps": 2}, {}),
    "clip, schedule, sample_weight": (
        {"global_clipnorm": 0.05, "learning_rate": DECAY},
        (X, Y, Y + 1.0),
        {"clip_norm": 0.05},
        {"schedule": COSINE},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_line_of_fit_and_that_of_ctl_give_the_same_weights(line):
    """With regularization and BatchNorm, whose statistics are compared, too."""
    of_adam, arrays, of_step, of_loop = LINES[line]
    batches = tf.data.Dataset.from_tensor_slices(arrays)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    first = keras.layers.Dense(16, "relu", kernel_regularizer="l2")
    layers = [keras.Input([8]), first, keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    theirs = keras.models.clone_model(model)
    theirs.set_weights(model.get_weights())
    theirs.compile(keras.optimizers.Adam(**{"learning_rate": 0.01, **of_adam}), loss)
    theirs.fit(batches.batch(24 // of_step.get("accumulate_steps", 1)), epochs=3, verbose=0)
    step = ctl.TrainStep(model, keras.optimizers.Adam(0.01), loss, **of_step)
    ctl.Loop(step, batches.batch(24), **of_loop).train(epochs=3)
    assert largest_difference(model.get_weights(), theirs.get_weights()) <= 1e-5
