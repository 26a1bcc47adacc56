"""Checkpoints of other variables and of other runs are refused."""

from __future__ import annotations

import pytest
import tensorflow as tf
from saved import edit_manifest, restore_fresh, save_steps, state_of

from ctl.checkpoint import CheckpointManager
from ctl.errors import CheckpointError


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"model": [tf.Variable(tf.zeros([8, 5]), name="kernel"), tf.Variable(tf.zeros([4]))]},
            r"model\[0\] is kernel float32\[8, 4\] instead of kernel float32\[8, 5\];",
        ),
        (
            {"global_step": [tf.Variable(0, dtype=tf.int32, name="global_step")]},
            r"global_step\[0\] is global_step int64\[\] instead of global_step int32\[\];",
        ),
        (
            {"model": [tf.Variable(tf.zeros([8, 4]))]},
            r"2 variables in 'model' instead of 1; model\[1\] bias float32\[4\] is extra;",
        ),
        (
            {"global_step": [tf.Variable(0, dtype=tf.int64), tf.Variable(0.0, name="scale")]},
            r"1 variables in 'global_step' instead of 2; global_step\[1\] scale .* is missing;",
        ),
        ({"ema": [tf.Variable(0.0)]}, "it has no 'ema', only model, global_step;"),
        ({"model": [tf.Variable(0.0)] * 9}, r"; and \d+ more;"),
    ],
)
def test_other_variables(tmp_path, state, message):
    save_steps(tmp_path, [10, 20])
    whole = {**state_of(3), **state}
    before = [v.numpy().tolist() for group in whole.values() for v in group]
    with pytest.raises(CheckpointError, match=message) as raised:
        CheckpointManager(tmp_path, read_only=True).restore(whole)
    assert "\n" not in str(raised.value)
    remedy = "the step with the arguments it was written with or choose another directory"
    assert str(raised.value).endswith(f"; make the model and {remedy}")
    assert [v.numpy().tolist() for group in whole.values() for v in group] == before


def test_other_names_are_a_warning(tmp_path, warnings_of):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": [tf.Variable(1.0, name="dense_1/kernel")]}, wait=True)
        manager.restore({"model": [tf.Variable(1.0, name="dense/kernel")]})
        assert warnings_of() == []  # Keras numbers layers.
        manager.restore({"model": [tf.Variable(1.0, name="dense/bias")]})
    assert "model[0] is dense_1/kernel instead of dense/bias" in warnings_of()[0]


def test_fingerprint(tmp_path, warnings_of):
    ours = {"seed": 1, "split": "train", "tensorflow": "2.21", "shape": (28, 28)}
    save_steps(tmp_path, [10], fingerprint=ours)
    assert restore_fresh(tmp_path, fingerprint=ours)[0].step == 10
    assert restore_fresh(tmp_path)[0].fingerprint["seed"] == 1
    other = {**ours, "seed": 2, "batch": 64, "tensorflow": "2.22"}
    del other["split"]
    with pytest.raises(
        CheckpointError,
        match=r"another run: batch was '\(absent\)', is 64; seed was 1, is 2; split was 'train', "
        r"is '\(absent\)'; tensorflow was '2.21', is '2.22'; use the same arguments and data, .* "
        r"soft_keys=\['batch', 'seed', 'split', 'tensorflow'\]\)\)",
    ):
        restore_fresh(tmp_path, fingerprint=other, soft_keys=())
    other = {**ours, "tensorflow": "2.22"}
    saved, _ = restore_fresh(tmp_path, fingerprint=other)  # a soft key
    assert saved.step == 10
    assert "tensorflow was '2.21', is '2.22'" in warnings_of()[-1]


def test_samples_of_the_data_are_compared_if_the_checkpoint_has_some(tmp_path):
    """The first versions had none."""
    now = {"seed": 1, "samples": "a"}
    save_steps(tmp_path / "old", [1], fingerprint={"seed": 1})
    assert restore_fresh(tmp_path / "old", fingerprint=now)[0].step == 1
    save_steps(tmp_path / "parts", [1], fingerprint={"mixture": [{"seed": 1}, {"seed": 1}]})
    assert restore_fresh(tmp_path / "parts", fingerprint={"mixture": [now, now]})[0].step == 1
    save_steps(tmp_path / "new", [1], fingerprint=now)
    with pytest.raises(CheckpointError, match="samples was 'a', is 'b'"):
        restore_fresh(tmp_path / "new", fingerprint={"seed": 1, "samples": "b"})


