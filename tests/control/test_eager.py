"""`Loop.train(eager=True)`: the numbers of the graph, with NumPy in the step, or one line."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference

from ctl import EvalStep, Evaluator, Loop, TrainStep, UsageError
from ctl.control.eager import check_eager
from ctl.phases.marks import Marks, Ring

ROWS = 27  # batches of 10, 10 and 7: on 4 replicas, 3, 3, 3 and 1; then 2, 2, 2 and 1


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
    "uneven": (4, 10, {"clip_norm": 0.5, "ema_decay": 0.9, "log_norms": True}),
    "empty": (4, 9, {"accumulate_steps": 2}),  # 3, 3, 3 and 0
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_graph(case, mirrored):
    replicas, batch_size, options = CASES[case]
    graph, eager = (make_loop(mirrored(replicas), batch_size, **options) for _ in range(2))
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
