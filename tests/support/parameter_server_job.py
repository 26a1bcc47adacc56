"""What a task of tests/jobs/test_parameter_server.py runs. The coordinator does what it is told, a
word in each line: train (20 steps), evaluate, save; and says how things are after each.

python parameter_server_job.py OUT
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster
from ctl.errors import CtlError

console.log_to_terminal()
console.load_tensorflow(errors=False)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from helpers import BATCH, examples, words_and_features  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_parameter_server  # noqa: E402
from ctl.jobs.parameter_server import (  # noqa: E402
    CopyEvaluator,
    ParameterServerLoop,
    serve,
)

OUT = Path(sys.argv[1])
STEPS = 20


def accuracy() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy("accuracy")


class Recovered(logging.Handler):
    """Prints what TensorFlow logs when it can use a worker again."""

    def emit(self, record: logging.LogRecord) -> None:
        if "has been recovered" in record.getMessage():
            print(record.getMessage(), flush=True)


def tell_parts(loop: ctl.Loop) -> None:
    """Prints on which task each part of the table and of its slots is, and how many rows it has."""
    (table,) = loop.step.tables
    parts = [
        [(part.device, part.shape[0]) for part in parts] for parts in table.shards._parts.values()
    ]
    print("parts", json.dumps(parts), flush=True)


def obey(loop: ctl.Loop) -> None:
    tell_parts(loop)
    while True:
        step = loop.global_step
        np.savez(OUT / f"step-{step}.npz", *loop.step.model.get_weights())
        examples_seen = int(loop.step.metrics[0].count.value.numpy())
        updates = int(loop.step.optimizer.iterations.value.numpy())
        print(f"at {step}: {updates} updates, {examples_seen} examples", flush=True)
        loop.step.reset_metrics()
        order = sys.stdin.readline()
        if not order:
            return  # the test has ended
        if order == "train\n":
            loop.train(step + STEPS)
        elif order == "evaluate\n":
            print("results", json.dumps(loop.evaluate()), flush=True)
        elif order == "save\n":
            loop.save(wait=True)


def asynchronous_loop(placement) -> ctl.Loop:
    keras.utils.set_random_seed(0)
    with placement.strategy.scope():
        model = words_and_features()
        step = ctl.TrainStep(
            model,
            keras.optimizers.AdamW(0.01),
            metrics=[accuracy()],
            class_weight={0: 0.5, 1: 5.0},
            clip_norm=0.3,
            sparse_rows="lazy",
            embedding_plan="sharded",
        )
    copy = ctl.EvalStep(words_and_features(), metrics=[accuracy()])
    test = ctl.data.InMemory(examples(101, seed=1), global_batch_size=BATCH, training=False)
    return ParameterServerLoop(
        step,
        ctl.data.InMemory(examples(), global_batch_size=BATCH),
        strategy=placement.strategy,
        heartbeats=placement.heartbeats,
        schedule=ctl.schedule.Cosine(0.01, 200, warmup_steps=10),
        evaluator=CopyEvaluator(model, copy, test),
        checkpoints=ctl.CheckpointManager(OUT / "checkpoints"),
    )


if __name__ == "__main__":
    tasks = cluster.resolve_tasks()
    if not tasks.is_coordinator:
        serve(tasks, 60.0)
    try:
        placed = make_parameter_server(tasks, startup_timeout=60.0, worker_timeout=3.0)
        with placed.heartbeats:
            logger = tf.get_logger()
            logger.addHandler(Recovered())
            logger.setLevel(logging.INFO)
            obey(asynchronous_loop(placed))
    except CtlError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
