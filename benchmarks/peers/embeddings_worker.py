"""Trains a model of one embedding table on request of `embeddings.py`.

``ctl`` is `ctl.Loop`, ``dense`` the same with dense gradients, ``plain`` a loop as tutorials write
it, ``fit`` is Keras's `fit`, ``torch`` a PyTorch loop with sparse gradients, whose Adam
(`SparseAdam`) leaves rows without a gradient as they are, which is another algorithm.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _KIND = flags.DEFINE_string("kind", "ctl", "who trains")
    _OPTIMIZER = flags.DEFINE_string("optimizer", "adam", "by its name in Keras")
    _ROWS = flags.DEFINE_integer("rows", 2_000_000, "of the table", lower_bound=1)
    _WIDTH = flags.DEFINE_integer("width", 64, "of the table", lower_bound=1)
    _BATCH = flags.DEFINE_integer("batch", 256, "examples", lower_bound=1)
    _IDS = flags.DEFINE_integer("ids", 20, "that an example looks up", lower_bound=1)

RATE = 1e-3


def arrays() -> tuple[Any, Any]:
    """Examples for 64 batches: ids int32 [n, ids], some of which are frequent, and two classes."""
    import numpy as np

    random = np.random.default_rng(0)
    ids = random.zipf(1.2, (64 * _BATCH.value, _IDS.value)) % _ROWS.value
    return ids.astype("int32"), random.integers(0, 2, len(ids))


def keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [
        keras.Input([_IDS.value], dtype="int32"),
        keras.layers.Embedding(_ROWS.value, _WIDTH.value),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(2),
    ]
    return keras.Sequential(layers)


def keras_optimizer() -> Any:
    import keras

    optimizer = keras.optimizers.get(_OPTIMIZER.value)
    optimizer.learning_rate = RATE
    return optimizer


def _ctl(data: tuple[Any, Any], sparse_rows: str = "on") -> Callable[[int], None]:
    import ctl

    step = ctl.TrainStep(keras_model(), keras_optimizer(), sparse_rows=sparse_rows)
    loop = ctl.Loop(step, ctl.data.InMemory(data, global_batch_size=_BATCH.value))
    return lambda steps: loop.train(loop.global_step + steps, progress=False)


def _dense(data: tuple[Any, Any]) -> Callable[[int], None]:
    return _ctl(data, "off")


def _batches(data: tuple[Any, Any]) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0])).repeat()
    return dataset.batch(_BATCH.value, drop_remainder=True).prefetch(2)


def _plain(data: tuple[Any, Any]) -> Callable[[int], None]:
    import keras
    import tensorflow as tf

    model, optimizer, batches = keras_model(), keras_optimizer(), iter(_batches(data))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(ids: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train(steps: int) -> None:
        for _ in range(steps):
            step(*next(batches))

    return train


def _fit(data: tuple[Any, Any]) -> Callable[[int], None]:
    import keras

    model, batches = keras_model(), _batches(data)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_optimizer(), loss)
    return lambda steps: model.fit(batches, steps_per_epoch=steps, verbose=0)


def _torch(data: tuple[Any, Any]) -> Callable[[int], None]:
    import torch

    torch.manual_seed(1)
    bag = torch.nn.EmbeddingBag(_ROWS.value, _WIDTH.value, mode="mean", sparse=True)
    head = torch.nn.Linear(_WIDTH.value, 2)
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.SparseAdam,
        "adamw": torch.optim.SparseAdam,
    }
    of_table = kinds[_OPTIMIZER.value](bag.parameters(), lr=RATE)
    of_head = torch.optim.Adam(head.parameters(), lr=RATE)
    ids, labels = (torch.from_numpy(array) for array in data)
    ids, at = ids.long(), 0

    def train(steps: int) -> None:
        nonlocal at
        for _ in range(steps):
            rows = slice(at, at + _BATCH.value)
            at = (at + _BATCH.value) % len(ids)
            loss = torch.nn.functional.cross_entropy(head(bag(ids[rows])), labels[rows])
            of_table.zero_grad()
            of_head.zero_grad()
            loss.backward()
            of_table.step()
            of_head.step()

    return train


def build() -> tuple[dict[str, Any], Any]:
    try:
        train = {"ctl": _ctl, "dense": _dense, "plain": _plain, "fit": _fit, "torch": _torch}[
            _KIND.value
        ](arrays())
    except ModuleNotFoundError as error:
        return {"missing": str(error)}, None

    def reply(steps: int) -> dict[str, Any]:
        start = time.perf_counter()
        train(steps)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "peak_bytes": peak}

    return {}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
