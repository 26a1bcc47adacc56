"""Trainings that save and evaluate, and evaluations in the middle of a training."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    accuracy,
    assert_replicas_agree,
    examples,
    largest_difference,
    make_loop,
    mlp,
)
from pretended import Pretend

from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import GlobalBatches
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

EVALUATED = 49  # three batches of 16 and one of 1


class Journal:
    """A loop on pretended steps whose evaluations are noted, with what was on the disk then."""

    datasets = ()

    def trace(self):
        """There is nothing to trace."""

    def __init__(self, directory, monkeypatch, *, fail_at=None, **options):
        self.events: list[tuple] = []
        self.fail_at = fail_at
        self.loop = make_loop(
            directory=directory,
            actions=[lambda s: self.events.append(("train", s.step, s.until, s.final))],
            eval_actions=[lambda step, results: self.events.append(("evaluated", step, results))],
            steps_per_loop=100,
            **options,
        )
        self.loop.evaluator = self
        Pretend(self.loop, monkeypatch)

    def run(self, on_progress, asked_to_stop):
        step = self.loop.global_step
        self.loop.checkpoints.wait()
        assert self.loop.checkpoints.latest().step == step, "not saved before the evaluation"
        if step == self.fail_at:
            raise ZeroDivisionError("the evaluation fails")
        if on_progress:
            on_progress(1, 1)
        return {"accuracy": step / 100}

    def go(self, until):
        try:
            return self.loop.train_and_evaluate(until, evaluate_every=10)
        finally:
            self.loop.checkpoints.close()

    def saved(self):
        return {s.step: dict(s.metrics) for s in self.loop.checkpoints.all()}


def test_train_and_evaluate(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    assert run.go(25) == {"accuracy": 0.25}
    assert run.events == [
        ("train", 10, 25, False),
        ("evaluated", 10, {"accuracy": 0.10}),
        ("train", 20, 25, False),
        ("evaluated", 20, {"accuracy": 0.20}),
        ("train", 25, 25, True),
        ("evaluated", 25, {"accuracy": 0.25}),
    ]
    assert run.saved() == {s: {"accuracy": s / 100} for s in (10, 20, 25)}

    again = Journal(tmp_path, monkeypatch)
    again.loop.restore()
    assert again.go(25) == {"accuracy": 0.25}  # finished: as the first time, but nothing is done
    assert again.events == []

    longer = Journal(tmp_path, monkeypatch)
    longer.loop.restore()
    assert longer.go(33) == {"accuracy": 0.33}
    assert [e[:2] for e in longer.events] == [
        ("train", 30),
        ("evaluated", 30),
        ("train", 33),
        ("evaluated", 33),
    ]


@pytest.mark.parametrize("due", [20, 25])
def test_a_resumed_run_makes_up_for_the_evaluation_due(tmp_path, monkeypatch, due):
    run = Journal(tmp_path, monkeypatch, fail_at=due)
    with pytest.raises(ZeroDivisionError):
        run.go(25)
    again = Journal(tmp_path, monkeypatch)
    assert again.loop.restore().step == due
    assert again.go(25) == {"accuracy": 0.25}
    assert again.events[0] == ("evaluated", due, {"accuracy": due / 100})
    assert len(again.events) == (3 if due == 20 else 1)
    assert again.saved() == {s: {"accuracy": s / 100} for s in (10, 20, 25)}


def test_a_run_resumed_between_evaluations_does_not_evaluate_first(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    run.loop.train(13)
    run.loop.save(wait=True)
    run.loop.checkpoints.close()
    again = Journal(tmp_path, monkeypatch)
    again.loop.restore()
    again.go(20)
    assert [e[:2] for e in again.events] == [("train", 20), ("evaluated", 20)]


def test_metrics_that_were_saved_are_no_evaluation(tmp_path, monkeypatch):
    run = Journal(tmp_path, monkeypatch)
    run.loop.train(20)
    run.loop.save({"accuracy": 0.9, "note": 1.0}, wait=True)
    run.loop.checkpoints.close()  # the process ends before the evaluation
    for evaluated in ([("evaluated", 20)], []):
        again = Journal(tmp_path, monkeypatch)
        again.loop.restore()
        assert again.go(20) == {"accuracy": 0.2}
        assert [e[:2] for e in again.events] == evaluated
    assert again.saved() == {20: {"accuracy": 0.2, "note": 1.0}}


@pytest.mark.parametrize("count", [20, 23])
def test_data_that_end_are_evaluated_once_more(tmp_path, count):
    """Also where they end at an evaluation, or between two."""

    class Finite(GlobalBatches):
        def __init__(self, dataset):
            super().__init__(dataset, training=False)

    data = tf.data.Dataset.from_tensor_slices(examples(count * BATCH)).batch(BATCH)
    evaluated = []
    loop = make_loop(
        data=Finite(data),
        directory=tmp_path,
        evaluate=EVALUATED,
        eval_actions=[lambda step, results: evaluated.append((step, results))],
    )
    results = loop.train_and_evaluate(100, evaluate_every=10)
    loop.checkpoints.close()
    assert [step for step, _ in evaluated] == sorted({10, 20, count})
    assert results == evaluated[-1][1]
    assert loop.checkpoints.latest().step == count
    assert loop.checkpoints.latest().metrics == results


def results_of(model) -> dict[str, float]:
    features, labels = examples(EVALUATED, seed=9)
    logits = model(features).numpy()
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return {
        "loss": float(np.mean(losses)),
        "accuracy": float((logits.argmax(axis=1) == labels).mean()),
    }


@pytest.mark.slow
def test_evaluation_in_the_middle_of_training(mirrored, tmp_path):
    """With the averaged weights, on every example, with one trace; training goes on untouched."""
    strategy = mirrored(2)
    options = {"ema_decay": 0.9, "optimizer": lambda: keras.optimizers.SGD(0.5)}
    keras.utils.set_random_seed(3)
    loop = make_loop(strategy, evaluate=EVALUATED, directory=tmp_path, **options)
    loop.train(5)
    trained = loop.step.model.get_weights()
    averages = [average.numpy() for average in loop.step.updater.ema]
    assert largest_difference(trained, averages) > 1e-2

    for _ in range(2):  # the second goes round with the iterator of the first
        batches = []
        results = loop.evaluate(lambda done, of: batches.append((done, of)))  # noqa: B023
        assert batches[-1] == (4, 4)
        assert_replicas_agree(strategy, loop.step.model.variables)
        np.testing.assert_equal(loop.step.model.get_weights(), trained)
        loop.step.model.set_weights(averages)
        assert results == pytest.approx(results_of(loop.step.model), rel=1e-6)
        loop.step.model.set_weights(trained)
        assert results["loss"] != pytest.approx(results_of(loop.step.model)["loss"], rel=1e-3)

    def fail(done, of):
        raise ZeroDivisionError

    loop.evaluator._pace.steps = lambda: 1  # so that three of four batches are left
    with pytest.raises(ZeroDivisionError):
        loop.evaluate(fail)
    np.testing.assert_equal(loop.step.model.get_weights(), trained)
    assert loop.evaluate() == pytest.approx(results, rel=1e-6)  # from the first batch on again

    loop.save(wait=True)
    loop.train(8)
    at_8 = loop.step.model.get_weights()
    loop.restore()
    np.testing.assert_equal(loop.step.model.get_weights(), trained)
    loop.train(8)
    np.testing.assert_equal(loop.step.model.get_weights(), at_8)
    loop.evaluate()
    loop.checkpoints.close()
    assert loop.steps.run.experimental_get_tracing_count() == 1
    assert loop.evaluator._eval_steps.experimental_get_tracing_count() == 1

    keras.utils.set_random_seed(3)
    alone = make_loop(strategy, **options)
    alone.train(8)
    np.testing.assert_equal(alone.step.model.get_weights(), at_8)


def test_evaluation_of_a_dataset_of_unknown_length(mirrored):
    data = tf.data.Dataset.from_tensor_slices(examples(EVALUATED, seed=9))
    data = data.filter(lambda features, label: True).batch(BATCH)
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        evaluator = Evaluator(EvalStep(model, metrics=[accuracy()]), data, strategy=strategy)
    for _ in range(2):
        batches = []
        results = evaluator.run(lambda done, of: batches.append((done, of)))  # noqa: B023
        assert batches == [(i, None) for i in (1, 2, 3, 4)]
        assert results == pytest.approx(results_of(model), rel=1e-6)
    assert evaluator._eval_steps.experimental_get_tracing_count() == 1


def test_an_evaluation_without_examples_is_an_error():
    data = tf.data.Dataset.from_tensor_slices(examples(BATCH)).batch(BATCH)
    with pytest.raises(UsageError, match="no valid examples"):
        Evaluator(EvalStep(mlp()), data.filter(lambda *_: False)).run()
    with pytest.raises(UsageError, match="has no batches"):
        Evaluator(EvalStep(mlp()), data.take(0))


def test_a_training_without_examples_is_an_error():
    data = tf.data.Dataset.from_tensor_slices(examples(BATCH)).batch(BATCH)
    with pytest.raises(UsageError, match="the training data have no examples"):
        make_loop(data=data.filter(lambda *_: False)).train(2)
    with pytest.raises(UsageError, match="has no batches"):
        make_loop(data=data.take(0))


def test_a_manager_of_a_metric_that_no_evaluation_has_is_refused_before_the_first_step(tmp_path):
    best = {"best_metric": "val_accuracy", "best_mode": "max"}
    manager = CheckpointManager(tmp_path / "best", keep_best=1, **best)
    says = "^unknown best_metric 'val_accuracy': did you mean 'accuracy'"
    with pytest.raises(UsageError, match=says):
        make_loop(checkpoints=manager, evaluate=EVALUATED)
    # It selects nothing.
    make_loop(checkpoints=CheckpointManager(tmp_path / "last", **best), evaluate=EVALUATED)


def test_the_weights_of_the_best_evaluation(tmp_path, mirrored):
    """They are evaluated as they were; the training goes on from its last step only."""
    noted: list[tuple[int, dict[str, float]]] = []
    loop = make_loop(
        mirrored(2),
        evaluate=EVALUATED,
        checkpoints=CheckpointManager(tmp_path, keep=9, best_metric="loss"),
        ema_decay=0.5,
        schedule=lambda step: tf.where(step < 4, 1e-2, 3.0),
        eval_actions=[lambda step, results: noted.append((step, results))],
    )
    loop.train_and_evaluate(8, evaluate_every=2)
    step, results = min(noted, key=lambda one: one[1]["loss"])
    assert step < 8
    saved = loop.restore_best_weights()
    assert (saved.step, loop.global_step) == (step, step)
    assert loop.evaluate() == pytest.approx(results, rel=1e-6)
    with pytest.raises(UsageError, match=r"holds a run up to step 8: call restore\(\)"):
        loop.train(9)
    assert loop.restore().step == 8
    loop.train(9)


def test_the_best_of_a_regression_has_the_lowest_loss(tmp_path):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    data = np.ones([8, 2], "float32"), np.ones([8, 1], "float32")
    evaluator = Evaluator(EvalStep(model, "mse"), data)
    step = TrainStep(model, "sgd", "mse")
    loop = Loop(step, data, global_batch_size=4, evaluator=evaluator, checkpoints=str(tmp_path))
    loop.train_and_evaluate(3)
    assert loop.restore_best_weights().step == 3
    loop.checkpoints.close()


def test_a_best_evaluation_whose_checkpoint_is_gone_is_said(tmp_path, warnings_of):
    loop = make_loop(
        evaluate=EVALUATED,
        checkpoints=CheckpointManager(tmp_path, keep=1, best_metric="loss"),
        schedule=lambda step: tf.where(step < 4, 1e-2, 3.0),
    )
    loop.train_and_evaluate(8, evaluate_every=2)
    losses = {step: results["loss"] for step, results in loop.history.evaluations.items()}
    best = min(losses, key=losses.__getitem__)
    assert best < 8 and loop.restore_best_weights().step == 8
    assert f"the best loss was {losses[best]:g}, at step {best}; to keep it" in warnings_of()[-1]
