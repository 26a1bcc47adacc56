"""What one of two workers runs: trains embedding tables by rows, whole or split over the workers.

python tables_worker.py OUT
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from ctl.base import console
from ctl.distributed import cluster

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from paths import BENCHMARKS  # noqa: E402
from peak_memory import peak_memory  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.distributed.watch import watchdog  # noqa: E402
from ctl.phases import table_plan  # noqa: E402

sys.path.append(str(BENCHMARKS / "peers"))

from sent_bytes import sent_bytes  # noqa: E402

ROWS, WIDTH, IDS, CLASSES, STEPS = 300, 4, 5, 3, 12
SIZES = 24, 5, 2, 24, 1, 7  # of batches: a share may have no examples
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05, epsilon=1e-4),
}
SPLIT = "adamw"  # the optimizer of tables that are split over workers


def examples(count: int = 240) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.zipf(1.3, (count, IDS)) % ROWS
    return ids.astype("int32"), random.integers(0, CLASSES, count)


def batches() -> tf.data.Dataset:
    """Batches of ``SIZES``, for ever."""
    ids, labels = examples()
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    spec = tf.TensorSpec([None, IDS], tf.int32), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(
        lambda: ((ids[part], labels[part]) for part in parts), output_signature=spec
    ).repeat()


def three_lookups() -> keras.Model:
    """Three tables of two widths, one of which is looked up twice."""
    inputs = keras.Input([IDS], dtype="int32")
    shared = keras.layers.Embedding(ROWS, WIDTH)
    other = keras.layers.Embedding(ROWS + 7, WIDTH)
    wide = keras.layers.Embedding(ROWS, 2 * WIDTH, mask_zero=True)
    each = [shared(inputs), shared(inputs[:, ::-1] * inputs % ROWS), other(inputs + 7)]
    parts = [keras.layers.Flatten()(one) for one in each]
    parts.append(keras.layers.GlobalAveragePooling1D()(wide(inputs)))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Concatenate()(parts)))


def make(
    strategy: tf.distribute.Strategy, optimizer: str, rows: str, plan: str = "replicated", **options
) -> ctl.Loop:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        with ctl.uninitialized_tables() if plan == "sharded" else contextlib.nullcontext():
            model = three_lookups()
        kind = OPTIMIZERS[optimizer]()
        step = ctl.TrainStep(model, kind, sparse_rows=rows, embedding_plan=plan)
        evaluation = ctl.EvalStep(model)
    test = ctl.data.InMemory(examples(41), global_batch_size=16, training=False)
    evaluator = ctl.Evaluator(evaluation, test, strategy=strategy)
    return ctl.Loop(
        step, batches(), strategy=strategy, evaluator=evaluator, steps_per_loop=4, **options
    )


def trained(
    strategy: tf.distribute.Strategy, optimizer: str, rows: str, plan: str = "replicated"
) -> list[np.ndarray]:
    loop = make(strategy, optimizer, rows, plan)
    loop.train(STEPS)
    with watchdog.host("the weights"):
        return loop.step.model.get_weights()


def train_shards(strategy: tf.distribute.Strategy, optimizer: str, directory: Path) -> float:
    """Trains tables that are split over the workers, saves, goes on, and saves again. Returns the
    loss of an evaluation."""
    for stop in (7, STEPS):
        loop = make(strategy, optimizer, "on", "sharded", checkpoints=str(directory))
        loop.restore()
        loop.train(stop)
        loop.save(wait=True)
        loop.checkpoints.close()
    return loop.evaluate()["loss"]


def planned_loop(strategy: tf.distribute.Strategy, fits: bool) -> ctl.Loop:
    """A loop with ``embedding_plan="auto"``: ids that are often equal, and looked up twice."""
    keras.utils.set_random_seed(1)
    random, rows = np.random.default_rng(0), 20_000
    ids = (random.zipf(1.2, (6000, 10)) % rows).astype("int32")
    free = 10**12 if fits else -(10**9)
    with strategy.scope(), mock.patch.object(table_plan, "_available", lambda _: free):
        inputs = keras.Input([10], dtype="int32")
        table, mean = keras.layers.Embedding(rows, 16), keras.layers.GlobalAveragePooling1D()
        each = [mean(table(one)) for one in (inputs, (inputs + 9) % rows)]
        outputs = keras.layers.Dense(CLASSES)(keras.layers.Concatenate()(each))
        step = ctl.TrainStep(
            keras.Model(inputs, outputs), "adagrad", sparse_rows="on", embedding_plan="auto"
        )
        data = ctl.data.InMemory((ids, random.integers(0, CLASSES, 6000)), global_batch_size=1000)
        return ctl.Loop(step, data, strategy=strategy)


def wire(strategy: tf.distribute.Strategy, fits: bool) -> dict[str, Any]:
    """What this worker has sent for the table in some steps, and what the plan says."""
    loop = planned_loop(strategy, fits)
    loop.train(1)
    ctl.workers.barrier(strategy, 60)
    before = sent_bytes()
    loop.train(7)
    ctl.workers.barrier(strategy, 60)
    sent, plan = sent_bytes() - before, loop.plan()
    dense = sum(c.wire_bytes or 0 for c in plan.collectives if c.in_loop)
    (table,) = plan.tables
    return {"how": table.how, "counted": sent / 6 - dense, "planned": table.wire_bytes}


def train_large(
    strategy: tf.distribute.Strategy, optimizer: str, late: bool, rows: int, plan: str
) -> None:
    with strategy.scope():
        with ctl.uninitialized_tables() if late else contextlib.nullcontext():
            table = keras.layers.Embedding(rows, 64)
            model = keras.Sequential([keras.Input([1], dtype="int32"), table])
        model.add(keras.layers.Flatten())
        step = ctl.TrainStep(model, optimizer, sparse_rows="on", embedding_plan=plan)
    data = np.zeros([64, 1], "int32"), np.zeros([64], "int32")
    ctl.Loop(step, data, global_batch_size=8, strategy=strategy).train(2)


def memory(
    strategy: tf.distribute.Strategy,
    optimizer: str,
    late: bool,
    plan: str = "sharded",
    warm: bool = True,
) -> float:
    """The memory that this worker needs at its peak to make, and to train, a table of 256 MiB, over
    what it holds of the table and of its slots. ``warm``: trains a small one before, which takes
    what TensorFlow needs to trace a step; other trainings do, too."""
    rows, slots = 1 << 20, {"sgd": 0, "adagrad": 1, "adam": 2}[optimizer]
    if warm:
        train_large(strategy, optimizer, late, 1000, plan)
    with peak_memory() as peak:
        train_large(strategy, optimizer, late, rows, plan)
    local = len(strategy.extended.worker_devices)
    share = local / strategy.num_replicas_in_sync if plan == "sharded" else local
    return peak[0] / (rows * 64 * 4 * (1 + slots) * share)


def main() -> None:
    out = Path(sys.argv[1])
    me = cluster.resolve(None, None)
    strategy = make_multi_worker(me, collective_timeout=60, startup_timeout=60).strategy
    loss = train_shards(strategy, SPLIT, out / f"{SPLIT} shards")
    np.save(out / f"{SPLIT} loss {me.index}.npy", loss)
    for optimizer in OPTIMIZERS:
        np.savez(out / f"{optimizer} {me.index}.npz", *trained(strategy, optimizer, "on"))
    needed = [memory(strategy, "sgd", True, plan, warm=False) for plan in ("sharded", "replicated")]
    (out / f"memory {me.index}.json").write_text(json.dumps(needed))
    found = [wire(strategy, fits) for fits in (True, False)]
    (out / f"wire {me.index}.json").write_text(json.dumps(found))
    ctl.workers.leave_together(strategy)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
