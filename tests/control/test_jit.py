"""The rule by which XLA compiles a step: where it must not, and what a resume keeps."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, adam, convolutions, examples, make_loop, sgd

from ctl.control import jit
from ctl.data import InMemory, mix
from ctl.data.global_batches import GlobalBatches
from ctl.errors import DivergedError
from ctl.phases.losses import cross_entropy
from ctl.schedule import Cosine
from ctl.step import TrainStep

pytestmark = pytest.mark.compiled_update


@pytest.fixture
def xla_where_asked():
    """The rule is as it is."""


def model(*layers, features=(FEATURES,)):
    return lambda: keras.Sequential([keras.layers.Input(features), *layers])


def outputs():
    return keras.layers.Dense(CLASSES)


class Own(keras.layers.Layer):
    """Computes ``function`` of its inputs."""

    def __init__(self, function=tf.sin):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)

    def compute_output_shape(self, shape):
        return shape


def own(function):
    return {"model": model(Own(function), outputs())}


def by_python(tensor):
    return tf.ensure_shape(tf.numpy_function(lambda x: x, [tensor], tf.float32), tensor.shape)


@tf.custom_gradient
def gradient_by_python(tensor):
    return tensor, by_python


def of_the_batch(tensor):
    """An index or a length that XLA would have to know: 1."""
    return 1 + tf.cast(0 * tensor[0, 0], tf.int32)


@tf.function
def loop_of_the_batch(tensor):
    for _ in tf.range(of_the_batch(tensor)):
        tensor = 2.0 * tensor
    return tensor


def sum_of_sorted(tensor):
    return tf.reduce_sum(tf.sort(tensor))


def pooled():
    layers = keras.layers
    return model(layers.Reshape((-1, 1)), layers.MaxPooling1D(), layers.Flatten(), outputs())()


def with_known_shape(tensor):
    """XLA would have to know the last axis, whatever its static size is."""
    reshaped = tf.reshape(tensor, [BATCH, FEATURES * of_the_batch(tensor)])
    reshaped.set_shape([BATCH, FEATURES])
    return reshaped


def in_growing_array(tensor):
    array = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=tensor.shape)
    return array.write(0, tensor).read(0)


FACTOR = tf.Variable(1.1)


def loop_without_maximum(tensor):
    return tf.while_loop(
        lambda step, _: step < 3, lambda step, x: (step + 1, x * FACTOR), (0, tensor)
    )[1]


def sums_along_axes(tensor):
    """The axis is 0 at first, and then 1."""
    return tf.while_loop(
        lambda step, _: step < 2,
        lambda step, x: (step + 1, tf.cumsum(x, step) * FACTOR),
        (0, tensor),
        maximum_iterations=2,
    )[1]


class FromATable(keras.layers.Layer):
    """Looks ids up without the call of the Embedding."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(9, 1)
        self.words.build()

    def call(self, features):
        ids = keras.ops.cast(features, "int32")
        return keras.ops.take(self.words.embeddings, ids, axis=0)[..., 0]


def from_a_table():
    return model(FromATable(), outputs())()


def greatest():
    return model(keras.layers.GlobalMaxPooling1D(), outputs(), features=(4, FEATURES))()


def recurrent(units):
    return lambda: model(keras.layers.LSTM(units), outputs(), features=(4, FEATURES))()


class OwnStep(TrainStep):
    pass


def in_file():
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH).repeat()
    return GlobalBatches(batches)


def strings():
    features, labels = examples()
    return InMemory((features, labels, labels.astype("S")), global_batch_size=BATCH)


def steps_of_features():
    features, labels = examples()
    return InMemory((features[:, None].repeat(4, axis=1), labels), global_batch_size=BATCH)


