"""How many steps per second do parameter servers make, over the loop of TensorFlow's tutorial?

    python benchmarks/parameter_servers.py
    python benchmarks/parameter_servers.py --rounds=9 --batch=256 --json=out.json

Starts a coordinator, two workers and a server of itself. Both loops use them in turns. README.md
says what each row is.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from processes import in_turn, machine, summary, write

from ctl.flags.parsing import group, run_command

with group("How"):
    _MODEL = flags.DEFINE_enum("model", "dense", ["dense", "convnet"], "model that is trained")
    _BATCH = flags.DEFINE_integer("batch", 64, "examples of a batch", lower_bound=1)
    _WORKERS = flags.DEFINE_integer("workers", 2, "workers", lower_bound=1)
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "blocks of each row", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 400, "steps of a block", lower_bound=1)
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def loops(placement: Any) -> dict[str, Callable[[int], object]]:
    """Functions that make some steps: ctl's, and the tutorial's."""
    import keras
    import tensorflow as tf

    import ctl

    data = ctl.data.load(global_batch_size=_BATCH.value)
    with placement.strategy.scope():
        first, model = (ctl.models.make_model(_MODEL.value, (28, 28, 1), 10) for _ in range(2))
        step = ctl.TrainStep(first, "adam", metrics=["accuracy"])
    loop = ctl.jobs.ParameterServerLoop(
        step, data, strategy=placement.strategy, heartbeats=placement.heartbeats
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(placement.strategy)
    with placement.strategy.scope():
        optimizer, accuracy = keras.optimizers.Adam(), keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def dataset(_: Any) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(data.arrays).shuffle(10_000).repeat()
        batches = examples.batch(_BATCH.value)
        return batches.map(lambda x, y: (tf.cast(x, tf.float32) / 255, y)).prefetch(2)

    @tf.function
    def train_step(iterator: Any) -> Any:
        def of_replica(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                outputs = model(images, training=True)
                loss = tf.nn.compute_average_loss(loss_fn(labels, outputs))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            accuracy.update_state(labels, outputs)
            return loss

        losses = placement.strategy.run(of_replica, args=next(iterator))
        return placement.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    make = tf.function(lambda: placement.strategy.distribute_datasets_from_function(dataset))
    batches = iter(coordinator.create_per_worker_dataset(make))

    def tutorial(count: int) -> None:
        for _ in range(count):
            coordinator.schedule(train_step, args=(batches,))
        coordinator.join()

    def ours(count: int) -> None:
        loop.train(loop.global_step + count, progress=False)

    return {"ctl": ours, "tutorial": tutorial}


def coordinate(tasks: Any) -> None:
    """Measures, and prints a row for each loop."""
    import keras

    import ctl

    placement: Any = ctl.strategy.make_parameter_server(tasks)
    with placement.heartbeats:
        keras.utils.set_random_seed(1)
        rows = loops(placement)
        found: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(-1, _ROUNDS.value):  # the first one warms up
            for name in in_turn(rows, max(number, 0)):
                began = time.perf_counter()
                rows[name](_STEPS.value)
                if number >= 0:
                    found[name].append(_STEPS.value / (time.perf_counter() - began))
    about = machine(os.getloadavg()[0])
    print(*(f"{key}={value}" for key, value in about.items()))
    for name, rates in found.items():
        print(f"{name:10}{statistics.median(rates):8,.0f} steps per second")
    ratios = summary([a / b for a, b in zip(*found.values(), strict=True)])
    print(f"over the tutorial: {ratios['median']:.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})")
    write(_JSON.value, {"machine": about, "rows": found})


def main() -> None:
    import ctl

    if "TF_CONFIG" not in os.environ:
        sys.exit(ctl.launch.launch([sys.executable, *sys.argv], workers=_WORKERS.value, ps=1))
    tasks = ctl.cluster.resolve_tasks()
    if tasks.is_coordinator:
        coordinate(tasks)
    else:
        ctl.jobs.serve(tasks)


if __name__ == "__main__":
    run_command(main, __doc__)
