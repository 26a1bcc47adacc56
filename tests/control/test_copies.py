"""One flipped bit in the weights of one replica is found, and the replica is named."""

from __future__ import annotations

import json
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from helpers import CLASSES, FEATURES, adam, make_loop
from keras import layers

import ctl
from ctl.control import copies
from ctl.control.copies import check_copies, checksum
from ctl.distributed import workers
from ctl.errors import DivergedError, UsageError


def flip(strategy, variable: tf.Variable, replica: int) -> None:
    """Changes the last bit of one weight of one replica."""
    copy = strategy.experimental_local_results(variable)[replica]
    value = np.array(copy.numpy())  # else it may share its memory with other replicas
    bits = value.view(f"int{8 * copy.dtype.size}")
    bits.flat[0] ^= 1
    copy.assign(value)


def norms() -> keras.Model:
    parts = [layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([FEATURES]), *parts, layers.Dense(CLASSES)])


def compared(strategy, every: int = 2, **options) -> ctl.Loop:
    loop = make_loop(strategy, **options)
    loop.actions.append(ctl.Every(ctl.CompareReplicas(loop.step), steps=every))
    return loop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "broken", "said"),
    [
        (2, 1, r"replica 0 \(CPU:0\) and replica 1 \(CPU:1\) differ in "),
        (3, 0, r"replica 0 \(CPU:0\) differs from the others in "),
        (4, 2, r"replica 2 \(CPU:2\) differs from the others in "),
    ],
)
def test_a_flipped_bit_is_found_within_the_steps(mirrored, replicas, broken, said):
    strategy = mirrored(replicas)
    loop = compared(strategy, every=3, data=None if 16 % replicas == 0 else batches(15))
    loop.train(3)
    flip(strategy, loop.step.model.trainable_variables[2].value, broken)
    match = (
        f"^{said}.*kernel at step 6, and did not at step 3: check the device, .*up to that step$"
    )
    with pytest.raises(DivergedError, match=match) as raised:
        loop.train(9)
    assert raised.value.exit_code == 3 and loop.global_step == 6


def batches(size: int) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    features = random.normal(size=(10 * size, FEATURES)).astype("float32")
    labels = random.integers(0, CLASSES, 10 * size)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(size, drop_remainder=True)


@pytest.mark.slow
def test_all_state_is_compared(mirrored):
    """At once, since a step may round the difference away."""
    strategy = mirrored(2)
    loop = make_loop(strategy, ema_decay=0.9, loss_scale=True)
    loop.train(1)
    compare, status = ctl.CompareReplicas(loop.step), types.SimpleNamespace(step=1)
    compare(status)
    state = loop.step.state()
    assert {"model", "optimizer", "counters", "ema", "loss_scale"} == state.keys()
    for variable in [v for group in state.values() for v in group]:
        flip(strategy, variable, 1)
        with pytest.raises(
            DivergedError, match=f" in {variable.name.removesuffix(':0')} at step 1"
        ):
            compare(status)
        flip(strategy, variable, 1)
        compare(status)
    flip(strategy, state["model"][0], 1)
    with pytest.raises(DivergedError, match=" at step 1, the first that was compared: check "):
        ctl.CompareReplicas(loop.step)(status)


class Drifting(ctl.TrainStep):
    """Each replica follows its own gradients after some steps, and nothing says so."""

    begin = 0

    def sum_gradients(self, gradients):
        apart = tf.cast(self.global_step >= self.begin, gradients[0].dtype)
        sums = super().sum_gradients(gradients)
        return [(1 - apart) * s + apart * g for s, g in zip(sums, gradients, strict=True)]


def drifting(strategy, begin: int, **options) -> ctl.Loop:
    loop = make_loop(strategy, step_class=Drifting, **options)
    loop.step.begin = begin
    return loop


APART = (
    r"^replica 0 \(CPU:0\) and replica 1 \(CPU:1\) differ in .*bias.* at step {}: .*return "
    r"them from Drifting.unsynchronized_variables\(\)"
)


