"""Scalars that a step logs are combined over micro-batches, replicas, calls and workers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, make_loop, mlp

from ctl.control.evaluator import Evaluator
from ctl.data.global_batches import GlobalBatches
from ctl.errors import UsageError
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


class Logs(TrainStep):
    """Logs the first feature in all ways, and from a later phase."""

    def loss(self, batch):
        first = batch[0][:, 0]
        self.log("first", first)
        self.log("first_sum", first, reduce="sum")
        self.log("first_max", first, reduce="max")
        self.log("at", tf.cast(self.global_step, tf.float32), reduce="last")
        none = first[:0]
        self.log("at", none, reduce="last")
        self.log("first_max", none, reduce="max")
        return super().loss(batch)

    def clip(self, gradients):
        self.log("clipped", 2.0)
        return super().clip(gradients)


def batches(size: int) -> tf.data.Dataset:
    """Batches in order, again and again. The first feature is below zero, as no zero of padding."""
    features, labels = examples(5 * size)
    features[:, 0] = -1.0 - np.abs(features[:, 0])
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(size).repeat()


def seen(size: int, start: int, stop: int) -> np.ndarray:
    steps = list(batches(size).take(stop))[start:]
    return np.concatenate([features[:, 0].numpy() for features, _ in steps])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "size", "options"),
    [
        (2, 16, {"jit_compile": True}),
        (2, 9, {}),
        (2, 1, {"accumulate_steps": 2, "on_nan": "skip"}),  # 1 and 0 examples
    ],
)
def test_a_record_has_what_was_logged_since_the_last(mirrored, replicas, size, options):
    data = batches(size)
    if "jit_compile" in options:  # needs a static shape
        data = data.map(lambda *batch: [tf.ensure_shape(t, [size, *t.shape[1:]]) for t in batch])
        data = data.map(lambda features, labels: (features, labels))
    loop = make_loop(mirrored(replicas), step_class=Logs, data=data, steps_per_loop=2, **options)
    for start, stop in ((0, 5), (5, 8)):
        scalars, first = loop.train(stop), seen(size, start, stop)
        assert scalars["first"] == pytest.approx(first.mean(), rel=1e-6)
        assert scalars["first_sum"] == pytest.approx(first.sum(), rel=1e-6)
        assert scalars["first_max"] == first.max() < 0
        assert scalars["at"] == stop - 1
        assert scalars["clipped"] == 2.0
        loop.scalars.reset()
    assert "first" not in loop.scalars.read()


@pytest.mark.slow
def test_a_record_has_what_was_logged_before_the_data_ended(mirrored):
    """The call that finds the end of the data returns nothing."""
    data = GlobalBatches(batches(8).take(7), training=False)
    loop = make_loop(mirrored(2), step_class=Logs, data=data, steps_per_loop=5)
    scalars = loop.train(9)
    assert loop.global_step == 7
    assert scalars["first_sum"] == pytest.approx(seen(8, 0, 7).sum(), rel=1e-6)
    assert scalars["clipped"] == 2.0 and scalars["at"] == 6


@pytest.mark.slow
def test_a_skipped_update_logs_nothing(mirrored):
    features, labels = examples(2 * BATCH)
    features[BATCH:, 0] = np.nan
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    loop = make_loop(mirrored(2), step_class=Logs, data=data, on_nan="skip")
    scalars = loop.train(2)
    assert scalars["skipped_steps"] == 1
    assert scalars["first"] == pytest.approx(features[:BATCH, 0].mean(), rel=1e-6)


class LogsInEvaluation(EvalStep):
    def loss(self, batch):
        self.log("first", batch[0][:, 0])
        self.log("first_max", batch[0][:, 0], reduce="max")
        return super().loss(batch)


@pytest.mark.slow
def test_an_evaluation_logs(mirrored):
    strategy = mirrored(4)
    with strategy.scope():
        step = LogsInEvaluation(mlp())
    data = batches(9).take(3)
    evaluator = Evaluator(step, data, strategy=strategy)
    for _ in range(2):  # the second does not count the first
        results = evaluator.run()
        assert results["first"] == pytest.approx(seen(9, 0, 3).mean(), rel=1e-6)
        assert results["first_max"] == seen(9, 0, 3).max()


@pytest.mark.parametrize(
    ("name", "reduce", "message"),
    [
        ("loss", "mean", "this name is taken in the log"),
        ("accuracy", "mean", "this name is taken in the log"),
        ("epoch", "mean", "this name is taken in the log"),
        ("gradient_norm", "mean", "this name is taken in the log"),
        ("learning_rate_2", "last", "this name is taken in the log"),
        ("mine", "median", "one of mean, sum, max, last"),
        ("twice", "sum", "reduce='sum' and with reduce='mean': use one"),
    ],
)
def test_a_wrong_call_is_refused(mirrored, name, reduce, message):
    class Wrong(TrainStep):
        def loss(self, batch):
            self.log("twice", 1.0)
            self.log(name, 1.0, reduce=reduce)
            return super().loss(batch)

    with pytest.raises(UsageError, match=message):
        make_loop(mirrored(1), step_class=Wrong).train(1)


@pytest.mark.slow
def test_too_many_names_are_refused(mirrored):
    class Many(TrainStep):
        def loss(self, batch):
            for number in range(65):
                self.log(f"name{number}", 1.0)
            return super().loss(batch)

    with pytest.raises(UsageError, match="name64.* is the 65th name"):
        make_loop(mirrored(1), step_class=Many).train(1)


def test_a_call_outside_of_a_replica_is_refused(mirrored):
    class Across(TrainStep):
        def apply(self, gradients, finite=None):
            super().apply(gradients, finite)
            tf.distribute.get_replica_context().merge_call(lambda _: self.log("mine", 1.0))

    with pytest.raises(UsageError, match="outside of a replica"):
        make_loop(mirrored(2), step_class=Across).train(1)


def test_with_one_copy_of_a_variable_it_is_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
    with pytest.raises(UsageError, match="use a metric there"):
        make_loop(strategy, step_class=Logs).train(1)