def test_batches_of_the_users_own_as_the_first_versions_named_them(tmp_path):
    """Without a shuffle, their order is the same."""
    save_steps(tmp_path, [1], fingerprint={"first batch": "a"})
    now = {"elements": "spec", "shuffle": [], "first examples": "a"}
    of_python = {"elements": "spec", "shuffle": []}
    for same in (now, of_python):
        assert restore_fresh(tmp_path, fingerprint=same)[0].step == 1
    for other in ({"first examples": "b"}, {"shuffle": [["shuffle", 9, 1, 0]]}):
        with pytest.raises(CheckpointError, match=f"another run: .*{min(other)} "):
            restore_fresh(tmp_path, fingerprint=now | other)


def test_batches_that_python_made_in_one_of_the_runs(tmp_path):
    """A ``py_function`` is added to find a fault: there is no batch to compare, and what else is
    known is compared."""
    native = {"elements": "spec", "shuffle": [], "first examples": "a"}
    of_python = {"elements": "spec", "shuffle": []}
    for number, (was, now) in enumerate([(native, of_python), (of_python, native)]):
        save_steps(tmp_path / str(number), [1], fingerprint=was)
        assert restore_fresh(tmp_path / str(number), fingerprint=now)[0].step == 1
        with pytest.raises(CheckpointError, match="another run: elements was 'spec', is 'other'"):
            restore_fresh(tmp_path / str(number), fingerprint=now | {"elements": "other"})


def test_the_code_of_the_step(tmp_path, warnings_of):
    """As `ctl.control.source_hash.identity` describes it."""

    def restore(code):
        with CheckpointManager(tmp_path) as manager:
            manager.code = code
            return manager.restore(state_of(0)).step

    def code(step, source, **others):
        return {"step": step, "source": source, **others}

    with CheckpointManager(tmp_path) as manager:
        manager.code = code("mine:A", "0a")
        manager.save(10, state_of(1))
    assert restore(None) == 10  # a reader that has no step
    assert restore(code("mine:A", "0a")) == 10
    assert restore(code("moved.there:A", "0a")) == 10
    assert warnings_of() == []
    assert restore(code("mine:A", "0b")) == 10
    assert "other code: the source of the step mine:A, of its layers or of" in warnings_of()[0]
    with pytest.raises(CheckpointError, match="written by the step mine:A, not by mine:B: use"):
        restore(code("mine:B", "0b"))
    # The first versions recorded no modules and settings, then no code at all.
    newer = {"modules": {"mine": "1", "more": "1"}, "model": {"layer dense": {"units": 8}}}
    before = len(warnings_of())
    assert restore(code("mine:A", "0a", **newer)) == 10
    edit_manifest(code=None)(tmp_path / "step-0000000010")
    assert restore(code("mine:B", "0b", **newer)) == 10
    assert len(warnings_of()) == before
    # Modules that only one has imported are not compared.
    newer |= {"settings": {"keras.config.floatx()": "float32"}}
    path = tmp_path / "step-0000000010"
    edit_manifest(code=code("mine:A", "0a", **{**newer, "modules": {"mine": "0", "less": "0"}}))(
        path
    )
    edit_manifest(versions={"keras": "3.0"})(path)
    changed = {**newer, "settings": {"keras.config.floatx()": "float64"}}
    changed |= {"model": {"layer dense": {"units": 8, "rate": 0.5}, "layer add": {"n": 1}}}
    assert restore(code("mine:A", "0a", **changed)) == 10
    [said] = warnings_of()[before:]
    assert said.split(": ", 1)[1] == (
        'layer add was "(absent)", is {"n": 1}; layer dense: rate was "(absent)", is 0.5; '
        'keras.config.floatx() was "float32", is "float64"; and 2 more; '
        "the run continues with the present code"
    )