OTHERS = {
    "several replicas": {"replicas": 2},
    r"layer conv2d.* \(Conv2D\)": {"model": convolutions},
    "operation MaxPool": {"model": pooled},
    "operation PyFunc": own(by_python),
    "operation IdentityN .* may have a gradient": own(gradient_by_python),
    "operation Where": own(lambda x: tf.ensure_shape(tf.boolean_mask(x, x[:, 0] < 9), x.shape)),
    "operation Stateless.* random numbers": {
        "model": lambda: model(keras.layers.Dropout(0.1), outputs())()
    },
    "operation TopKV2": {
        "model": model(keras.layers.Dense(CLASSES, bias_regularizer=sum_of_sorted))
    },
    "a shape that is not known": own(loop_of_the_batch),
    "operation Reshape .* needs a constant": own(with_known_shape),
    "operation Slice .* needs a constant": own(
        lambda x: x + tf.slice(x, [0, of_the_batch(x)], [BATCH, 1])
    ),
    "operation FloorMod .* needs a constant": own(
        lambda x: x + tf.cast(tf.range(FEATURES) % of_the_batch(x), tf.float32)
    ),
    "operation Cumsum .* needs a constant": own(sums_along_axes),
    "operation TensorListGetItem .* needs a constant": own(
        lambda x: x + tf.TensorArray(tf.float32, 2).unstack(x[:2]).read(of_the_batch(x))
    ),
    "has no greatest length": own(loop_without_maximum),
    "makes a TensorArray longer": own(in_growing_array),
    "operation Maximum .* loses a NaN": own(lambda x: x + tf.maximum(x[:, :1], x[:, 1:2])),
    "operation Cast .* loses a NaN": own(lambda x: x + tf.cast(tf.cast(x, tf.int32), tf.float32)),
    "operation Max .* loses a NaN": {"model": greatest, "data": steps_of_features},
    "is no lookup of an Embedding": own(lambda x: x + tf.gather([1.0, 2.0], tf.cast(x, tf.int32))),
    "operation GatherV2 .* no lookup of an Embedding": {"model": from_a_table},
    "operations take long": own(lambda x: functools.reduce(lambda y, _: y * 0.9, range(700), x)),
    "operation StridedSlice .* needs a constant": own(lambda x: x + x[:, of_the_batch(x), None]),
    "is of bfloat16": {"model": model(keras.layers.Dense(CLASSES, dtype="mixed_bfloat16"))},
    "while/.* multiplies matrices": {"model": recurrent(128), "data": steps_of_features},
    "has 33554432 elements": own(lambda x: x + tf.reduce_sum(tf.ones([1 << 25]))),
    "the model alone cannot be traced": own(lambda x: x * (1 // (x.shape[0] is None))),
    "GlobalBatches": {"data": in_file},
    "not all numbers": {"data": strings},
    "OwnStep": {"step_class": OwnStep},
    "accumulate_steps": {"accumulate_steps": 2},
    "jit_update": {"jit_update": False},
    "the loss is <lambda>": {"loss_fn": lambda y, x: cross_entropy(y, x)},
    "the schedule is <lambda>": {"schedule": lambda step: 0.1},
    "multiplies": {"model": lambda: mlp_of(2048, 2048)},
    "variables take long": {"model": lambda: mlp_of(*[2] * 40)},
}


def mlp_of(*widths):
    return model(*(keras.layers.Dense(width) for width in widths), outputs())()


def loop(mirrored, replicas=1, data=None, **options):
    data = data() if data else InMemory(examples(), global_batch_size=BATCH)
    return make_loop(mirrored(replicas), data=data, **options)


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_not_known_to_gain_and_to_work_is_not_compiled(mirrored, reason):
    each = loop(mirrored, **OTHERS[reason])
    assert each.step.jit_compile is False
    assert re.search(reason, jit.why_not(each.step, each.dataset))


@pytest.mark.slow
def test_a_mixture_in_memory_is_compiled(mirrored):
    def mixture():
        datasets = (InMemory(examples(), global_batch_size=BATCH, seed=seed) for seed in (1, 2))
        return mix([*zip(datasets, (0.7, 0.3), strict=True)])

    by_rule = loop(mirrored, data=mixture, seed=1)
    assert by_rule.step.jit_compile is True
    without = loop(mirrored, data=mixture, seed=1, jit_compile=False)
    losses = [each.train(7, progress=False)["loss"] for each in (by_rule, without)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def on_gpu(monkeypatch, of):
    """Pretends that the weights of ``of`` are on a GPU."""
    monkeypatch.setattr(jit, "_device", lambda step: "GPU")
    jit._decisions.clear()
    of.step.jit_compile = of.step.jit_by_rule = None
    jit.decide(of.step, of.dataset)
    return jit.why_not(of.step, of.dataset)


def test_on_a_gpu_convolutions_are_compiled_too(mirrored, monkeypatch):
    def small_images():
        features, labels = examples()
        features = features.reshape(-1, 2, FEATURES // 2, 1)
        return InMemory((features, labels), global_batch_size=BATCH)

    layers = [keras.layers.Conv2D(2, 1), keras.layers.MaxPooling2D(1), keras.layers.Flatten()]
    convnet = model(*layers, outputs(), features=(2, FEATURES // 2, 1))
    each = loop(mirrored, model=convnet, data=small_images)
    assert "(Conv2D)" in jit.why_not(each.step, each.dataset)
    assert on_gpu(monkeypatch, each) is None and each.step.jit_compile is True
    # Nobody measured these there.
    each = loop(mirrored, model=recurrent(2), data=steps_of_features)
    assert "operation TensorList" in on_gpu(monkeypatch, each)
    layers = [keras.layers.Reshape((-1, 1)), keras.layers.Conv1D(2, 3), keras.layers.Flatten()]
    each = loop(mirrored, model=model(*layers, outputs()))
    assert "(Conv1D)" in on_gpu(monkeypatch, each)


def of_many_layers():
    """Layers of a GNN, of recurrent networks and of transformers, with code of the user's."""
    layers = keras.layers
    inputs = keras.Input([FEATURES], dtype="int32")
    hidden = layers.Embedding(8, 4, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(hidden)
    hidden += layers.MultiHeadAttention(2, 3)(hidden, hidden, use_causal_mask=True)
    hidden = layers.Dense(4, "gelu", kernel_regularizer="l2")(layers.LayerNormalization()(hidden))
    hidden = layers.GRU(4)(Own()(keras.ops.matmul(hidden, keras.ops.transpose(hidden, (0, 2, 1)))))
    return keras.Model(inputs, outputs()(hidden))


def words():
    ids = np.random.default_rng(0).integers(8, size=(4 * BATCH, FEATURES))
    return InMemory((ids, ids.sum(1) % CLASSES), global_batch_size=BATCH)


@pytest.mark.slow
def test_layers_that_gain_are_compiled(mirrored):
    """The numbers are those without XLA, up to rounding."""
    ends = []
    for asked in (None, False):
        options = {"model": of_many_layers, "optimizer": sgd(), "seed": 1, "jit_compile": asked}
        each = loop(mirrored, data=words, **options)
        assert each.step.jit_compile is (asked is None), jit.why_not(each.step, each.dataset)
        each.train(2)
        ends.append([v.numpy() for v in each.step.trainable_variables])
    for compiled, alone in zip(*ends, strict=True):
        np.testing.assert_allclose(compiled, alone, rtol=1e-4, atol=2e-6)


class Counting(Own):
    """Adds a loss, and counts its calls."""

    calls = 0

    def call(self, inputs):
        self.calls += 1
        self.add_loss(tf.reduce_mean(inputs**2))
        return self.function(inputs)


def test_nobody_sees_that_the_model_was_looked_at(mirrored):
    layer = Counting()
    with mirrored(1).scope():
        trained = model(layer, outputs())()
    each = loop(mirrored, model=lambda: trained)
    assert each.step.jit_compile is True and not trained.losses  # those of a graph are of no use
    each.train(2)
    traced = layer.calls
    each.train(4)
    assert layer.calls == traced  # it is not traced again for what the first trace has counted


@pytest.mark.slow
def test_the_model_is_looked_at_again_after_a_change(mirrored, monkeypatch):
    looked = []
    looks = jit._operations
    monkeypatch.setattr(jit, "_operations", lambda *of: looked.append(1) or looks(*of))
    layer = Counting()
    each = loop(mirrored, model=model(layer, outputs()))
    each.train(2)
    each.train(4)
    assert each.step.jit_compile is True and len(looked) == 1
    layer.function = tf.cos
    each.train(6)
    assert each.step.jit_compile is True and len(looked) == 2
    calls = layer.calls
    each.train(8)
    assert layer.calls == calls and len(looked) == 2  # the count is no change
    layer.function = by_python
    each.train(10)
    assert each.step.jit_compile is False and len(looked) == 3 and each.global_step == 10


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_keras_has_of_its_own_and_float64_of_numpy_are_compiled(mirrored, activation):
    """silu has a gradient of its own, and the data are cast."""

    def data():
        features, labels = examples()
        return InMemory((features.astype("float64"), labels), global_batch_size=BATCH)

    dense = keras.layers.Dense(4, activation)
    each = loop(mirrored, model=model(dense, outputs()), data=data)
    assert each.step.jit_compile is True, jit.why_not(each.step, each.dataset)


def test_an_embedding_that_is_not_used_is_no_error(mirrored):
    class Unused(Own):
        def __init__(self):
            super().__init__()
            self.words = keras.layers.Embedding(3, 2)

        def build(self, shape):
            pass

    each = loop(mirrored, model=model(Unused(), outputs()))
    assert each.step.jit_compile is True, jit.why_not(each.step, each.dataset)


@pytest.mark.slow
def test_an_id_that_is_nan_makes_a_nan(mirrored):
    """XLA would make 0 of it."""

    def with_gaps():
        ids, labels = words().arrays
        ids = ids.astype("float32")
        ids[::3, 2] = np.nan
        return InMemory((ids, labels), global_batch_size=BATCH)

    of_floats = model(keras.layers.Embedding(8, 1), keras.layers.Flatten(), outputs())
    each = loop(mirrored, model=of_floats, data=with_gaps)
    assert each.step.jit_compile is True, jit.why_not(each.step, each.dataset)
    with pytest.raises(DivergedError, match="example 0 has a NaN"):
        each.train(2)


@pytest.mark.slow
def test_an_id_outside_of_a_table_makes_a_nan(mirrored):
    """XLA would take the nearest row. `check_ids` sees the ids of the data alone."""

    class Shifted(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.words = keras.layers.Embedding(8, 1)

        def call(self, ids):
            return self.words(ids + 1)[..., 0]

    def of_words():
        return keras.Sequential([keras.Input([FEATURES], dtype="int32"), Shifted(), outputs()])

    each = loop(mirrored, model=of_words, data=words)
    assert each.step.jit_compile is True, jit.why_not(each.step, each.dataset)
    with pytest.raises(DivergedError, match="--eager"):
        each.train(2)


def test_a_device_that_nobody_measured_is_named(mirrored, monkeypatch):
    each = loop(mirrored)
    assert jit._device(each.step) == "CPU"
    monkeypatch.setattr(jit, "_device", lambda step: "TPU")
    assert "TPU" in jit.why_not(each.step, each.dataset)


def test_what_is_asked_for_is_done(mirrored):
    for asked in (False, True):
        each = loop(mirrored, jit_compile=asked)
        jit.decide(each.step, each.dataset)
        assert each.step.jit_compile is asked and each.step.jit_by_rule is None


def small(mirrored, directory, replicas=1, **options):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), outputs()]
    return loop(
        mirrored,
        replicas,
        model=model(*layers),
        optimizer=adam(),
        schedule=Cosine(0.01, total_steps=20),
        ema_decay=0.9,
        directory=directory,
        **options,
    )


def bits(of):
    return b"".join(v.numpy().tobytes() for group in of.step.state().values() for v in group)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_decision(mirrored, tmp_path):
    """Bit for bit; also one that began without XLA, as all did before there was the rule."""
    ends = {}
    for name, first in (("on", {}), ("off", {"jit_compile": False})):
        begun = small(mirrored, tmp_path / name, **first)
        assert begun.step.jit_compile is (name == "on")
        begun.train(4)
        begun.save(wait=True)
        begun.checkpoints.close()
        resumed = small(mirrored, tmp_path / name)
        assert resumed.restore().step == 4
        assert resumed.step.jit_compile is (name == "on")
        for each in (begun, resumed):
            each.train(6)
        assert bits(begun) == bits(resumed)
        resumed.checkpoints.close()
        ends[name] = bits(resumed)
    assert ends["on"] != ends["off"]  # so that the equalities say something
    wider = small(mirrored, tmp_path / "on", replicas=2)
    assert wider.restore().step == 4 and wider.step.jit_compile is False
    wider.checkpoints.close()


def test_what_changes_is_decided_anew(mirrored):
    """XLA has no Python."""
    each = loop(mirrored)
    assert each.step.jit_compile is True

    def by_python(labels, logits):
        same = tf.py_function(lambda x: x, [logits], tf.float32)
        return cross_entropy(labels, tf.ensure_shape(same, logits.shape))

    each.step.loss_fn = by_python
    each.train(2)
    assert each.step.jit_compile is False and each.global_step == 2
    each = loop(mirrored)
    each.step.metrics.append(keras.metrics.AUC(name="auc"))
    assert "metric auc" in jit.why_not(each.step, each.dataset)
