"""What is saved is what comes back; a snapshot is of one moment."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from saved import Gate, restore_fresh, save_steps, state_of, steps_in, values_of

from ctl.checkpoint import CheckpointManager, bundle
from ctl.errors import DivergedError, UsageError


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


def test_a_group_may_be_empty(tmp_path):
    """As that of an optimizer without slots."""
    state = {"model": [tf.Variable(3.0)], "optimizer": []}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state, wait=True)
        state["model"][0].assign(0.0)
        assert manager.restore(state).variables["optimizer"] == []
    assert float(state["model"][0]) == 3.0


def test_a_part_of_the_state_is_enough(tmp_path):
    save_steps(tmp_path, [5])
    part = {"model": state_of(0)["model"]}
    CheckpointManager(tmp_path, read_only=True).restore(part)
    assert values_of(part) == [5, 5]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_replicas(tmp_path, mirrored, before, after):
    def make(strategy, value):
        on_read, kinds = tf.VariableSynchronization.ON_READ, tf.VariableAggregation
        total = {"name": "total", "synchronization": on_read, "aggregation": kinds.SUM}
        step = {"name": "step", "dtype": tf.int64, "aggregation": kinds.ONLY_FIRST_REPLICA}
        with strategy.scope():
            return {
                "model": [tf.Variable([value, value + 1.0], name="w")],
                "metric": [tf.Variable(value, **total)],
                "global_step": [tf.Variable(int(value), **step)],
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
    variable = tf.Variable(tf.fill([16384, 4], 7.0))
    if updates is _keras:
        variable = keras.Variable(np.full([16384, 4], 7, np.float32))
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
