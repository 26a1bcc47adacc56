"""Checkpoints: what is saved is what comes back, whatever happens to the process and the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.checkpoint import CheckpointManager, bundle, durable
from ctl.errors import CheckpointError, DivergedError, UsageError


def state_of(value: float, *, size: int = 8) -> dict[str, list[tf.Variable]]:
    """Variables that all hold ``value``."""
    return {
        "model": [
            tf.Variable(tf.fill([size, 4], float(value)), name="kernel"),
            tf.Variable(tf.fill([4], float(value)), name="bias"),
        ],
        "global_step": [tf.Variable(int(value), dtype=tf.int64, name="global_step")],
    }


def values_of(state) -> list[float]:
    """The one value that each variable holds."""
    values = []
    for group in state.values():
        for variable in group:
            distinct = np.unique(variable.numpy())
            assert distinct.size == 1, f"{variable.name} is torn: {distinct}"
            values.append(float(distinct[0]))
    return values


def save_steps(directory, steps, **kwargs):
    with CheckpointManager(directory, **{"keep": 10, **kwargs}) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def steps_in(directory) -> list[int]:
    return [saved.step for saved in CheckpointManager(directory, read_only=True).all()]


def restore_fresh(directory, step=None, **kwargs):
    """What a reader restores: the checkpoint and the values."""
    state = state_of(-1)
    saved = CheckpointManager(directory, read_only=True, **kwargs).restore(state, step)
    return saved, values_of(state)


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    """The warnings that absl logged."""
    from absl import logging

    monkeypatch.setattr(logging.get_absl_logger(), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


class Gate:
    """Holds writes of checkpoints until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.reached = threading.Event(), threading.Event()
        write = bundle.write

        def held(prefix, tensors):
            self.reached.set()
            assert self.opened.wait(60)
            write(prefix, tensors)

        monkeypatch.setattr(bundle, "write", held)


# Round trips.


def test_restores_what_was_saved(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(state_of(0)) is None
        path = manager.save(3, state_of(3), {"accuracy": 0.5})
    saved, values = restore_fresh(tmp_path)
    assert values == [3, 3, 3]
    assert (saved.step, saved.path, dict(saved.metrics)) == (3, path, {"accuracy": 0.5})


def test_keras_model_and_optimizer(tmp_path):
    def make(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(3), keras.layers.Dropout(0.5)]
        )
        optimizer = keras.optimizers.AdamW()
        optimizer.build(model.trainable_variables)
        optimizer.apply([tf.random.normal(v.shape) for v in model.trainable_variables])
        return {"model": model.variables, "optimizer": optimizer.variables}

    ours, other = make(1), make(2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, ours, wait=True)
        manager.restore(other)
    for key in ours:
        for a, b in zip(ours[key], other[key], strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64", "bool", "uint32"])
def test_dtypes(tmp_path, dtype):
    value = tf.cast(tf.constant([0, 1, 1]), dtype)
    state, other = {"a": [tf.Variable(value)]}, {"a": [tf.Variable(tf.zeros([3], dtype))]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state, wait=True)
        manager.restore(other)
    assert other["a"][0].numpy().tolist() == value.numpy().tolist()


def test_tensorflow_alone_reads_it(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(7, state_of(7))
    reader = tf.train.load_checkpoint(str(path / "variables"))
    assert reader.get_tensor("global_step/0/.ATTRIBUTES/VARIABLE_VALUE") == 7
    state = state_of(0)
    tf.train.Checkpoint(**state).read(str(path / "variables")).assert_consumed()
    assert values_of(state) == [7, 7, 7]


def test_a_part_of_the_state_is_enough(tmp_path):
    save_steps(tmp_path, [5])
    part = {"model": state_of(0)["model"]}
    CheckpointManager(tmp_path, read_only=True).restore(part)
    assert values_of(part) == [5, 5]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_replicas(tmp_path, mirrored, before, after):
    def make(strategy, value):
        sync, aggregation = tf.VariableSynchronization, tf.VariableAggregation
        with strategy.scope():
            return {
                "model": [tf.Variable([value, value + 1.0], name="w")],
                "metric": [
                    tf.Variable(
                        value,
                        name="total",
                        synchronization=sync.ON_READ,
                        aggregation=aggregation.SUM,
                    )
                ],
                "global_step": [
                    tf.Variable(
                        int(value),
                        dtype=tf.int64,
                        aggregation=aggregation.ONLY_FIRST_REPLICA,
                        name="step",
                    )
                ],
            }

    old, new = mirrored(before), mirrored(after)
    ours, other = make(old, 8.0), make(new, 0.0)
    total = old.extended.read_var(ours["metric"][0]).numpy()  # A sum over the replicas.
    with CheckpointManager(tmp_path) as manager:
        with old.scope():
            manager.save(8, ours, wait=True)
        manager.restore(other)
    for copy in new.experimental_local_results(other["model"][0]):
        assert copy.numpy().tolist() == [8, 9]
    for copy in new.experimental_local_results(other["global_step"][0]):
        assert copy.numpy() == 8
    assert new.extended.read_var(other["metric"][0]).numpy() == total == 8 * before


# Snapshots.


def _dense(v):
    @tf.function
    def update():
        for _ in tf.range(3):
            v.assign_add(tf.ones_like(v))

    return update


def _assign(v):
    return lambda: v.assign(tf.ones_like(v) * 5)


def _scatter(v):
    @tf.function
    def update():
        v.scatter_sub(tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3])))
        v.scatter_nd_update([[1]], tf.ones([1, 4]) * 9)
        v[2:3].assign(tf.ones([1, 4]) * 8)

    return update


