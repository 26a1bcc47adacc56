"""Trains embedding tables on three parameter servers, which are threads of this process, and on one
device. Prints JSON: the largest difference of a weight, by case, and what is split or refused.

python servers_in_one_process.py OUT
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from ctl.base import console

console.log_to_terminal()
console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from paths import BENCHMARKS  # noqa: E402

import ctl  # noqa: E402
from ctl import launch  # noqa: E402
from ctl.errors import UsageError  # noqa: E402
from ctl.jobs.parameter_server import ParameterServerLoop  # noqa: E402

sys.path.append(str(BENCHMARKS / "peers"))

from sent_bytes import sent_bytes  # noqa: E402

OUT = Path(sys.argv[1])
SERVERS, BATCH, CLASSES, STEPS = 3, 16, 3, 12
ROWS = 100_000  # of a large table, 8 wide
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "adam, lazily": lambda: keras.optimizers.Adam(0.01, epsilon=1e-4),
}


def examples() -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    words = random.zipf(1.3, (240, 4)) % 100
    return (
        {"words": words.astype("int32"), "city": random.integers(0, 7, 240)},
        random.integers(0, CLASSES, 240),
    )


def make_model(rows: int, in_a_loop: bool) -> keras.Model:
    """Two features share a table; another has 7 rows, and one fewer than servers."""
    keras.utils.set_random_seed(1)
    words, city = keras.Input([4], dtype="int32", name="words"), keras.Input([], name="city")
    table = keras.layers.Embedding(rows, 8)
    one_by_one = keras.layers.Lambda(lambda rows: tf.map_fn(table, rows, tf.float32))
    looked_up = one_by_one(words) if in_a_loop else table(words)
    parts = [keras.layers.GlobalAveragePooling1D()(looked_up), table(words[:, 0])]
    parts += [keras.layers.Embedding(7, 2)(city), keras.layers.Embedding(2, 2)(city // 4)]
    logits = keras.layers.Dense(CLASSES)(keras.layers.Concatenate()(parts))
    return keras.Model({"words": words, "city": city}, logits)


def make_loop(
    kind: str,
    strategy: tf.distribute.Strategy | None,
    directory: str,
    rows: int = 100,
    in_a_loop: bool = False,
    **options: Any,
) -> ctl.Loop:
    with strategy.scope() if strategy else contextlib.nullcontext():
        options = {
            "sparse_rows": "lazy" if "lazily" in kind else "on",
            "embedding_plan": "sharded" if strategy else "replicated",
            **options,
        }
        step = ctl.TrainStep(
            make_model(rows, in_a_loop), OPTIMIZERS[kind](), clip_norm=1.0, **options
        )
    data = ctl.data.InMemory(examples(), global_batch_size=BATCH)
    checkpoints = ctl.CheckpointManager(OUT / directory, keep=9)
    if not strategy:
        return ctl.Loop(step, data, checkpoints=checkpoints)
    tasks = mock.Mock(workers=["worker 0"], asked_to_stop=False)
    return ParameterServerLoop(
        step, data, strategy=strategy, heartbeats=tasks, checkpoints=checkpoints
    )


def trained(
    kind: str,
    strategy: tf.distribute.Strategy | None,
    directory: str,
    halfway: str = "",
    **options: Any,
) -> ctl.Loop:
    """Goes on with what is in ``directory``, and saves; also after half of the steps, into a copy
    of the directory, ``halfway``."""
    loop = make_loop(kind, strategy, directory, **options)
    loop.restore()
    if halfway:
        loop.train(STEPS // 2)
        loop.save(wait=True)
        shutil.copytree(OUT / directory, OUT / halfway, ignore=shutil.ignore_patterns(".lock"))
    loop.train(STEPS)
    loop.save(wait=True)
    return loop


def difference(one: ctl.Loop, other: ctl.Loop) -> float:
    """The largest of a weight."""
    pairs = zip(one.step.model.get_weights(), other.step.model.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def start_servers() -> tf.distribute.Strategy:
    for _ in range(5):
        addresses = launch.cluster(1, ps=SERVERS)
        del addresses["chief"]  # this process
        cluster = tf.train.ClusterSpec(addresses)
        with contextlib.suppress(tf.errors.OpError):  # another program has taken a port meanwhile
            for kind, group in addresses.items():
                for index in range(len(group)):
                    _running.append(tf.distribute.Server(cluster, kind, index, protocol="grpc"))
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                cluster, rpc_layer="grpc"
            )
            return tf.distribute.ParameterServerStrategy(resolver)
    raise AssertionError("no free ports")


_running: list[tf.distribute.Server] = []


def run() -> None:
    strategy, found = start_servers(), {}
    for kind in OPTIMIZERS:
        options = {"accumulate_steps": 2} if kind == "adagrad" else {}
        split = trained(kind, strategy, f"{kind} split", f"{kind} from", **options)
        whole = trained(kind, None, f"{kind} whole", f"{kind} to", **options)
        found[kind] = difference(split, whole)
    for direction, then in (("from", None), ("to", strategy)):
        found[direction] = difference(trained(kind, then, f"{kind} {direction}"), whole)
    with strategy.scope():
        again = ctl.TrainStep(split.step.model, OPTIMIZERS["adagrad"]())
    again.build(strategy)
    found["made whole again"] = difference(split, whole)
    loop = make_loop("adagrad", strategy, "auto", embedding_plan="auto")
    found["auto"] = sum(table.shards is not None for table in loop.step.tables)
    loop = make_loop("adagrad", strategy, "large", rows=ROWS)
    loop.train(1)
    before = sent_bytes()
    loop.train(STEPS)
    found["sent"] = (sent_bytes() - before) / (STEPS - 1)
    for name, what in {
        "refused": lambda: make_loop(kind, strategy, "refused", sparse_rows="on"),
        "in a loop": lambda: make_loop("adagrad", strategy, "loop", in_a_loop=True).train(1),
        "compiled": lambda: make_loop("adagrad", strategy, "compiled", jit_update=True),
    }.items():
        try:
            what()
        except UsageError as error:
            found[name] = str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the servers cannot be stopped in another way


if __name__ == "__main__":
    run()
