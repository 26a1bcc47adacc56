"""The quickstart: a real kernel of Jupyter runs its cells, and then a plain loop beside them."""

from __future__ import annotations

import pytest
from paths import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_quickstart.py")]  # one kernel

NOTEBOOK = ROOT / "ctl/examples/quickstart.ipynb"
REFERENCE = """
def plain_tensorflow(model, batches):
    optimizer = keras.optimizers.Adam()
    cross_entropy = keras.losses.CategoricalCrossentropy()
    for images, labels in batches:
        with tf.GradientTape() as tape:
            odds = tf.nn.softmax(model(tf.cast(images, tf.float32) / 255, training=True))
            penalty = weight * tf.reduce_mean(tf.reduce_sum(odds * tf.math.log(odds), axis=-1))
            loss = cross_entropy(tf.one_hot(labels, 10), odds) + penalty
        variables = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)

for step, weight in ((ctl.TrainStep, 0.0), (Modest, 0.1)):
    ctl.testing.check_reference(lambda *_: make_loop(step), plain_tensorflow)
print("equal")
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The cells by their first line, as they were run."""
    directory = tmp_path_factory.mktemp("quickstart")
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell(REFERENCE))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
            patch.setenv(name, str(directory))
        resources = {"metadata": {"path": str(directory)}}
        nbclient.NotebookClient(
            book, timeout=600, kernel_name="python3", resources=resources
        ).execute()
    return {c.source.strip().splitlines()[0]: c.outputs for c in book.cells if c.get("outputs")}


def shown(cells, first: str, kind: str = "text/plain") -> str:
    """What the cell that begins with ``first`` has printed and shown."""
    [outputs] = [outputs for line, outputs in cells.items() if line.startswith(first)]
    return "".join(o.get("text") or o.data.get(kind, "") for o in outputs)


def test_it_is_stored_without_outputs():
    code = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    assert 8 <= len(code) <= 12
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_its_cells_show_what_they_say(cells):
    assert "10000 examples" in shown(cells, "train =")
    assert "step 313/313  ━" in shown(cells, "keras.utils.set_random_seed(1)")
    assert "<svg " in shown(cells, "loop.history", "image/svg+xml")
    assert shown(cells, "print(loop.evaluate())").count(": ") >= 5
    assert "'entropy'" in shown(cells, "class Modest")
    assert "restored at step 313\n" in shown(cells, "loop.checkpoints.close()")
    assert "step 469/469  ━" in shown(cells, "loop.checkpoints.close()")


def test_nothing_is_written_to_the_error_output(cells):
    """TensorFlow's messages would be the first thing that a new user sees."""
    for first, outputs in cells.items():
        errors = [o.text for o in outputs if o.get("name") == "stderr"]
        assert not errors, (first, errors)


def test_its_loops_equal_plain_tensorflow(cells):
    assert shown(cells, "def plain_tensorflow") == "equal\n"