def _resource_apply(v):
    slot = tf.Variable(tf.zeros_like(v))

    @tf.function
    def update():
        g = tf.ones_like(v)
        tf.raw_ops.ResourceApplyMomentum(
            var=v.handle, accum=slot.handle, lr=0.1, grad=g, momentum=0.9
        )
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=v.handle, accum=slot.handle, lr=0.1, epsilon=1e-7, grad=g[:2], indices=[0, 3]
        )

    return update


def _compiled(v):
    @tf.function(jit_compile=True)
    def update():
        v.assign_add(tf.ones_like(v))

    return update


def _keras(v):
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([v])

    @tf.function
    def update():
        optimizer.update_step(tf.ones_like(v), v, 0.1)

    return update


@pytest.mark.parametrize(
    "updates",
    [_dense, _assign, _scatter, _resource_apply, _compiled, _keras],
    ids=lambda f: f.__name__,
)
def test_updates_do_not_reach_a_snapshot(tmp_path, monkeypatch, updates):
    # 256 KiB: large enough that TensorFlow does not keep it within a tensor or a node.
    variable = (
        keras.Variable(np.full([16384, 4], 7, np.float32))
        if updates is _keras
        else (tf.Variable(tf.fill([16384, 4], 7.0)))
    )
    update = updates(variable)
    update()  # Traced, and the variable is in whichever mode this kind of update puts it.
    before = variable.numpy().copy()
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": [variable]})
        assert gate.reached.wait(60)
        for _ in range(3):
            update()
        gate.opened.set()
        for _ in range(20):
            update()
        changed = variable.numpy().copy()
        manager.wait()
        manager.restore({"model": [variable]})
    np.testing.assert_array_equal(variable.numpy(), before)
    if updates is not _assign:
        assert not np.array_equal(changed, before)


