"""Every example counts once, in one set or several."""

from __future__ import annotations

import functools
import json
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, FEATURES, accuracy, examples, keras_loss, make_loop, mlp, network

from ctl import Loop
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.logs.progress import format_record
from ctl.phases.base_step import EvalStep
from ctl.phases.checks import fits_default_evaluation
from ctl.schedule import Plateau
from ctl.schedule.patience import EarlyStopping
from ctl.step import TrainStep


def held_out(count, seed):
    return InMemory(examples(count, seed=seed), global_batch_size=BATCH, training=False)


@pytest.mark.slow
def test_each_set_has_its_own_results(mirrored):
    """On 2 replicas, too: 33 examples are two batches and one of 1 example."""
    results = []
    for replicas in (1, 2):
        keras.utils.set_random_seed(1)
        with mirrored(replicas).scope():
            step = EvalStep(mlp(), metrics=[accuracy()])
        sets = {"second": held_out(33, 2), "third/3": held_out(7, 3)}
        together = Evaluator(step, held_out(50, 1), strategy=mirrored(replicas), others=sets)
        found = [together.run(), together.run()]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        results.append(found[0])
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    alone = {f"{n}/{k}": v for n, d in sets.items() for k, v in together.on(d).run().items()}
    expected = {**together.on(held_out(50, 1)).run(), **alone}
    assert results[1] == pytest.approx(expected, rel=1e-6) and [*results[1]] == [*expected]
    assert len(set(results[0].values())) == 6
    record = {"phase": "eval", "step": 5, "epoch": 1.5, "time": 0.0, **results[0]}
    lines = format_record(record).splitlines()
    assert lines[0].startswith("eval at step 5 (epoch 1.50): loss ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["    second", "    third/3"]


def test_a_loop_stops_by_another_set(mirrored):
    loop = make_loop(mirrored(2), evaluate=10)
    other = Evaluator(
        loop.evaluator.step, held_out(10, 1), strategy=mirrored(2), others={"b": held_out(10, 2)}
    )
    loop.evaluator = other
    stops = EarlyStopping("b/accuracy", 1)
    assert stops.mode == "max"
    loop.eval_actions.append(stops)
    assert "b/loss" in loop.train_and_evaluate(2, evaluate_every=1)


def test_a_metric_that_no_evaluation_has_is_refused_before_the_training(mirrored):
    with pytest.raises(UsageError, match="metric of EarlyStopping 'acc': the choices are loss"):
        make_loop(evaluate=10, eval_actions=[EarlyStopping("acc", 1, "max")])
    with pytest.raises(UsageError, match="metric of Plateau 'mae': the choices are loss, accuracy"):
        make_loop(evaluate=10, schedule=Plateau(0.1, "mae", mode="min"))
    with pytest.raises(UsageError, match=r"EarlyStopping depends on evaluations: give Loop\(eval"):
        make_loop(eval_actions=[EarlyStopping("loss", 1)])
    loop = make_loop()
    with pytest.raises(UsageError, match=r"no evaluator: give Loop\(evaluator"):
        loop.train_and_evaluate(2, evaluate_every=1)
    loop = make_loop(evaluate=10)
    loop.eval_actions.append(EarlyStopping("second/loss", 1))
    with pytest.raises(UsageError, match="unknown metric of EarlyStopping 'second/loss'"):
        loop.train_and_evaluate(2, evaluate_every=1)
    assert loop.global_step == 0


def test_what_a_step_of_ones_own_will_log_is_known_before(mirrored):
    """It is traced for it, once."""
    traces = []

    class Logging(EvalStep):
        def loss(self, batch):
            traces.append(1)
            losses, outputs = super().loss(batch)
            self.log("doubled", 2 * losses)
            return losses, outputs

    with mirrored(2).scope():
        step = Logging(mlp(), metrics=[accuracy()])
    others = {"second": held_out(20, 2)}
    evaluator = Evaluator(step, held_out(20, 1), strategy=mirrored(2), others=others)
    evaluator.check_result("metric", "second/accuracy")
    assert not traces
    evaluator.check_result("metric", "doubled")
    evaluator.check_result("metric", "second/doubled")
    before = len(traces)
    with pytest.raises(UsageError, match="unknown metric 'tripled': .* second/doubled"):
        evaluator.check_result("metric", "tripled")
    evaluator.others = {}
    assert {"doubled", "accuracy"} < evaluator.run().keys() and len(traces) == before


@pytest.mark.slow  # starts a process
def test_the_command(zygote, tmp_path):
    run = tmp_path / "run"
    options = ["--model=dense", "--train_steps=4", "--evaluate_every=2", "--noexport"]
    options += ["--jit_compile=off", "--notensorboard"]
    options += ["--eval_split=test[:200]", "--global_batch_size=48", "--log_also=norms,mfu,memory"]
    sets = "--also_evaluate=train[:100],fashion_mnist_mini@test[:70]"
    best = ["--keep_best=1", "--best_metric=train[:100]/accuracy"]
    command = zygote.run("ctl.train", f"--model_dir={run}", *options, sets, *best)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = records[-1]
    names = ["loss", "accuracy"]
    for which in ("", "train[:100]/", "fashion_mnist_mini@test[:70]/"):
        assert all(f"{which}{name}" in last for name in names)
    lines = command.stdout.splitlines()
    assert "    train[:100]: loss " in command.stdout
    scores = f"loss {last['train[:100]/loss']:.4f}  accuracy {last['train[:100]/accuracy']:.4f}"
    assert f"  train[:100]  {scores}" in lines
    trained = [record for record in records if record["phase"] == "train"][-1]
    for name in ("gradient_norm", "weight_norm", "update_ratio", "peak_memory_mib"):
        assert trained[name] > 0
    assert 0 < trained["update_ratio"] < 1
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert "model: dense, " in command.stderr and " MFLOPs per example" in command.stderr
    manifests = [json.loads(p.read_text()) for p in run.glob("checkpoints/step-*/manifest.json")]
    assert all("train[:100]/accuracy" in manifest["metrics"] for manifest in manifests)
    pages = f"--report={tmp_path / 'report'}"
    found = zygote.run("ctl.evaluate", f"--model_dir={run}", "--checkpoint=best", "--json", pages)
    accuracy_of_best = json.loads(found.stdout)["accuracy"]
    assert f"report: {tmp_path}/report/report.html\n" in found.stderr
    stored = json.loads((tmp_path / "report" / "report.json").read_text())
    right = sum(row[label] for label, row in enumerate(stored["confusion"]))
    assert right / 200 == pytest.approx(accuracy_of_best)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--also_evaluate=@test"], "neither SPLIT nor DATASET@SPLIT"),
        (["--also_evaluate=test,test"], "names test twice"),
        (["--also_evaluate=test", "--dataset=synthetic"], "does not have"),
        (["--log_also=norm"], "did you mean 'norms'"),
        (["--log_also=norms", "--strategy=central_storage"], "needs a copy of the weights"),
    ],
)
def test_wrong_flags(zygote_without_tensorflow, flags, words):
    command = zygote_without_tensorflow.run("ctl.train", "--model_dir=/tmp/x", *flags, exit_code=2)
    assert words in command.stderr and command.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_evaluation_sees_every_example_once(mirrored, replicas):
    """101 examples in batches of 16: the last has 5, on 4 replicas 2, 2, 1 and none."""
    features, labels = examples(101)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = mlp()
        metrics = [
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2"),
        ]
        step = EvalStep(model, metrics=metrics)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    evaluator = Evaluator(step, dataset, strategy=strategy)
    logits = model(features).numpy()
    want = {
        "loss": keras_loss(labels, logits).numpy().mean(),
        "accuracy": (logits.argmax(axis=1) == labels).mean(),
        "top2": np.mean([y in np.argsort(row)[-2:] for y, row in zip(labels, logits, strict=True)]),
    }
    for _ in range(2):  # the second has the iterator of the first
        assert evaluator.run() == pytest.approx(want, rel=1e-6)


