"""Trains a model with embedding tables on request of `embeddings.py`.

``ctl`` is `ctl.Loop`, ``dense`` the same with dense gradients, ``plain`` a loop as tutorials write
it, ``fit`` is Keras's `fit`, ``torch`` a PyTorch loop with sparse gradients, whose Adam
(`SparseAdam`) leaves rows without a gradient as they are, which is another algorithm. Of several
replicas, ``torch`` has a process for each, with `DistributedDataParallel` over gloo.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from lines import serve
from sent_bytes import sent_bytes

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _KIND = flags.DEFINE_string("kind", "ctl", "who trains")
    _MODEL = flags.DEFINE_string("model", "bag", "bag or dlrm")
    _OPTIMIZER = flags.DEFINE_string("optimizer", "adam", "by its name in Keras")
    _ROWS = flags.DEFINE_integer("rows", 2_000_000, "of a table, at most", lower_bound=1)
    _WIDTH = flags.DEFINE_integer("width", 64, "of a table", lower_bound=1)
    _BATCH = flags.DEFINE_integer("batch", 256, "examples", lower_bound=1)
    _IDS = flags.DEFINE_integer("ids", 20, "that an example of a bag looks up", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer("replicas", 1, "of one process", lower_bound=1)
    _WORKERS = flags.DEFINE_list("workers", "", "host:port of each worker; empty for one process")
    _INDEX = flags.DEFINE_integer("worker_index", 0, "which of the workers this is", lower_bound=0)

RATE = 1e-3
BATCHES = 64  # in memory


def table_rows() -> list[int]:
    """Rows of each table; of DLRM, those of the Kaggle challenge, but at most --rows."""
    from ctl.data.datasets.clicks import KAGGLE_ROWS

    tables = KAGGLE_ROWS if _MODEL.value == "dlrm" else [_ROWS.value]
    return [min(rows, _ROWS.value) for rows in tables]


def arrays() -> tuple[Any, Any]:
    """Examples for 64 batches. Of a bag: ids int32 [n, ids], some of which are frequent, and two
    classes. Of DLRM: drawn clicks, float32 [n, 13] and int64 [n, 26], and labels float32 [n]."""
    import numpy as np

    if _MODEL.value == "bag":
        random = np.random.default_rng(0)
        ids = random.zipf(1.2, (BATCHES * _BATCH.value, _IDS.value)) % _ROWS.value
        return ids.astype("int32"), random.integers(0, 2, len(ids))
    from ctl.data.datasets import clicks

    drawn = list(clicks.draw(0, BATCHES * _BATCH.value))
    numbers = np.concatenate([np.where(d.no_number, 0, d.numbers) for d in drawn])
    ids = np.concatenate([np.where(d.no_hash, 0, d.hashes) for d in drawn])
    labels = np.concatenate([d.labels for d in drawn])
    dense = numbers.astype("float32")
    return {"dense": dense, "ids": ids.astype("int64") % table_rows()}, labels.astype("float32")


def rows_of_a_share(data: tuple[Any, Any]) -> float:
    """The different rows that a worker's share of a batch looks up: the mean over the batches."""
    import numpy as np

    ids = data[0] if _MODEL.value == "bag" else data[0]["ids"] + np.cumsum([0, *table_rows()[:-1]])
    shares = np.split(ids, BATCHES * max(1, len(_WORKERS.value)))
    return float(np.mean([len(np.unique(share)) for share in shares]))


def keras_model() -> Any:
    import keras

    import ctl

    keras.utils.set_random_seed(1)
    if _MODEL.value == "dlrm":
        return ctl.models.dlrm(table_rows(), _WIDTH.value)
    layers = [
        keras.Input([_IDS.value], dtype="int32"),
        keras.layers.Embedding(_ROWS.value, _WIDTH.value),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(2),
    ]
    return keras.Sequential(layers)


def keras_loss() -> Any:
    import keras

    losses = keras.losses
    kind = {"dlrm": losses.BinaryCrossentropy, "bag": losses.SparseCategoricalCrossentropy}
    return kind[_MODEL.value](from_logits=True)


def keras_optimizer() -> Any:
    import keras

    optimizer = keras.optimizers.get(_OPTIMIZER.value)
    optimizer.learning_rate = RATE
    return optimizer


def _ctl(data: tuple[Any, Any], sparse_rows: str = "on") -> Callable[[int], None]:
    import ctl

    if _WORKERS.value:
        me = ctl.cluster.Cluster(tuple(_WORKERS.value), _INDEX.value, "--workers")
        placement = ctl.strategy.make_multi_worker(me)
    else:
        placement = ctl.make_strategy(replicas=_REPLICAS.value)
    with placement.strategy.scope():
        with ctl.uninitialized_tables():
            model = keras_model()
        options = {"sparse_rows": sparse_rows, "options": placement.options}
        step = ctl.TrainStep(model, keras_optimizer(), loss_fn=keras_loss(), **options)
    batches = ctl.data.InMemory(data, global_batch_size=_BATCH.value)
    loop = ctl.Loop(step, batches, strategy=placement.strategy)
    return lambda steps: loop.train(loop.global_step + steps, progress=False)


def _dense(data: tuple[Any, Any]) -> Callable[[int], None]:
    return _ctl(data, "off")


def _batches(data: tuple[Any, Any]) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[1])).repeat()
    return dataset.batch(_BATCH.value, drop_remainder=True).prefetch(2)


def _plain(data: tuple[Any, Any]) -> Callable[[int], None]:
    import tensorflow as tf

    model, optimizer, batches = keras_model(), keras_optimizer(), iter(_batches(data))
    loss_of = keras_loss()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(features: Any, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train(steps: int) -> None:
        for _ in range(steps):
            step(*next(batches))

    return train


def _fit(data: tuple[Any, Any]) -> Callable[[int], None]:
    model, batches = keras_model(), _batches(data)
    model.compile(keras_optimizer(), keras_loss())
    return lambda steps: model.fit(batches, steps_per_epoch=steps, verbose=0)


def _torch(data: tuple[Any, Any]) -> Callable[[int], None]:
    import torch_embeddings

    share = _BATCH.value, _WORKERS.value, _INDEX.value
    return torch_embeddings.trainer(
        _MODEL.value, table_rows(), _WIDTH.value, _OPTIMIZER.value, RATE, data, *share
    )


def build() -> tuple[dict[str, Any], Any]:
    kinds = {"ctl": _ctl, "dense": _dense, "plain": _plain, "fit": _fit, "torch": _torch}
    data = arrays()
    try:
        train = kinds[_KIND.value](data)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}, None

    def reply(steps: int) -> dict[str, Any]:
        start, before = time.perf_counter(), sent_bytes()
        train(steps)
        seconds, sent = time.perf_counter() - start, sent_bytes() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "peak_bytes": peak, "sent_bytes": sent}

    return {"table_rows": sum(table_rows()), "rows_of_a_share": rows_of_a_share(data)}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