def test_updates_of_mirrored_variables_do_not_reach_a_snapshot(tmp_path, monkeypatch, mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([4096]))

    @tf.function
    def update():
        strategy.extended.update(variable, lambda v: v.assign_add(tf.ones_like(v)), group=False)

    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, {"model": [variable]})
            update()
            gate.opened.set()
        manager.wait()
        for step in range(3):
            manager.restore({"model": [variable]}, step)
            np.testing.assert_array_equal(variable.numpy(), np.full([4096], step))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_state_that_is_not_finite_is_refused(tmp_path, bad):
    state = state_of(1)
    state["model"][1].assign([0, 0, bad, 0])
    state["z"] = [tf.Variable(bad)]
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(DivergedError, match=r"first in model\[1\] bias"):
            manager.save(1, state)
        assert manager.all() == []
        manager.save(2, state_of(2))  # The manager is still good.
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_what_is_not_finite_is_seen_wherever_it_is(tmp_path, monkeypatch, dtype, place):
    monkeypatch.setattr(bundle, "_PART", 4)  # elements that are looked at together
    values = np.ones([2, 3], "float32")
    state = {"model": [tf.Variable(tf.cast(values, dtype)), tf.Variable(tf.zeros([0], dtype))]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        values[place] = math.nan
        state["model"][0].assign(tf.cast(values, dtype))
        with pytest.raises(DivergedError, match=r"first in model\[0\]"):
            manager.save(2, state)


@pytest.mark.parametrize("resumed", [False, True])
def test_what_was_not_finite_before_training_may_stay_as_it_is(tmp_path, resumed):
    """The Inf of a mask. It may not change, and nothing else may become Inf."""
    state = {"model": [tf.Variable([0.0, -math.inf]), tf.Variable([1.0, 2.0], name="kernel")]}
    manager = CheckpointManager(tmp_path)
    manager.note_constants(state)
    manager.save(1, state)
    if resumed:
        manager.close()
        manager = CheckpointManager(tmp_path)
        manager.restore(state)
    with manager:
        state["model"][1].assign([1.0, math.inf])
        with pytest.raises(DivergedError, match=r"first in model\[1\] kernel"):
            manager.save(2, state)
        state["model"][1].assign([1.0, 2.0])
        state["model"][0].assign([-math.inf, 0.0])
        with pytest.raises(DivergedError, match=r"first in model\[0\]"):
            manager.save(2, state)
        state["model"][0].assign([0.0, -math.inf])
        manager.save(2, state)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("key", ["write", "root", "save_counter", "a/b"])
def test_keys_that_a_tensorflow_checkpoint_cannot_have(tmp_path, key):
    with CheckpointManager(tmp_path) as manager, pytest.raises(UsageError, match=repr(key)):
        manager.save(1, {key: []})


# The thread.


def test_one_write_in_flight(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert gate.reached.wait(60)
        manager.check()  # Does not wait.
        assert steps_in(tmp_path) == []
        threading.Timer(0.2, gate.opened.set).start()
        manager.save(2, state_of(2))
        assert 1 in steps_in(tmp_path)


@pytest.mark.parametrize("surfaces_at", ["save", "check", "wait", "close", "restore", "annotate"])
def test_a_failure_of_the_thread_fails_the_run_once(tmp_path, surfaces_at):
    manager = CheckpointManager(tmp_path / "run")
    durable.discard(tmp_path / "run")
    manager.save(1, state_of(1))
    manager._executor.submit(lambda: None).result()  # The write has ended.
    arguments = {"save": (2, state_of(2)), "restore": (state_of(0),), "annotate": (1, {})}
    with pytest.raises(CheckpointError, match="step 1: .*run: the directory is gone"):
        getattr(manager, surfaces_at)(*arguments.get(surfaces_at, ()))
    manager.close()


def test_the_context_manager_does_not_hide_the_first_exception(tmp_path):
    with pytest.raises(KeyError), CheckpointManager(tmp_path / "run") as manager:
        durable.discard(tmp_path / "run")
        manager.save(1, state_of(1))
        raise KeyError
    with pytest.raises(CheckpointError), CheckpointManager(tmp_path / "run") as manager:
        durable.discard(tmp_path / "run")
        manager.save(1, state_of(1))


def test_synchronous(tmp_path):
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        manager.save(1, state_of(1))
        assert steps_in(tmp_path) == [1]


def test_closed_or_read_only_managers_do_not_write(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.close()
    for closed in (manager, CheckpointManager(tmp_path, read_only=True)):
        with pytest.raises(CheckpointError, match="closed or read-only"):
            closed.save(1, state_of(1))


# Retention.


HOUR = 3600.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"keep": 1}, [7]),
        ({"keep": 3}, [5, 6, 7]),
        ({"keep": 99}, [0, 1, 2, 3, 4, 5, 6, 7]),
        # Accuracies below: 1 and 4 are equal, and the earlier is the better; 3 is NaN; 6 has none.
        ({"keep": 1, "keep_best": 1}, [1, 7]),
        ({"keep": 1, "keep_best": 2}, [1, 4, 7]),
        ({"keep": 1, "keep_best": 9}, [0, 1, 2, 4, 5, 7]),
        ({"keep": 1, "keep_best": 1, "best_mode": "min"}, [2, 7]),
        ({"keep": 1, "keep_best": 1, "best_metric": "loss"}, [7]),
        ({"keep": 1, "keep_every_hours": 1.0}, [0, 2, 5, 7]),
        ({"keep": 1, "keep_every_hours": 1.5}, [0, 4, 7]),
        ({"keep": 2, "keep_best": 1, "keep_every_hours": 2.0}, [0, 1, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at_save", "annotated"])
def test_retention(tmp_path, rule, expected, late):
    hours = [0.0, 0.5, 1.0, 1.25, 1.75, 2.0, 2.9, 3.5]
    accuracy = [0.3, 0.9, 0.1, math.nan, 0.9, 0.2, None, 0.4]
    now = iter([h * HOUR for h in hours])
    with CheckpointManager(tmp_path, clock=lambda: next(now), **rule) as manager:
        for step, value in enumerate(accuracy):
            metrics = {} if value is None else {"accuracy": value}
            manager.save(step, state_of(step), None if late else metrics)
            if late:
                manager.annotate(step, metrics)
    assert steps_in(tmp_path) == expected
    assert sorted(os.listdir(tmp_path)) == [
        ".lock",
        "latest.json",
        *(f"step-{step:010d}" for step in expected),
    ]
    assert restore_fresh(tmp_path)[1] == [7, 7, 7]


def test_metrics_that_come_late(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path, keep=2, keep_best=1) as manager:
        manager.save(1, state_of(1), {"loss": 3.0})
        threading.Timer(0.1, gate.opened.set).start()
        saved = manager.annotate(1, {"accuracy": np.float32(0.5)})  # While it is being written.
        assert dict(saved.metrics) == {"loss": 3.0, "accuracy": 0.5}
        assert saved.evaluated == ["accuracy"]
        assert manager.annotate(1, {"aaa": 1.0}).evaluated == ["accuracy", "aaa"]
        for step in (2, 3, 4):
            manager.save(step, state_of(step))
            manager.annotate(step, {"accuracy": step / 100})
        assert [s.step for s in manager.all()] == [1, 3, 4]
        assert (manager.best().step, manager.latest().step) == (1, 4)
        manager.annotate(4, {"accuracy": 0.6})
        assert [s.step for s in manager.all()] == [3, 4]
        with pytest.raises(CheckpointError, match="No checkpoint of step 2"):
            manager.annotate(2, {"accuracy": 1.0})
    assert restore_fresh(tmp_path, "best")[1] == [4, 4, 4]


@pytest.mark.parametrize(
    "arguments", [{"keep": 0}, {"keep_best": -1}, {"keep_every_hours": 0}, {"best_mode": "most"}]
)
def test_arguments_out_of_range(tmp_path, arguments):
    with pytest.raises(UsageError):
        CheckpointManager(tmp_path, **arguments)


def test_a_url_is_refused():
    with pytest.raises(UsageError, match="gs://"):
        CheckpointManager("gs://bucket/run")


# Damage.


def truncate(path: Path) -> None:
    os.truncate(next(path.glob("*.data*")), 10)


def flip(path: Path) -> None:
    data = next(path.glob("*.data*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def lose_index(path: Path) -> None:
    (path / "variables.index").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-20])


def edit_manifest(**changes):
    def edit(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**content, **changes}))

    return edit


def escape(path: Path) -> None:
    content = json.loads((path / "manifest.json").read_text())
    content["files"]["../../secret"] = {"size": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(content))


def link_data(path: Path) -> None:
    data = next(path.glob("*.data*"))
    data.rename(path.parent / "elsewhere")
    data.symlink_to(path.parent / "elsewhere")


def fifo(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def data_fifo(path: Path) -> None:
    (path / "variables.data-00000-of-00001").unlink()
    os.mkfifo(path / "variables.data-00000-of-00001")


def first_version(path: Path) -> None:
    """The manifest of the first version, with another kind of checksum."""
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in ((p.name, p.read_bytes()) for p in path.glob("variables.*"))
    }
    edit_manifest(files=files)(path)


def flipped_first_version(path: Path) -> None:
    first_version(path)
    flip(path)


def other_content(path: Path) -> None:
    # Checksums hold, but TensorFlow finds something else in the files.
    tensors = {"model": [tf.zeros([1])]}
    bundle.write(str(path / "variables"), tensors)
    edit_manifest(files={k: v for k, v in durable.seal(path).items() if k.startswith("var")})(path)


DAMAGES = {
    "truncated": (truncate, "has 10 bytes instead of"),
    "flipped": (flip, "the crc32 of variables.data-00000-of-00001"),
    "no_index": (lose_index, "variables.index cannot be read"),
    "no_manifest": (lose_manifest, "manifest.json cannot be read"),
    "cut_manifest": (cut_manifest, "manifest.json is not JSON"),
    "escape": (escape, "not a file of a checkpoint: '../../secret'"),
    "link": (link_data, "variables.data-00000-of-00001 cannot be read"),
    "fifo": (fifo, "not a regular file"),
    "data_fifo": (data_fifo, "variables.data-00000-of-00001 cannot be read (not a regular"),
    "flipped_first": (flipped_first_version, "the sha256 of variables.data-00000-of-00001"),
    "no_sum": (edit_manifest(files={"variables.index": {"size": 3}}), "no size and checksum of"),
    "schema": (edit_manifest(schema=2), "schema 2 is not 1"),
    "step": (edit_manifest(step=20), "of step 20"),
    "no_files": (edit_manifest(files={}), "no variables.index"),
    "types": (edit_manifest(metrics={"accuracy": "high"}), "a metric is no number"),
    "evaluated": (edit_manifest(evaluated=["loss"]), "it names no metrics that were evaluated"),
    "code": (edit_manifest(code={"step": 3}), "its code has no step and source"),
    "list": (lambda path: (path / "manifest.json").write_text("[]"), "not an object"),
    "bomb": (lambda path: (path / "manifest.json").write_text("[" * 100000), "is not JSON"),
    "other_content": (other_content, "is not what the manifest says"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, warnings_of, kind):
    damage, message = DAMAGES[kind]
    save_steps(tmp_path, [10, 20, 30])
    damage(tmp_path / "step-0000000030")
    saved, values = restore_fresh(tmp_path)
    assert (saved.step, values) == (20, [20, 20, 20])
    (warning,) = warnings_of()
    assert "step-0000000030" in warning
    assert message in warning
    with pytest.raises(CheckpointError, match="No intact checkpoint in .*step 30: "):
        restore_fresh(tmp_path, 30)
    # The run goes on and meets the same step again.
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state_of(0))
        manager.save(30, state_of(31))
    assert restore_fresh(tmp_path)[1] == [31, 31, 31]


def test_a_checkpoint_of_the_first_version(tmp_path, warnings_of):
    save_steps(tmp_path, [10, 20])
    first_version(tmp_path / "step-0000000020")
    saved, values = restore_fresh(tmp_path)
    assert (saved.step, values) == (20, [20, 20, 20]) and not warnings_of()


def test_no_intact_checkpoint_left(tmp_path):
    save_steps(tmp_path, [10, 20])
    flip(tmp_path / "step-0000000020")
    lose_manifest(tmp_path / "step-0000000010")
    state = state_of(5)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="No intact checkpoint in .*: step 20: the crc32"),
    ):
        manager.restore(state)
    assert values_of(state) == [5, 5, 5]


