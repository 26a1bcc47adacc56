"""Plans against what the model says must move: bytes, variables, order, under every strategy."""

from __future__ import annotations

import collections
import copy
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, examples, make_loop, mlp, network, precision
from keras import layers

from ctl import data
from ctl.base import tf_internals
from ctl.control.agreement import plan_facts
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.plan.plan import Plan, from_json

TIMEOUT = tf.distribute.experimental.CommunicationOptions(timeout_seconds=60)


def planned(strategy, **options) -> Loop:
    defaults = {"optimizer": keras.optimizers.Adam, "options": TIMEOUT}
    return make_loop(strategy, **defaults | options)


def plan_of(*args, **kwargs) -> Plan:
    loop = planned(*args, **kwargs)
    return loop.plan()


def names(plan: Plan) -> list[str]:
    return [path for c in plan.collectives for m in c.members for path in m.variables]


def parameters(loop: Loop) -> int:
    return sum(math.prod(v.shape) for v in loop.step.model.trainable_variables)


@pytest.fixture(scope="module")
def hierarchical():
    return tf.distribute.MirroredStrategy(
        [f"/cpu:{i}" for i in range(4)],
        cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(num_packs=1),
    )


def test_one_sum_for_each_gradient_on_one_device(mirrored):
    loop = planned(mirrored(2), clip_norm=1.0)
    plan = loop.plan()
    (pack,) = plan.collectives
    assert (pack.name, pack.kind, pack.ops) == ("pack0", "AddN", 4)
    assert pack.bytes == pack.wire_bytes == 4 * parameters(loop)
    assert (pack.group_size, pack.devices, pack.in_loop) == (2, ("CPU:0", "CPU:1"), True)
    # The last gradients come first, and each has a sum of its own.
    assert names(plan) == [v.path for v in reversed(loop.step.model.trainable_variables)]
    assert pack.start_share == 0 and pack.full_share == 1 and pack.share_by == "flops"
    (loss,) = plan.other
    assert (loss.purpose, loss.in_loop, loss.after) == ("loss", False, ("pack0",))
    assert plan.lints == plan.notes == ()


@pytest.mark.slow
def test_four_replicas_send_from_the_one_that_sums(mirrored, hierarchical):
    loop = planned(mirrored(4))
    (pack,) = loop.plan().collectives
    assert (pack.group_size, pack.wire_bytes) == (4, 3 * pack.bytes)
    loop = planned(hierarchical)
    (tree,) = loop.plan().collectives
    assert (tree.kind, tree.ops, tree.group_size) == ("AddN", 3, 4)  # two pairs, and both
    assert (tree.shape, tree.bytes) == ((parameters(loop),), pack.bytes)
    assert tree.wire_bytes == 2 * pack.bytes  # to its neighbour and to the other pair
    assert tree.start_share == tree.full_share == 1  # all gradients are joined first
    assert len(tree.members) == 4


def test_a_ring_in_packs(ring2):
    loop = planned(ring2, bytes_per_pack=200, ema_decay=0.9)
    plan = loop.plan()
    kernels = [c for c in plan.collectives if c.kind == "CollectiveReduceV2"]
    assert [c.name for c in kernels] == ["pack0", "pack1", "pack2"]
    assert [c.after for c in kernels] == [(), ("pack0",), ("pack1",)]
    assert [c.bytes for c in kernels] == [180, 32, 384]
    assert [c.wire_bytes for c in kernels] == [180, 32, 384]  # 2(n-1)/n is 1 for two
    assert [c.ops for c in kernels] == [2, 2, 2]
    assert {(c.group_size, c.hint, c.timeout) for c in kernels} == {(2, "ring", 60.0)}
    # 16 examples on 2 replicas; FLOPs of the backward pass: kernel of the last layer, what it
    # hands back, kernel of the first layer.
    last, back, first = (2 * 8 * 8 * CLASSES, 2 * 8 * 8 * CLASSES, 2 * 8 * 8 * FEATURES)
    shares = [c.start_share for c in kernels]
    total = last + back + first
    np.testing.assert_allclose(shares, [last / total, (last + back) / total, 1.0])
    assert sorted(names(plan)) == sorted(v.path for v in loop.step.model.trainable_variables)


