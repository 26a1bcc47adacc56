"""`Loop.train(eager=True)`: the numbers of the graph, with NumPy in the step, or one line."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference

from ctl import DivergedError, EvalStep, Evaluator, Loop, TrainStep, UsageError
from ctl.base import tf_internals
from ctl.control.eager import check_eager
from ctl.phases.marks import Marks, Ring

ROWS = 27  # batches of 10, 10 and 7, or of 13, 13 and 1


class Looks(TrainStep):
    """Reads the values of its losses where there are any."""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        if tf.executing_eagerly():
            self.seen.append(losses.numpy().sum())
        self.log("largest", tf.reduce_max(losses))
        return losses, outputs


class LooksAgain(EvalStep):
    """An evaluation that no graph can hold."""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return tf.constant(losses.numpy()), outputs


def make_loop(strategy, batch_size=10, **options):
    keras.utils.set_random_seed(1)
    features = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((features, (features[:, 0] > 0).astype(np.int64)))
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [
                *(keras.Input([6]), layers.Dense(8, "relu"), layers.BatchNormalization()),
                *(layers.Dropout(0.2), layers.Dense(3)),
            ]
        )
        metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        step = Looks(model, keras.optimizers.SGD(0.1, momentum=0.9), metrics=metrics, **options)
        step.seen = []
        evaluator = Evaluator(LooksAgain(model), dataset.batch(10), strategy=strategy)
    return Loop(step, dataset.batch(batch_size), strategy=strategy, evaluator=evaluator)


CASES = {
    "plain": (1, 10, {}),
    # The third batch: 1 and 0.
    "uneven, empty": (
        2,
        13,
        {"accumulate_steps": 2, "clip_norm": 0.5, "ema_decay": 0.9, "log_norms": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_graph(case, mirrored):
    replicas, batch_size, options = CASES[case]
    graph, eager = (make_loop(mirrored(replicas), batch_size, **options) for _ in range(2))
    graph.train(3)
    wanted = graph.train(5)
    eager.train(3, eager=True)
    parts = replicas * options.get("accumulate_steps", 1)
    assert 3 <= len(eager.step.seen) <= 3 * parts  # values, of each replica and micro-batch
    got = eager.train(5)  # in a graph again
    assert not tf.config.functions_run_eagerly()
    weights = [[v.numpy() for v in loop.step.model.variables] for loop in (graph, eager)]
    assert largest_difference(*weights) < 2e-6
    for name in wanted.keys() - {"steps_per_second"}:
        assert got[name] == pytest.approx(wanted[name], rel=1e-4), name


class LossMadeInf(TrainStep):
    """From the third step on, the loss is Inf; a mask of -Inf is meant."""

    def loss(self, batch):
        losses, logits = super().loss(batch)
        masked = tf.where(losses < 0, -np.inf, losses)
        return masked - tf.math.log(tf.cast(self.global_step < 2, tf.float32)), logits


class GradientMadeNaN(TrainStep):
    """The loss is finite, and its gradient is not."""

    def loss(self, batch):
        losses, logits = super().loss(batch)
        return losses + tf.sqrt(0 * losses), logits


@keras.saving.register_keras_serializable()
class Logarithm(keras.layers.Layer):
    def call(self, inputs):
        return keras.ops.log(inputs - 1e3)


HERE = "test_eager.py, line \\d+, in"
NOT_FINITE = {
    LossMadeInf: f"the loss is inf at step 3; Log made Inf in .*{HERE} loss; last good",
    GradientMadeNaN: "is nan at step 2; .*Grad made (NaN|Inf) in the backward pass.*; last good",
    Logarithm: f"the loss is nan at step 1; Log made NaN in the layer log, in .*{HERE} call; last",
}


def make_bad_loop(strategy, kind, dataset=None, **options):
    features = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    with strategy.scope():
        layers = [keras.Input([6]), keras.layers.Dense(3)]
        layers += [Logarithm(name="log")] if kind is Logarithm else []
        step_class = TrainStep if kind is Logarithm else kind
        model = keras.Sequential(layers)
        step = step_class(model, keras.optimizers.SGD(0.1), **options)
    batches = tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(10)
    return Loop(step, dataset or batches, strategy=strategy)


@pytest.mark.parametrize(
    ("kind", "replicas"), [(Logarithm, 1), (LossMadeInf, 2), (GradientMadeNaN, 2)]
)
def test_what_makes_a_nan_is_named(kind, replicas, mirrored):
    """With its layer and its line; the mask is not."""
    loop = make_bad_loop(mirrored(replicas), kind)
    with pytest.raises(DivergedError, match=NOT_FINITE[kind]) as raised:
        loop.train(9, eager=True)
    assert str(raised.value).count(" made ") == 1 and "--eager" not in str(raised.value)


def test_a_nan_in_a_graph_says_how_to_find_it(mirrored):
    with pytest.raises(
        DivergedError, match=r"train again with --eager \(eager=True\) to see which"
    ):
        make_bad_loop(mirrored(2), LossMadeInf).train(9)
    loop = make_bad_loop(mirrored(2), LossMadeInf)
    assert loop.train(2, eager=True)["loss"] > 0  # before that, nothing is said
    tf.math.log(-1.0)  # nor is it seen after that
    assert not str(loop._divergence.origins)


def test_data_with_a_nan_are_named_as_before():
    batches = tf.data.Dataset.from_tensors((np.full([4, 6], np.nan, "float32"), np.arange(4) % 2))
    loop = make_bad_loop(tf.distribute.get_strategy(), Logarithm, batches.repeat())
    with pytest.raises(DivergedError, match="example 0 .*has a NaN or Inf .*: mend the data, or"):
        loop.train(2, eager=True)


@pytest.mark.slow
def test_checks_of_all_operations_in_a_graph(mirrored):
    """XLA has none; the message says what works."""
    tf.debugging.enable_check_numerics()
    try:
        loop = make_bad_loop(mirrored(2), LossMadeInf, jit_compile=True, jit_update=True)
        with pytest.raises(UsageError, match="adds: leave it out, and give eager=True .* or make"):
            loop.train(1)
        without = {"jit_update": False, "jit_compile": False}
        loop = make_bad_loop(mirrored(2), Logarithm, **without)
        with pytest.raises(tf.errors.InvalidArgumentError, match="of graph op .*Log"):
            loop.train(9)
        loop = make_bad_loop(mirrored(2), Logarithm)
        with pytest.raises(tf.errors.InvalidArgumentError, match='eagerly-executing op "Log"'):
            loop.train(9, eager=True)
    finally:
        tf.debugging.disable_check_numerics()


def test_without_what_sees_operations(monkeypatch):
    """Another TensorFlow may not have it: eager trains as before."""
    monkeypatch.setattr(tf_internals, "_CALLBACKS", "tensorflow.gone")
    assert "cannot name the operation" in tf_internals.no_operations_seen()
    with pytest.raises(DivergedError, match="^the loss is inf at step 3; last good checkpoint"):
        make_bad_loop(tf.distribute.get_strategy(), LossMadeInf).train(9, eager=True)


@pytest.mark.slow
def test_a_training_with_an_evaluation_that_no_graph_can_hold(mirrored, caplog):
    loop = make_loop(mirrored(2), jit_compile=None)
    caplog.set_level("INFO")
    results = loop.train_and_evaluate(2, evaluate_every=1, eager=True)
    assert results["loss"] > 0 and loop.global_step == 2
    assert "eager: steps run one at a time, without graphs: slow" in caplog.text
    assert "significant overhead" not in caplog.text
    assert loop.steps.run.experimental_get_tracing_count() == 0


def test_the_data_end(caplog):
    loop = make_loop(tf.distribute.get_strategy())
    loop.dataset._dataset = loop.dataset._dataset.take(2)
    loop.train(9, eager=True)
    assert loop.global_step == 2 and "the dataset ended after step 2 of 9" in caplog.text


def test_what_needs_a_graph_is_refused(mirrored, monkeypatch):
    loop = make_loop(mirrored(2))
    loop.step.observer = Marks(loop.step, Ring(loop.step, keep=2))
    with pytest.raises(UsageError, match="^time stamps need the graph of the step: leave out"):
        loop.train(1, eager=True)
    monkeypatch.setattr("ctl.distributed.workers.is_multi_worker", lambda strategy: True)
    with pytest.raises(UsageError, match="^eager works in one process.*MirroredStrategy"):
        check_eager(loop.step)