@pytest.mark.parametrize("pointer", [None, "", "{", "[]", '{"step": "3"}', '{"step": 99}'])
def test_without_a_valid_pointer_the_directory_is_scanned(tmp_path, pointer):
    save_steps(tmp_path, [10, 20])
    if pointer is None:
        (tmp_path / "latest.json").unlink()
    else:
        (tmp_path / "latest.json").write_text(pointer)
    assert CheckpointManager(tmp_path, read_only=True).latest().step == 20
    assert restore_fresh(tmp_path)[0].step == 20


def test_no_checkpoint(tmp_path):
    reader = CheckpointManager(tmp_path / "never", read_only=True)
    assert [reader.restore(state_of(0), s) for s in (None, "latest", "best")] == [None] * 3
    assert (reader.all(), reader.latest(), reader.best()) == ([], None, None)
    assert not (tmp_path / "never").exists()
    save_steps(tmp_path, [10, 20])
    with pytest.raises(CheckpointError, match="No checkpoint of step 15 in .*choose one of 10, 20"):
        restore_fresh(tmp_path, 15)
    with pytest.raises(CheckpointError, match="has the metric 'accuracy'"):
        restore_fresh(tmp_path, "best")


def test_the_best_that_is_intact(tmp_path):
    with CheckpointManager(tmp_path, keep=4) as manager:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.1]):
            manager.save(step, state_of(step), {"accuracy": accuracy})
    flip(tmp_path / "step-0000000001")
    assert restore_fresh(tmp_path, "best")[1] == [2, 2, 2]