def test_one_replica_has_nothing_to_reduce(mirrored):
    plan = plan_of(mirrored(1))
    assert (plan.replicas, plan.collectives, plan.other, plan.lints) == (1, (), (), ())


def convolutions() -> keras.Model:
    image, norm = layers.Reshape([4, 3, 1]), layers.BatchNormalization()
    return network(image, layers.Conv2D(2, 2), norm, layers.Dropout(0.5), layers.Flatten())


def frozen() -> keras.Model:
    model = mlp()
    model.layers[0].trainable = False
    return model


def words() -> keras.Model:
    parts = [layers.Embedding(10, 6), layers.LSTM(3), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([4], dtype="int32"), *parts])


def tokens():
    features = np.zeros([64, 4], np.int32)
    return data.InMemory((features, examples(64)[1]), global_batch_size=BATCH)


def partial():
    return data.as_dataset(tf.data.Dataset.from_tensor_slices(examples(20)).batch(BATCH).repeat())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dataset", "optimizer", "options", "beside"),
    [
        (convolutions, None, keras.optimizers.Lamb, {"accumulate_steps": 2}, 2),
        (frozen, partial, keras.optimizers.Adafactor, {"ema_decay": 0.9, "clip_norm": 1.0}, 1),
        (words, tokens, keras.optimizers.Adam, {"on_nan": "skip", "jit_update": False}, 0),
        (convolutions, None, keras.optimizers.AdamW, {"loss_scale": True}, 3),
        (mlp, None, keras.optimizers.SGD, {"jit_compile": True}, 0),
    ],
)
def test_every_trainable_variable_is_reduced_once(
    mirrored, model, dataset, optimizer, options, beside
):
    with precision("mixed_float16" if "loss_scale" in options else "float32"):
        loop = planned(
            mirrored(2),
            model=model,
            optimizer=optimizer,
            data=dataset and dataset(),
            **options,
        )
        plan = loop.plan()
    trainable = [v.path for v in loop.step.model.trainable_variables]
    assert sorted(path for path in names(plan) if path in trainable) == sorted(trainable)
    # BatchNorm's moving statistics ride along, without micro-batches also the squares of what moved
    # the mean; or the number of valid examples.
    (pack,) = plan.collectives
    others = [m for m in pack.members if not set(m.variables) & set(trainable)]
    assert len(others) == beside
    assert pack.full_share == 1
    assert plan.lints == ()


def test_a_synchronized_batch_norm(mirrored):
    def model():
        return network(layers.Dense(8), layers.BatchNormalization(synchronized=True))

    plan = plan_of(mirrored(2), model=model)
    purposes = [c.purpose for c in plan.other]
    assert purposes.count("forward") == 3 and purposes.count("backward") == 2
    assert purposes.count("loss") == 1 and len(purposes) == 6
    (pack,) = plan.collectives
    assert pack.again == () and plan.lints == ()


class Joined(keras.layers.Layer):
    """Its gradient is a concatenation."""

    def build(self, shape):
        self.qkv = self.add_weight(shape=(shape[-1], 3 * 4), name="qkv")

    def call(self, x):
        q, k, v = tf.split(self.qkv, 3, axis=1)
        return (x @ q) * (x @ k) + x @ v


class Parts(keras.layers.Layer):
    """It has so many weights that TensorFlow splits the gradient of their concatenation."""

    def build(self, shape):
        self.parts = [self.add_weight(shape=(shape[-1], 1), name=f"part{i}") for i in range(20)]

    def call(self, x):
        return x @ tf.concat(self.parts, axis=1)


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