@pytest.mark.slow
def test_replicas_that_drift_apart_are_found(mirrored, tmp_path):
    """After the first call, at each save and at each evaluation; on all optimizers' slots, too."""
    with pytest.raises(DivergedError, match=APART.format(1)):
        drifting(mirrored(2), 0).train(10)
    loop = drifting(mirrored(2), 3, directory=tmp_path, evaluate=20, steps_per_loop=1)
    loop.train(3)
    loop.save(wait=True)
    assert loop.evaluate()
    loop.train(5)
    for refused in (loop.save, loop.evaluate):
        with pytest.raises(DivergedError, match=APART.format(5)) as raised:
            refused()
    assert raised.value.exit_code == 3
    assert [saved.step for saved in loop.checkpoints.all()] == [3]
    loop.checkpoints.close()


def test_workers_that_drift_apart_are_named(mirrored, monkeypatch, warnings_of):
    """Those of other machines may round differently, so this is no error."""
    loop = make_loop(mirrored(2))

    def all_gather(strategy, text, doing, step):
        other = [[one + 1 for one in copies] for copies in json.loads(text)]
        return [text, json.dumps(other).encode()]

    monkeypatch.setattr(workers, "all_gather", all_gather)
    monkeypatch.setattr(logging, "_log_counter_per_token", {})  # said once in a process
    loop.train(1)
    check_copies(loop.step)
    (said,) = [line for line in warnings_of() if "differ between workers" in line]
    assert re.match(
        r"\S+/kernel, \S+/bias, \S+ and \d+ more differ between workers at step 1", said
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "bool", "int64"])
def test_state_of_any_type(mirrored, monkeypatch, dtype):
    monkeypatch.setattr(copies, "_ELEMENTS_AT_A_TIME", 30)  # of a larger variable, some rows

    class Step(ctl.TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.seen = [self.zeros(shape) for shape in ([], [3], [0], [23, 3])]

        def zeros(self, shape):
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)

    loop = make_loop(mirrored(2), step_class=Step)
    check_copies(loop.step)
    for scalar in (True, False):
        seen = loop.step.seen[0 if scalar else 3]
        first = mirrored(2).experimental_local_results(seen)[0]
        before = first.numpy()
        first.assign(
            tf.ones([], dtype) if scalar else before + np.eye(23, 3, -20).astype(before.dtype)
        )
        with pytest.raises(UsageError, match="Variable.* differs between replicas"):
            check_copies(loop.step)
        first.assign(before)


@pytest.mark.slow
def test_no_false_alarm(mirrored):
    """With all that may differ: Dropout, statistics, clipping, and updates that are skipped."""

    class Step(ctl.TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.total = self.variable("total", [], per_replica=True)

        def loss(self, batch):
            losses, logits = super().loss(batch)
            self.total.assign_add(tf.reduce_sum(losses))
            return losses, logits

    options = {"model": norms, "step_class": Step, "clip_norm": 0.1, "loss_scale": True}
    loop = compared(mirrored(2), every=1, **options)
    loop.step.updater.loss_scale.scale.assign(2.0**127)
    loop.train(20)


def test_one_copy_of_the_weights(mirrored, caplog):
    compared(mirrored(1)).train(4)
    assert caplog.text.count("replicas are not compared: there is one copy of the weights") == 1


@pytest.mark.slow
def test_tensorflows_collectives(ring2):
    loop = compared(ring2, optimizer=adam())
    loop.train(4)
    flip(ring2, loop.step.model.trainable_variables[0].value, 1)
    with pytest.raises(DivergedError):
        loop.train(6)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "complex64"]
)
def test_any_bit_changes_a_checksum(dtype):
    random = np.random.default_rng(0)
    dtype = tf.as_dtype(dtype)
    value = random.integers(0, 256, 5 * dtype.size, dtype=np.uint8)  # NaNs, too

    def of(array: np.ndarray) -> int:
        return int(checksum(tf.constant(array.view(dtype.as_numpy_dtype))))

    for bit in range(0, 8 * len(value), 3):
        flipped = value.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert of(flipped) != of(value)
    assert int(checksum(tf.constant([True, False]))) == 1
