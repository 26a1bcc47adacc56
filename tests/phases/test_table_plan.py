"""``embedding_plan="auto"``: what it chooses, and what it says of that."""

from __future__ import annotations

import io
from unittest import mock

import keras
import numpy as np
import pytest
import tables_worker
import tensorflow as tf
from rich.console import Console
from test_sparse_rows import assert_close

from ctl.data import InMemory
from ctl.loop import Loop
from ctl.phases import table_plan
from ctl.phases.plan.plan import from_json
from ctl.phases.plan.table import show
from ctl.step import TrainStep

BATCH, IDS = 16, 5


def make(strategy, memory, rows=(100, 90_000), optimizer="adagrad", count=64, **options):
    """A loop over two tables of width 16: of ids 0 to 4, 5 to 9, and so on; with ``memory`` bytes
    beyond the tables."""
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(90)[:IDS] for _ in range(count)]).astype("int32")
    with strategy.scope():
        inputs = keras.Input([IDS], dtype="int32")
        parts = [keras.layers.Embedding(n, 16, name=f"of_{n}")(inputs) for n in rows]
        parts = [keras.layers.GlobalAveragePooling1D()(part) for part in parts]
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(parts)))
        step = TrainStep(model, optimizer, embedding_plan="auto", **options)
    data = InMemory((ids, random.integers(0, 3, count)), global_batch_size=BATCH)
    with mock.patch.object(table_plan, "_available", lambda _: int(memory / table_plan._SHARE)):
        return Loop(step, data, strategy=strategy)


SMALL, LARGE = 100 * 16 * 4, 90_000 * 16 * 4


@pytest.mark.parametrize(
    "memory, options, ways",
    [
        (2 * LARGE + 3 * SMALL, {}, ["dense", "by rows"]),
        (LARGE, {}, ["dense", "split"]),  # as the slots of both replicas take 2 * LARGE
        (2 * LARGE, {"optimizer": "sgd"}, ["dense", "by rows"]),
        (0, {"optimizer": "sgd", "sparse_rows": "on"}, ["by rows", "by rows"]),
        (-100, {"optimizer": "sgd", "sparse_rows": "on"}, ["by rows", "split"]),
        (-3 * LARGE, {"sparse_rows": "on"}, ["split", "split"]),
        (-3 * LARGE, {"sparse_rows": "off"}, ["dense", "dense"]),
        (-3 * LARGE, {"optimizer": "adam"}, ["dense", "dense"]),
        (-3 * LARGE, {"accumulate_steps": 2}, ["dense", "by rows"]),
    ],
)
def test_what_is_chosen(mirrored, memory, options, ways):
    loop = make(mirrored(2), memory, **options)
    assert [one.how for one in loop.step.table_plan] == ways
    split = [v.value.shape[0] < v.shape[0] for v in loop.step.model.trainable_variables[:2]]
    assert split == [how == "split" for how in ways]
    assert [v.value in loop.step.tables for v in loop.step.model.trainable_variables[:2]] == [
        how != "dense" for how in ways
    ]


def test_without_a_strategy():
    strategy = tf.distribute.get_strategy()
    loop = make(strategy, 2 * LARGE + 3 * SMALL)
    assert [one.how for one in loop.step.table_plan] == ["dense", "by rows"]
    assert table_plan._available(strategy) > 0


def test_bytes_and_memory(mirrored, warnings_of):
    """Of all ids at once: each replica looks up at most 40 different rows, and sends each."""
    loop = make(mirrored(2), -3 * LARGE, sparse_rows="on", count=BATCH)
    ids = np.asarray(loop.dataset.arrays[0])
    most = max(len(np.unique(part)) for part in np.split(ids, 2))
    small, large = loop.step.table_plan
    all_ids = np.unique(ids)
    own = max((all_ids < 50).sum(), (all_ids >= 50).sum())
    assert small.wire_bytes == most * (64 + 4) + most * 4 + own * 64
    assert large.wire_bytes == most * (64 + 4) + most * 4 + len(all_ids) * 64
    assert (small.memory_bytes, large.memory_bytes) == (2 * SMALL, 2 * LARGE)
    assert any("may not fit" in warning for warning in warnings_of())


def test_many_rows_of_a_table_go_dense(mirrored):
    """A batch of more rows than the table has."""
    loop = make(mirrored(2), 10 * LARGE, rows=(90_000, 90))
    loop_of = {one.name.split("/")[0]: one for one in loop.step.table_plan}
    assert loop_of["of_90"].how == "dense" and loop_of["of_90"].wire_bytes == 90 * 64
    with mock.patch.object(table_plan, "LEAST_BYTES", 0):
        loop = make(mirrored(2), 10 * LARGE, rows=(90_000, 90), count=BATCH)
    loop_of = {one.name.split("/")[0]: one for one in loop.step.table_plan}
    assert loop_of["of_90"].how == ("by rows" if loop_of["of_90"].wire_bytes < 90 * 64 else "dense")


@pytest.mark.slow
def test_the_plan_is_shown(mirrored):
    plan = make(mirrored(2), -3 * LARGE, sparse_rows="on").plan()
    assert from_json(plan.to_json()) == plan
    text = io.StringIO()
    show(plan, Console(file=text, width=120))
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("of_90000")]
    assert "90000 x 16" in line and "split" in line and "11.0 MiB" in line


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls, self.own = (
            self.add_weight(initializer="zeros"),
            tf.Variable(0.0, trainable=False),
        )

    def call(self, ids):
        self.calls.assign_add(1.0)
        self.own.assign_add(1.0)
        return ids


def test_the_model_keeps_its_state(mirrored):
    """A plan looks at what a batch looks up, and changes nothing."""
    with mirrored(2).scope():
        counting = Counting()
        layers = [counting, keras.layers.Embedding(90_000, 16), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input([IDS], dtype="int32"), *layers])
        step = TrainStep(model, "sgd", lambda y, x: tf.reduce_sum(x, 1), embedding_plan="auto")
    loop = Loop(
        step, (np.zeros([8, IDS], "int32"), np.zeros(8)), global_batch_size=4, strategy=mirrored(2)
    )
    assert loop.step.table_plan[0].wire_bytes is not None  # a batch was read
    assert counting.calls.numpy() == counting.own.numpy() == 0.0


def test_data_of_which_no_batch_can_be_read(mirrored):
    """The plan goes by sizes, and says that it does not know the bytes."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input([IDS]), keras.layers.Embedding(90_000, 16)])
        step = TrainStep(model, "sgd", lambda y, x: tf.reduce_sum(x, [1, 2]), embedding_plan="auto")
    data = tf.data.Dataset.from_tensors((tf.zeros([4, IDS]), tf.zeros([4]))).repeat()
    with mock.patch.object(table_plan, "read_again", lambda *_: None):
        loop = Loop(step, data, global_batch_size=4, strategy=mirrored(2))
    (one,) = loop.step.table_plan
    assert (one.how, one.wire_bytes) == ("by rows", None)


@pytest.mark.slow
def test_equals_dense_tables(mirrored):
    with mock.patch.object(table_plan, "_available", lambda _: -(10**9)):
        weights = tables_worker.trained(mirrored(2), "adagrad", "on", "auto")
    one = tf.distribute.OneDeviceStrategy("/cpu:0")
    assert_close(weights, tables_worker.trained(one, "adagrad", "off"))
