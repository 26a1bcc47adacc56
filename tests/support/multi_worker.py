"""What a worker of tests/distributed/test_multi_worker*.py runs: trains the MLP, and misbehaves.

python multi_worker.py OUT [fault=NAME] [step=N] [worker=I] [key=value …]
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster
from ctl.distributed.cluster import rendezvous
from ctl.jobs import trials

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from helpers import BATCH, CLASSES, FEATURES, batches_of_files, examples  # noqa: E402
from tensorflow.python.distribute import collective_all_reduce_strategy  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.data.sources import Arrays  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.distributed.watch import watchdog  # noqa: E402

me = cluster.resolve(None, None)
OUT = Path(sys.argv[1])
OPTIONS = dict(argument.split("=") for argument in sys.argv[2:])
FAULT, PLACE = OPTIONS.get("fault", ""), OPTIONS.get("place", "training")
AT_STEP, WORKER = int(OPTIONS.get("step", 5)), int(OPTIONS.get("worker", 1))
TIMEOUT, STARTUP = float(OPTIONS.get("timeout", 60)), float(OPTIONS.get("startup", 30))


def cut_into_devices(count: int) -> None:
    """So many replicas for this worker, as it would have with GPUs: of CPUs TensorFlow takes one,
    so this replaces the private method that counts them."""
    devices = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices = (
        lambda self, resolver, worker: (
            tuple(f"{worker}/device:CPU:{i}" for i in range(count)),
            "CPU",
        )
    )


def model() -> keras.Model:
    """With all that replicas must agree on: BatchNorm, Dropout."""
    layers = [keras.layers.Input([FEATURES]), keras.layers.Dense(8, activation="tanh")]
    if "norm" in OPTIONS:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    if "synchronized" in OPTIONS:
        layers += [keras.layers.BatchNormalization(synchronized=True)]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def masks(strategy: tf.distribute.Strategy) -> np.ndarray:
    """What a Dropout lets through on each replica of this worker; float32 [replicas, 1, 64]."""
    with strategy.scope(), ctl.workers.watching_variables(strategy):
        network = keras.Sequential(
            [keras.Input([64]), keras.layers.Dense(64, "tanh"), keras.layers.Dropout(0.5)]
        )
        ctl.TrainStep(network, keras.optimizers.SGD()).build(strategy)
    values = strategy.run(tf.function(lambda: network(tf.ones([1, 64]), training=True)))
    return np.stack([v.numpy() != 0 for v in strategy.experimental_local_results(values)])


def left(strategy: tf.distribute.Strategy, step: Own) -> np.ndarray:
    """The error feedback of the replicas of this worker."""
    return np.stack([v.numpy() for v in strategy.experimental_local_results(step.left)])


def names_of_threads() -> list[str]:
    """The threads of this process, but those that end in the meantime."""
    names = []
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(thread.read_text().strip())
    return names


class Faulty:
    """An action of one worker that does what can go wrong, once, at a step."""

    def steps_until_due(self, step: int) -> int:
        return AT_STEP - step if step < AT_STEP else sys.maxsize

    def __call__(self, status) -> None:
        if status.step == AT_STEP and PLACE == "training":
            misbehave()


def misbehave() -> None:
    if me.index != WORKER or not FAULT:
        return
    print(f"fault {FAULT} at {time.time()}", flush=True)
    if FAULT in ("kill", "freeze", "term"):
        number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}
        os.kill(os.getpid(), number[FAULT])
    elif FAULT == "raise":
        raise RuntimeError("a bug in a worker")
    elif FAULT == "absent":  # alive, but it never comes to the next all-reduce
        time.sleep(1000)


class Disk(ctl.CheckpointManager):
    """Checkpoints on a disk of the chief that may hang before an evaluation."""

    def save(self, step, *arguments, **options):
        if step == AT_STEP and PLACE == "saving":
            misbehave()
        super().save(step, *arguments, **options)


class Slow:
    """An action that says each step of the chief, which takes a while; the last but one not until
    a file is there."""

    def __call__(self, status) -> None:
        if me.is_chief:
            print(f"step {status.step}", flush=True)
            time.sleep(0.05)
            while status.step == status.until - 1 and not (OUT / "go").exists():
                time.sleep(0.05)


def ends(status) -> None:
    """An action with which one worker ends the training."""
    if me.index == WORKER and status.step >= int(OPTIONS["ends"]):
        status.stop()


class Step(ctl.TrainStep):
    """The loss of one worker is NaN at a step."""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        if FAULT == "nan":
            here = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, WORKER)
            bad = tf.logical_and(here, tf.equal(self.global_step, AT_STEP))
            losses += tf.where(bad, np.nan, 0.0)
        return losses, outputs


class Other(Step):
    """Other code than on the other worker, for the same graph of all-reduces."""

    def reduce(self, loss, count, gradients, snapshot):
        loss, count, gradients = super().reduce(loss, count, gradients, snapshot)
        return loss, count, [2 * gradient for gradient in gradients]


class Own(Step):
    """Two parameter groups, noise, error feedback of each replica, and a log of its own."""

    def __init__(self, network, optimizer, **options):
        first, last = network.layers[0], network.layers[1:]
        groups = [
            (keras.optimizers.SGD(0.1), first),
            (optimizer, [v for layer in last for v in layer.variables]),
        ]
        super().__init__(network, groups, **options)
        self.left = self.variable("left", first.kernel.shape, per_replica=True)

    def loss(self, batch):
        noise = tf.random.stateless_normal(tf.shape(batch[0]), self.seed("noise"))
        self.log("noise", noise)
        self.log("largest", noise, reduce="max")
        self.log("first", batch[0][:, 0])
        return super().loss((batch[0] + 0.1 * noise, batch[1]))

    def sum_gradients(self, gradients):
        whole = gradients[0] + self.left.read_value()
        sent = tf.reduce_mean(tf.abs(whole)) * tf.sign(whole)
        self.left.assign(whole - sent)
        return super().sum_gradients([sent, *gradients[1:]])


class Noted(Arrays):
    """Notes the numbers of the examples that are read."""

    rows: list[int] = []

    def read(self, indices):
        self.rows.extend(indices.tolist())
        return super().read(indices)


class Ending(ctl.data.InMemory):
    """The data of one worker end before a step."""

    steps_per_element = property(lambda self: 1, lambda self, value: None)

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        batches = super().batches(start_step)
        if me.index != WORKER:
            return batches
        rest = iter([batch.numpy() for batch in batches.take(AT_STEP - start_step)])

        def once() -> Iterator[np.ndarray]:
            yield from rest
            print(f"fault end at {time.time()}", flush=True)

        # Endless, TensorFlow thinks; it would otherwise give this worker empty batches.
        ending = tf.data.Dataset.from_generator(once, output_signature=batches.element_spec)
        return ending.repeat().with_options(batches.options())


def fit(strategy: tf.distribute.Strategy) -> str:
    """What ``fit`` of Keras says to the strategy: README.md has a sentence about it."""
    with strategy.scope():
        network = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(CLASSES)])
        network.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    try:
        with watchdog.collective("fit"):
            network.fit(*examples(), batch_size=BATCH, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    if "quiet" in OPTIONS:
        watchdog._QUIET_SECONDS = rendezvous._QUIET_SECONDS = float(OPTIONS["quiet"])
    if "devices" in OPTIONS:
        cut_into_devices(int(OPTIONS["devices"]))
    if "own" in OPTIONS:  # as in TensorFlow's tutorials, the loop inside of the scope
        strategy, options = tf.distribute.MultiWorkerMirroredStrategy(), None
        scope = strategy.scope()
    else:
        placement = make_multi_worker(
            me, collective_timeout=TIMEOUT, startup_timeout=STARTUP, record_dir=OUT / "inspect"
        )
        strategy, options = placement.strategy, placement.options
        scope = contextlib.nullcontext()
    with scope:
        train(strategy, options)


def train(
    strategy: tf.distribute.Strategy,
    options: tf.distribute.experimental.CommunicationOptions | None,
) -> None:
    keras.utils.set_random_seed(me.index if "seeds" in OPTIONS else 0)
    differs = "differ" in OPTIONS and me.index > 0
    with strategy.scope():
        network = model()
        if PLACE == "building":
            time.sleep(3)  # until all have heard of all
            misbehave()
        optimizer = keras.optimizers.AdamW(0.01, beta_1=0.8 if differs else 0.9)
        kind = Other if differs else Own if "state" in OPTIONS else Step
        metrics = ["accuracy"] if "epochs" in OPTIONS else []
        clip_norm = 0.4 if differs else 0.3
        step = kind(network, optimizer, metrics=metrics, clip_norm=clip_norm, options=options)
        metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
        evaluation = ctl.EvalStep(network, metrics=[metric])
    batch = BATCH * 3 * (2 if differs else 1)
    data = ctl.data.InMemory(examples(), global_batch_size=batch)
    if "files" in OPTIONS:
        data = batches_of_files(OUT, batch)
    if "shuffle" in OPTIONS:  # its seed is that of the process
        data = batches_of_files(OUT, batch).unbatch().shuffle(99).batch(batch)
    if FAULT == "end":
        data = Ending(examples(), global_batch_size=batch)
    test = ctl.data.InMemory(examples(101, seed=1), global_batch_size=BATCH, training=False)
    if "stream" in OPTIONS:
        data = ctl.data.Streaming(Noted(examples()), global_batch_size=batch)
        Noted.rows.clear()
        test = ctl.data.Streaming(
            examples(101, seed=1), global_batch_size=BATCH, training=False, info=data.info
        )
    logged: dict[str, float] = {}

    def window(status) -> None:
        logged.update(status.scalars())
        status.reset()

    checkpoints = Disk(OUT / "checkpoints")
    loop = ctl.Loop(
        step,
        data,
        strategy=strategy,
        evaluator=ctl.Evaluator(evaluation, test, strategy=strategy),
        checkpoints=checkpoints,
        actions=[
            Faulty(),
            ctl.Every(lambda status: loop.save(), steps=4),
            *([Slow()] if "slow" in OPTIONS else []),
            ctl.Every(window, steps=5),
            *([ends] if "ends" in OPTIONS else []),
        ],
        steps_per_loop=int(OPTIONS.get("loop", 0)) or None,
    )
    if "tune" in OPTIONS:
        trials.candidates = lambda tensors: [0, 128]  # the network has some hundred bytes
        trials._BLOCK_SECONDS = 0.0  # of a few steps: which is faster does not matter
        tuned = trials.tune_packs(loop)
        assert loop.global_step == 0
        step.bytes_per_pack = tuned or 128  # also where it does not pay
    if loop.restore():
        print(f"resumed at {loop.global_step}", flush=True)
    with loop.stop_on_signals():
        print("training", flush=True)
        results = loop.train_and_evaluate(int(OPTIONS.get("until", 20)), evaluate_every=10)
    checkpoints.close()
    np.savez(
        OUT / f"worker-{me.index}.npz",
        *network.get_weights(),
        masks=masks(strategy) if "masks" in OPTIONS else 0.0,
        fit=fit(strategy) if "fit" in OPTIONS else "",
        results=np.array([results["loss"], results["accuracy"]]),
        epochs=[loop.history.epochs[name] for name in ("loss", "accuracy", "val_loss")]
        if "epochs" in OPTIONS
        else 0.0,
        rows=Noted.rows,
        left=left(strategy, step) if "state" in OPTIONS else 0.0,
        logged=[logged.get(name, 0.0) for name in ("noise", "largest", "first", "learning_rate_2")],
        threads=names_of_threads(),
    )
    ctl.workers.leave_together(strategy)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
