"""The rule by which XLA compiles a step: where it must not, and what a resume keeps."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, adam, examples, make_loop

from ctl.control import jit
from ctl.data import InMemory
from ctl.data.global_batches import GlobalBatches
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


def with_operation():
    inputs = keras.Input([FEATURES])
    return keras.Model(inputs, keras.ops.sin(keras.layers.Dense(CLASSES)(inputs)))


class Own(keras.layers.Dense):
    pass


class OwnStep(TrainStep):
    pass


def in_file():
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH).repeat()
    return GlobalBatches(batches)


def strings():
    features, labels = examples()
    return InMemory((features, labels, labels.astype("S")), global_batch_size=BATCH)


def of_rank_3():
    features, labels = examples()
    return InMemory((features[:, None].repeat(4, axis=1), labels), global_batch_size=BATCH)


OTHERS = {
    "several replicas": {"replicas": 2},
    "layer conv": {"model": model(keras.layers.Conv1D(2, 3, name="conv"), features=(FEATURES, 1))},
    "Own": {"model": model(Own(CLASSES))},
    "function of its own": {"model": model(keras.layers.Dense(CLASSES, activation=lambda x: x))},
    "layer own": {"model": model(keras.layers.Dense(CLASSES, bias_regularizer=abs, name="own"))},
    "operation sin": {"model": with_operation},
    "rank 3": {"model": model(outputs(), features=(4, FEATURES)), "data": of_rank_3},
    "mixed_bfloat16": {"model": model(keras.layers.Dense(CLASSES, dtype="mixed_bfloat16"))},
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
    assert each.step.jit_compile is False and reason in jit.why_not(each.step, each.dataset)


def on_gpu(monkeypatch, of):
    """Pretends that the weights of ``of`` are on a GPU."""
    monkeypatch.setattr(jit, "_device", lambda step: "GPU")
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
    assert "Conv2D" in jit.why_not(each.step, each.dataset)
    assert on_gpu(monkeypatch, each) is None and each.step.jit_compile is True
    each = loop(mirrored, **OTHERS["layer conv"])  # of one dimension: nobody measured it
    assert "Conv1D" in on_gpu(monkeypatch, each) and each.step.jit_compile is False


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
    asked, ends = small(mirrored, None, jit_compile=True), {}
    asked.train(6)
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
    # The inequality, so that the equalities say something.
    assert bits(asked) == ends["on"] != ends["off"]
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