def test_saving_a_step_again(tmp_path):
    save_steps(tmp_path, [10, 20])
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(20, state_of(99), wait=True)
        assert restore_fresh(tmp_path)[1] == [20, 20, 20]
        truncate(path)
        assert manager.save(20, state_of(99), wait=True) == path
    assert restore_fresh(tmp_path)[1] == [99, 99, 99]


def test_going_back_to_an_earlier_step(tmp_path, warnings_of):
    save_steps(tmp_path, [10, 20, 30, 40])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state_of(0), 10)
        assert "20, 30, 40" in warnings_of()[0]
        manager.save(20, state_of(21), wait=True)  # Intact, but not of this run's past.
        assert restore_fresh(tmp_path)[1] == [21, 21, 21]
        assert steps_in(tmp_path) == [10, 20, 30, 40]
        manager.save(35, state_of(35), wait=True)
        assert steps_in(tmp_path) == [10, 20, 35, 40]
    assert restore_fresh(tmp_path)[1] == [35, 35, 35]


# What else lies in the directory.


def test_strange_things_are_left_alone(tmp_path):
    directory, outside = tmp_path / "run", tmp_path / "outside"
    save_steps(outside, [50])
    save_steps(directory, [10])
    (directory / "step-0000000050").symlink_to(outside / "step-0000000050")
    (directory / "step-0000000060").write_text("a file")
    (directory / "step-70").mkdir()
    (directory / "tmp-mine").mkdir()
    (directory / f"tmp-step-{'0' * 10}-1-00000000").symlink_to(outside)
    stale = directory / "tmp-step-0000000080-4711-0123abcd"
    stale.mkdir()
    (stale / "variables.index").touch()
    before = sorted(os.listdir(directory))
    assert restore_fresh(directory)[0].step == 10
    assert sorted(os.listdir(directory)) == before
    with CheckpointManager(directory, keep=1) as manager:
        assert manager.latest().step == 10
        assert not stale.exists()
        manager.save(11, state_of(11))
    assert steps_in(directory) == [11]
    assert steps_in(outside) == [50]
    assert (directory / "tmp-mine").is_dir()