STRATEGIES = {
    "default": tf.distribute.get_strategy,
    "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        ["/cpu:0", "/cpu:1"], "/cpu:0"
    ),
}


class Changes(EvalStep):
    """Changes state in all ways, none of which depends on the values of a batch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = keras.metrics.Sum("calls")

    def loss(self, batch):
        self.calls.update_state(1.0)
        self.log("examples", tf.ones(len(batch[1])), reduce="sum")
        return super().loss(batch)


@pytest.mark.parametrize("which", [*STRATEGIES, 1, 2])
def test_the_end_of_the_data_changes_nothing(mirrored, which):
    """A count of a batch of a static size is a constant, which does not wait for the batch."""
    strategy = mirrored(which) if isinstance(which, int) else STRATEGIES[which]()
    kind = EvalStep if which == "central_storage" else Changes
    with strategy.scope():
        ones = keras.metrics.MeanMetricWrapper(lambda y, _: tf.ones_like(y), name="ones")
        step = kind(mlp(), metrics=[ones])
    for batches in (1, 3):
        data = tf.data.Dataset.from_tensor_slices(examples(batches * BATCH + 1))
        data = data.batch(BATCH, drop_remainder=True)
        results = Evaluator(step, data, strategy=strategy).run()
        assert ones.count.numpy() == batches * BATCH
        if kind is Changes:
            assert results["examples"] == batches * BATCH
            assert results["calls"] == batches * strategy.num_replicas_in_sync


class Projects(TrainStep):
    """Compares outputs with themselves: they are no logits."""

    def loss(self, batch):
        outputs = self.model(self.preprocess(batch[0]), training=True)
        return tf.reduce_sum(outputs**2, axis=range(1, outputs.shape.rank)), outputs


class Meant(Projects):
    eval_step = EvalStep


class Penalized(TrainStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses + tf.reduce_sum(outputs**2, axis=1), outputs


class Smoothed(TrainStep):
    def loss(self, batch):
        return self.smoothed(batch[1], self.model(batch[0], training=True))

    def smoothed(self, labels, outputs):
        return 0.9 * self.loss_fn(labels, outputs), outputs


class OfNoLoss(Penalized, Projects):
    """Its `super().loss` is that of `Projects`."""


ADVICE = r"Projects.loss\(\) does not use loss_fn, .*: set Projects.eval_step to a subclass of ctl"


class TestOfAnOwnLoss:
    def test_that_is_another_is_said(self, caplog):
        for kind, fits in ((Projects, False), (Meant, True), (Penalized, True), (Smoothed, True)):
            assert fits_default_evaluation(kind) is fits
            make_loop(step_class=kind, evaluate=20)
            assert bool(re.search(f"may mean nothing: {ADVICE}", caplog.text)) is not fits
            caplog.clear()
        assert fits_default_evaluation(TrainStep) and not fits_default_evaluation(OfNoLoss)

    def test_that_cannot_be_evaluated_is_refused_before_the_first_step(self):
        model = functools.partial(network, keras.layers.Reshape([FEATURES, 1]))
        loop = make_loop(step_class=Projects, model=model, evaluate=20)
        with pytest.raises(UsageError, match=f"^the evaluation fails .*: {ADVICE}"):
            loop.train_and_evaluate(2, evaluate_every=1)
        assert loop.global_step == 0


def test_is_traced_before_the_training_and_not_again():
    loop = make_loop(evaluate=20)
    loop.evaluator.trace()
    traces = loop.evaluator._eval_steps.experimental_get_tracing_count
    assert traces() == 1
    loop.train_and_evaluate(4, evaluate_every=2)
    assert traces() == 1


class LastOutputs(keras.metrics.Metric):
    """Makes its variable when it knows how many outputs there are, as users' metrics do."""

    sums = None

    def update_state(self, labels, outputs, sample_weight=None):
        if self.sums is None:
            self.sums = self.add_weight(shape=outputs.shape[1:], initializer="zeros", name="sums")
        self.sums.assign_add(tf.reduce_sum(outputs, 0))

    def result(self):
        return self.sums[-1]


def test_a_metric_that_makes_variables_late_is_traced_too():
    class Own(EvalStep):
        def loss(self, batch):
            return super().loss(batch)

    results = []
    for traced in (False, True):
        keras.utils.set_random_seed(0)
        evaluator = Evaluator(Own(mlp(), metrics=[LastOutputs(name="last")]), held_out(20, 1))
        if traced:
            evaluator.trace()
        results.append(evaluator.run())
    assert results[0] == results[1] and results[0]["last"]


def test_many_evaluations_and_loops_are_no_retracing():
    """Each has a trace of its own, which TensorFlow takes for many of one function."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for _ in range(6):
            model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
            arrays = np.ones([4, 2], np.float32), np.zeros(4, np.int64)
            evaluator = Evaluator(EvalStep(model), arrays)
            step = TrainStep(model, "sgd", jit_compile=False)
            Loop(step, arrays, global_batch_size=4, evaluator=evaluator).train_and_evaluate(1)
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [text for text in said if "retracing" in text]