class Twins(keras.layers.Layer):
    """Two layers of one name."""

    def build(self, shape):
        self.twins = [keras.layers.Dense(8, name="twin") for _ in range(2)]
        for twin in self.twins:
            twin.build(shape)

    def call(self, x):
        return self.twins[0](x) * self.twins[1](x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "dataset", "beside", "ring"),
    [
        (Joined, partial, 1, True),
        (Parts, None, 0, True),
        (Scaled, partial, 1, False),
        (Twins, None, 0, False),
    ],
)
def test_each_weight_is_found_once(mirrored, ring2, layer, dataset, beside, ring):
    loop = planned(
        ring2 if ring else mirrored(2),
        model=lambda: network(layer()),
        data=dataset and dataset(),
        bytes_per_pack=1 if ring else 0,  # each tensor is a pack
    )
    plan = loop.plan()
    found = [m for c in (*plan.collectives, *plan.other) if c.in_loop for m in c.members]
    assert len([m for m in found if not m.variables]) == beside
    paths = collections.Counter(v.path for v in loop.step.model.trainable_variables)
    numbered = [f"{path}#2" for path, count in paths.items() if count == 2]
    assert sorted(names(plan)) == sorted([*paths, *numbered])
    assert bool(numbered) == (layer is Twins)


def test_planning_runs_no_step_and_traces_once(mirrored):
    loop = planned(mirrored(2))
    before = loop.step.model.get_weights()
    first = loop.plan()
    assert loop.plan() == first
    assert loop.global_step == 0
    for ours, theirs in zip(loop.step.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    loop.train(until=3)
    assert loop.steps.run.experimental_get_tracing_count() == 1


def test_json(mirrored):
    plan = plan_of(mirrored(2), bytes_per_pack=200)
    value = json.loads(json.dumps(plan.to_json()))
    assert from_json(value) == plan
    assert value["fingerprint"] == plan.fingerprint and len(plan.fingerprint) == 64
    for path, bad, words_ in [
        (("schema",), 2, "not a plan of this version"),
        (("replicas",), "2", "plan.replicas is not of type int"),
        (("collectives",), {}, "plan.collectives is not a list"),
        (("collectives", 0, "bytes"), 1.5, "bytes is not of type int"),
        (("collectives", 0, "members", 0), {}, "does not have the fields of a Member"),
        (("collectives", 0, "dtype"), "float64", "does not match its fingerprint"),
    ]:
        broken = copy.deepcopy(value)
        *outer, last = path
        target = broken
        for key in outer:
            target = target[key]
        target[last] = bad
        with pytest.raises(UsageError, match=words_):
            from_json(broken)


@pytest.mark.slow
def test_the_fingerprint_sees_what_workers_must_agree_on(mirrored):
    def fingerprint(**options):
        keras.backend.clear_session()  # the same names of layers
        return plan_of(mirrored(2), **options).fingerprint

    plain = fingerprint()
    assert fingerprint(clip_norm=1.0) == plain  # moves the same
    assert fingerprint(bytes_per_pack=200) != plain
    assert fingerprint(model=frozen) != plain


def test_a_graph_that_cannot_be_read_trains_all_the_same(mirrored, monkeypatch):
    loop = planned(mirrored(2))
    assert "the plan of all of them" in plan_facts(loop.plan)
    monkeypatch.setattr(loop, "plan", lambda: 1 / 0)
    assert plan_facts(loop.plan) == {}


def test_xla_cannot_compile_several_devices(mirrored):
    loop = planned(mirrored(2))
    plan = loop.plan(xla=True)
    assert plan.xla is None
    assert plan.notes == ("XLA cannot compile a step that runs on several devices",)


def test_without_a_way_to_define_functions(mirrored, monkeypatch):
    monkeypatch.setattr(tf_internals, "_CONTEXT", "tensorflow.gone")
    loop = planned(mirrored(1))
    plan = loop.plan(xla=True)
    assert "has no tensorflow.gone.context: what XLA makes" in plan.notes[0]


def test_without_definitions_of_operations(mirrored, monkeypatch):
    loop = planned(mirrored(2))
    whole = loop.plan()
    monkeypatch.setattr(tf_internals, "_DEFINITIONS", "tensorflow.gone")
    plan = loop.plan()
    assert "has no tensorflow.gone" in plan.notes[0]
    assert plan.collectives == whole.collectives