def test_a_reader_touches_nothing(tmp_path):
    save_steps(tmp_path, [10, 20])
    (tmp_path / "tmp-latest.json-1-00000000").touch()
    flip(tmp_path / "step-0000000020")
    (tmp_path / ".lock").unlink()

    def look():
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_ino)
            for p in [tmp_path, *tmp_path.rglob("*")]
        }

    before = look()
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert reader.restore(state_of(0)).step == 10
        reader.wait_for_new(99, 0)
    assert look() == before


# Other variables, other runs.


def other_model(**changes):
    state = state_of(0)
    state.update(changes)
    return state


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
        r"is '\(absent\)'; tensorflow was '2.21', is '2.22'; use the same flags",
    ):
        restore_fresh(tmp_path, fingerprint=other)
    other = {**ours, "tensorflow": "2.22"}
    saved, _ = restore_fresh(tmp_path, fingerprint=other, soft_keys=("tensorflow",))
    assert saved.step == 10
    assert "tensorflow was '2.21', is '2.22'" in warnings_of()[-1]


def test_the_code_of_the_step(tmp_path, warnings_of):
    """As `ctl.control.code.identity` describes it."""

    def restore(code):
        with CheckpointManager(tmp_path) as manager:
            manager.code = code
            return manager.restore(state_of(0)).step

    def code(step, source):
        return {"step": step, "source": source}

    with CheckpointManager(tmp_path) as manager:
        manager.code = code("mine:A", "0a")
        manager.save(10, state_of(1))
    assert restore(None) == 10  # a reader that has no step
    assert restore(code("mine:A", "0a")) == 10
    assert restore(code("moved.there:A", "0a")) == 10
    assert warnings_of() == []
    assert restore(code("mine:A", "0b")) == 10
    assert "with another source of the step mine:A" in warnings_of()[0]
    with pytest.raises(CheckpointError, match="written by the step mine:A, not by mine:B: use"):
        restore(code("mine:B", "0b"))
    edit_manifest(code=None)(tmp_path / "step-0000000010")  # of the first version
    assert restore(code("mine:B", "0b")) == 10


# Several processes.


def test_wait_for_new(tmp_path):
    reader = CheckpointManager(tmp_path / "run", read_only=True)
    assert reader.wait_for_new(-1, 0.05, poll_seconds=0.01) is None
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, state_of(10), wait=True)
        assert reader.wait_for_new(9, 0).step == 10
        assert reader.wait_for_new(10, 0) is None
        timer = threading.Timer(0.1, manager.save, (20, state_of(20)))
        timer.start()
        assert reader.wait_for_new(10, 60, poll_seconds=0.01).step == 20
        timer.join()


