"""No collective is launched where the watchdog limits no wait, over the whole life of a loop."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, accuracy, examples
from worker_end import collectives_refused

import ctl
from ctl.base.actions import Log
from ctl.checkpoint.export import export_model
from ctl.data import InMemory
from ctl.distributed import workers
from ctl.distributed.watch.record import Section
from ctl.distributed.watch.watchdog import Watchdog
from ctl.errors import UsageError


class _OneWorker(tf.distribute.MultiWorkerMirroredStrategy):
    """Has collectives where several workers have them, also for two devices of one process."""

    _collective_key_base = 10_000  # not the keys of other strategies of this process


@pytest.fixture(scope="module")
def strategy():
    return _OneWorker._from_local_devices(["/cpu:0", "/cpu:1"])


@pytest.fixture
def watched(monkeypatch):
    """The sections of a watchdog, without its threads; the process is one of several workers."""
    watchdog = object.__new__(Watchdog)
    watchdog._sections, watchdog._broken = [Section("host code", None)], None
    watchdog.timeout = watchdog.startup_timeout = 60.0
    monkeypatch.setattr("ctl.distributed.watch.watchdog._watchdog", watchdog)
    monkeypatch.setattr(workers, "watch", lambda strategy: True)
    with collectives_refused():
        yield watchdog


class Own(ctl.TrainStep):
    """Variables of each kind, a metric and a log of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = self.variable("calls", [])
        self.left = self.variable("left", [3], per_replica=True)
        self.seen = keras.metrics.Mean("seen")

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        self.calls.assign_add(1.0)
        self.left.assign_add(tf.ones([3]))
        self.seen.update_state(losses)
        self.log("largest", losses, reduce="max")
        return losses, outputs


def life(strategy, directory) -> ctl.Loop:
    layers = keras.layers
    with strategy.scope():
        network = keras.Sequential(
            [
                *(keras.Input([FEATURES]), layers.Dense(8), layers.BatchNormalization()),
                *(layers.Dropout(0.5), layers.Dense(CLASSES)),
            ]
        )
        step = Own(
            network,
            keras.optimizers.Adam(0.01),
            metrics=[accuracy(), keras.metrics.MeanIoU(CLASSES, name="iou", sparse_y_pred=False)],
            ema_decay=0.9,
            loss_scale=True,
        )
        evaluation = ctl.EvalStep(network, metrics=[accuracy()])
    files = tf.data.Dataset.from_tensor_slices(examples(20)).batch(BATCH)
    held_out = InMemory(examples(20, seed=1), global_batch_size=BATCH, training=False)
    return ctl.Loop(
        step,
        InMemory(examples(40), global_batch_size=BATCH),
        strategy=strategy,
        schedule=ctl.schedule.Plateau(0.01, "loss"),
        evaluator=ctl.Evaluator(evaluation, held_out, strategy=strategy, others={"b": files}),
        checkpoints=ctl.CheckpointManager(directory),
        actions=[ctl.Every(ctl.CompareReplicas(step), steps=2), ctl.Every(Log(), steps=2)],
        eval_actions=[ctl.EarlyStopping("loss", patience=9)],
    )


def no_variable(next_creator, **options):
    raise AssertionError("a variable was made, for which workers wait for each other")


@pytest.mark.slow
def test_no_collective_without_a_limit(strategy, watched, tmp_path):
    loop = life(strategy, tmp_path / "checkpoints")
    loop.train_and_evaluate(4, evaluate_every=2)
    loop.checkpoints.close()
    loop = life(strategy, tmp_path / "checkpoints")
    assert loop.restore().step == 4
    with strategy.scope(), tf.variable_creator_scope(no_variable):  # only the chief saves
        loop.train_only([loop.step.model.layers[-1]])
        loop.save(wait=True)
    assert loop.train(6)["iou"] >= 0
    with loop.step.updater.averaged():
        export_model(loop.step.model, tmp_path / "export")
    workers.leave_together(strategy)


class Lowest(keras.metrics.Metric):
    """Begins with another value than 0, keeps Python's state, and returns a variable."""

    def __init__(self):
        super().__init__(name="lowest")
        self.low = self.add_variable((), "zeros", name="low")
        self.resets = 0

    def reset_state(self):
        self.resets += 1
        self.low.assign(9.0)

    def result(self):
        return self.low


@pytest.mark.parametrize("kind", ["default", "two replicas", "several workers"])
def test_metrics_are_reset_without_a_collective(kind, strategy, mirrored, watched):
    strategies = {"default": tf.distribute.get_strategy(), "two replicas": mirrored(2)}
    with strategies.get(kind, strategy).scope():
        network = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
        metrics = [Lowest(), keras.metrics.Mean("mean")]
        step = ctl.EvalStep(network, metrics=metrics)
    for metric in metrics:
        for variable in metric.variables:
            variable.value.assign(4.0, read_value=False)
    assert step.results() == {"lowest": 4.0, "mean": 1.0}
    watched.timeout = None
    step.reset_metrics()
    watched.timeout = 60.0
    assert step.results() == {"lowest": 9.0, "mean": 0.0}
    assert metrics[0].resets == 1


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_what_only_all_workers_together_can_read_is_refused(strategy, mirrored, aggregation):
    for kind in (mirrored(2), strategy):
        with kind.scope():
            network = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
            step = ctl.EvalStep(network)
            step.total = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation[aggregation],
                trainable=False,
                name="total",
            )
        if kind is strategy:
            with pytest.raises(UsageError, match="variable total:0 is synchronized on read"):
                step.check_scope(kind)
        else:
            step.check_scope(kind)
