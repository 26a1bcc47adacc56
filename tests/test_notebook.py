"""A first day in a notebook: a real kernel of Jupyter runs the cells."""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_notebook.py")]  # one kernel

MAKE = """
import signal, sys
import ctl, keras, numpy as np
features = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
examples = features, (features[:, 0] > 0).astype("int64")
data = ctl.data.InMemory(examples, global_batch_size=16)
test = ctl.data.InMemory(examples, global_batch_size=16, training=False)
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
step = ctl.TrainStep(model, keras.optimizers.SGD(0.1))
loop = ctl.Loop(
    step,
    data,
    evaluator=ctl.Evaluator(ctl.EvalStep(model), test),
    checkpoints=ctl.CheckpointManager(DIRECTORY),
    steps_per_loop=5,
)
"""
STOP = """
loop.actions.append(ctl.Every(lambda status: signal.raise_signal(signal.SIGINT), steps=35))
loop.train(1000)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """What each cell has shown."""
    directory = tmp_path_factory.mktemp("notebook")
    sources = {
        "make": MAKE.replace("DIRECTORY", repr(str(directory / "run"))),
        "train": "loop.train(20)",
        "save": "loop.save(wait=True)",
        "again": MAKE.replace("DIRECTORY", repr(str(directory / "run"))),
        "unrestored": "loop.train(30)",
        "restore": "loop.restore(); loop.train_and_evaluate(30, evaluate_every=30)",
        "stop": STOP,
        "state": "print(loop.global_step, loop.checkpoints.latest().step, loop.step is step)",
        "go on": "loop.actions.clear(); loop.train(40, progress=False)",
        "no step": "loop.train(40)",
        "history": "loop.history",
    }
    book = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources.values())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(directory))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(directory))
        nbclient.NotebookClient(
            book, timeout=600, kernel_name="python3", allow_errors=True
        ).execute()
    return dict(zip(sources, (cell.outputs for cell in book.cells), strict=True))


def of_kind(outputs, kind):
    return [output for output in outputs if output.output_type == kind]


def error_of(outputs):
    [error] = of_kind(outputs, "error")
    return f"{error.ename}: {error.evalue}"


def printed(outputs):
    return "".join(output.text for output in of_kind(outputs, "stream"))


def test_a_bar_that_updates_in_place(cells):
    assert not of_kind(cells["make"], "error")
    [bar] = of_kind(cells["train"], "display_data")
    assert bar.data["text/plain"].startswith("step 20/20  ━") and "loss" in bar.data["text/plain"]
    [bar] = of_kind(cells["restore"], "display_data")  # one for both
    assert bar.data["text/plain"].startswith("step 30/30  ━")
    assert "eval at step 30 (epoch " in printed(cells["restore"])
    assert not of_kind(cells["go on"], "display_data")  # progress=False
    assert not of_kind(cells["no step"], "display_data")
    assert "no step is run: the loop is at step 40" in printed(cells["no step"])


def test_a_cell_runs_twice(cells):
    assert "a new CheckpointManager takes it over" in printed(cells["again"])
    assert not of_kind(cells["again"], "error")
    assert "holds a run up to step 20: call restore() to continue it" in error_of(
        cells["unrestored"]
    )
    assert not of_kind(cells["restore"], "error")


def test_the_stop_button_keeps_and_saves_the_state(cells):
    assert error_of(cells["stop"]) == (
        "KeyboardInterrupt: the loop stopped after step 35, keeps its state and is saved; the same "
        "call goes on"
    )
    assert printed(cells["state"]).split() == ["35", "35", "True"]
    [result] = of_kind(cells["go on"], "execute_result")
    assert "'loss':" in result.data["text/plain"]


def test_the_history_is_drawn(cells):
    [result] = of_kind(cells["history"], "execute_result")
    assert result.data["image/svg+xml"].startswith("<svg ")
    assert result.data["text/plain"] == "<History of 40 steps and 1 evaluations>"