def test_one_writer(tmp_path):
    code = "import sys, time; from ctl.checkpoint.durable import Lock; "
    code += "Lock(sys.argv[1]); print(1, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)", str(tmp_path / ".lock")],
        stdout=subprocess.PIPE,
    ) as holder:
        try:
            assert holder.stdout.readline() == b"1\n"
            with pytest.raises(CheckpointError, match=f"written by process {holder.pid} on "):
                CheckpointManager(tmp_path)
            assert CheckpointManager(tmp_path, read_only=True).restore(state_of(0)) is None
        finally:
            holder.kill()
    first = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=f"written by process {os.getpid()} on "):
        CheckpointManager(tmp_path)
    first.close()
    CheckpointManager(tmp_path).close()


def test_listing_needs_no_tensorflow():
    code = "import sys, ctl.checkpoint.manifest; "
    code += "assert not {'tensorflow', 'keras', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def run_child(code: str, *arguments: str, wrap: tuple[str, ...] = ()) -> str:
    """Runs ``code`` after the imports in a new process, returns its output."""
    imports = (
        "import os, sys, resource\n"
        "import tensorflow as tf\n"
        "from ctl.checkpoint import CheckpointManager\n"
        "from ctl.errors import CheckpointError\n"
    )
    done = subprocess.run(
        [*wrap, sys.executable, "-c", imports + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL_DISK = """
directory = sys.argv[1]
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
small, big = tf.Variable(tf.fill([1000], 7.0)), tf.Variable(tf.zeros([1 << 20]))
with CheckpointManager(directory) as manager:
    manager.save(1, {"model": [small]}, wait=True)
    for asynchronous in (False, True):
        try:
            manager.save(2, {"model": [small, big]}, wait=not asynchronous)
            manager.wait()
        except CheckpointError as error:
            print(error)
    assert sorted(os.listdir(directory)) == [".lock", "latest.json", "step-0000000001"]
    small.assign(tf.zeros([1000]))
    assert manager.restore({"model": [small]}).step == 1
    assert (small.numpy() == 7).all()
    manager.save(3, {"model": [small]}, wait=True)
    assert [s.step for s in manager.all()] == [1, 3]
"""


@pytest.mark.slow
@pytest.mark.parametrize("means", ["tmpfs", "limit"])
def test_full_disk(tmp_path, means):
    wrap = ()
    if means == "tmpfs":
        # In a mount namespace of the child: gone with it.
        mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
        wrap = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
        try:
            subprocess.run([*wrap, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("may not mount a tmpfs")
    lines = run_child(FULL_DISK, str(tmp_path), means, wrap=wrap).splitlines()
    assert len(lines) == 2
    for line in lines:
        head, _, tail = line.partition(f": {tmp_path}; ")
        assert head == "No space left to save the checkpoint of step 2 (4.0 MiB)"
        missing = float(tail.removeprefix("free ").split(" MiB or choose another --model_dir")[0])
        assert 0 < missing <= 4


def test_a_directory_that_cannot_be_written(tmp_path):
    directory = tmp_path / "run"
    save_steps(directory, [1])
    with CheckpointManager(directory) as manager:
        directory.chmod(0o500)
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)  # Root may write anywhere.
            with pytest.raises(CheckpointError, match="Cannot .*: Permission denied; make it"):
                manager.save(2, state_of(2), wait=True)
            with pytest.raises(CheckpointError, match="Cannot open .*: Permission denied; make it"):
                CheckpointManager(directory / "new")
        finally:
            os.seteuid(os.getuid())
            directory.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Cannot open .*file/run: Not a directory"):
        CheckpointManager(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="Cannot look .*file: Not a directory"):
        restore_fresh(tmp_path / "file")


def test_scratch_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch):
    """As on an NFS, where a file that somebody has open stays as ``.nfs…``."""

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(durable.shutil, "rmtree", busy)
        save_steps(tmp_path, [1, 2, 3], keep=1)
        assert steps_in(tmp_path) == [3]
        left = [path for path in tmp_path.iterdir() if path.name.startswith("tmp-")]
        assert len(left) == 2
        save_steps(tmp_path, [4], keep=1)  # the sweep at its start fails, too
    save_steps(tmp_path, [5], keep=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp-")]


def test_a_directory_is_replaced_after_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    events = []
    for name in ("rename", "fsync"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, o=original, n=name: (events.append(n), o(*args))[1]
        )
    delete = durable._delete
    monkeypatch.setattr(durable, "_delete", lambda path: (events.append("delete"), delete(path)))
    final, new = tmp_path / "export", tmp_path / "tmp-export-1-00000000"
    (final / "old").mkdir(parents=True)
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "file").write_text("new")
    durable.flush(new)
    assert events == ["fsync"] * 3  # the file and two directories
    durable.publish(new, final)
    assert events[3:] == ["rename", "rename", "fsync", "delete"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    assert (final / "deep" / "file").read_text() == "new"


def test_what_cannot_be_replaced_stays(tmp_path, monkeypatch):
    final, new = tmp_path / "export", tmp_path / "tmp-export-1-00000000"
    final.mkdir()
    (final / "old").touch()
    with pytest.raises(FileNotFoundError):
        durable.publish(new, final)  # there is none
    assert (final / "old").exists()


@pytest.mark.parametrize("name", ["a[1]", "b[", "c*", "d?", "e\\f"])
def test_a_directory_whose_name_is_a_pattern(tmp_path, name):
    (tmp_path / "a1").mkdir()  # what a pattern could find
    save_steps(tmp_path / name, [1, 2])
    saved, values = restore_fresh(tmp_path / name)
    assert saved.step == 2 and set(values) == {2.0}
    assert restore_fresh(tmp_path / name, 1)[0].step == 1


# Imports once, then forks a process per line of its input (TensorFlow has not started any thread
# yet) and kills it at a random moment while it saves in a loop.
KILL = """
def work(directory, ready):
    counter = tf.Variable(0, dtype=tf.int64)
    state = {"model": [tf.Variable(tf.zeros([20000])) for _ in range(6)], "global_step": [counter]}

    @tf.function
    def advance():
        for v in state["model"]:
            v.assign_add(tf.ones_like(v))
        counter.assign_add(1)

    with CheckpointManager(directory, keep=2) as manager:
        manager.restore(state)
        for rounds in itertools.count():
            advance()
            manager.save(int(counter), state, wait=rounds == 0)
            os.write(ready, b"1")

for line in sys.stdin:
    delay = float(line)
    begun, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(sys.argv[1], ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(begun, 1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(begun)
    print("killed", flush=True)
"""


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path):
    code = "import itertools, os, signal, sys, time\nimport tensorflow as tf\n"
    code += "from ctl.checkpoint import CheckpointManager\n" + KILL
    state = {
        "model": [tf.Variable(tf.zeros([20000])) for _ in range(6)],
        "global_step": [tf.Variable(0, dtype=tf.int64)],
    }
    last = -1
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            for _ in range(10):
                print(random.uniform(0, 0.3), file=parent.stdin, flush=True)
                assert parent.stdout.readline() == "killed\n"
                reader = CheckpointManager(tmp_path, read_only=True)
                saved = reader.restore(state)
                assert set(values_of(state)) == {saved.step}
                assert saved.step == reader.latest().step > last  # No progress is lost.
                last = saved.step
                for each in reader.all():
                    durable.verify(each.path, each.files)
            parent.stdin.close()
        except BaseException:
            parent.kill()
            raise
    assert parent.returncode == 0
    CheckpointManager(tmp_path).close()  # The lock is free; what was unfinished is gone.
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tmp-")]


# The order in which things reach the disk.


def test_everything_is_durable_before_it_is_seen(tmp_path, monkeypatch):
    events = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real["fsync"](descriptor)

    def moving(name):
        def move(source, target):
            events.append(("move", Path(source), Path(target)))
            real[name](source, target)

        return move

    save_steps(tmp_path, [1], keep=1)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", moving("rename"))
    monkeypatch.setattr(os, "replace", moving("replace"))
    save_steps(tmp_path, [2], keep=1)
    new, old, pointer = (
        tmp_path / name for name in ("step-0000000002", "step-0000000001", "latest.json")
    )

    def index(wanted):
        (found,) = (i for i, event in enumerate(events) if event[0] == "move" and wanted(event))
        return found

    published = index(lambda e: e[2] == new)
    pointed = index(lambda e: e[2] == pointer)
    deleted = index(lambda e: e[1] == old)
    unfinished = events[published][1]
    described = index(lambda e: e[2] == unfinished / "manifest.json")
    files = {unfinished / name for name in os.listdir(new) if name != "manifest.json"}
    assert len(files) == 2
    assert files <= {event[1] for event in events[:described]}
    assert ("fsync", events[described][1]) in events[:described]
    assert ("fsync", unfinished) in events[described:published]
    assert ("fsync", tmp_path) in events[published:pointed]
    assert ("fsync", events[pointed][1]) in events[published:pointed]
    assert ("fsync", tmp_path) in events[pointed:deleted]
