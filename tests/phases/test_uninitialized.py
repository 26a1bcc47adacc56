"""Embedding tables that get their values late: the bits that Keras gives, without a whole table."""

from __future__ import annotations

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tables_worker
import tensorflow as tf
from tables_worker import IDS, examples, three_lookups

import ctl
from ctl.phases import uninitialized
from ctl.phases.uninitialized import Uninitialized, uninitialized_tables

INITIALIZERS = [
    keras.initializers.RandomUniform(-0.3, 0.1, seed=5),
    keras.initializers.RandomUniform(),
    keras.initializers.RandomNormal(0.1, 0.2, seed=5),
    keras.initializers.TruncatedNormal(0.1, 0.2, seed=5),
    keras.initializers.Zeros(),
    keras.initializers.Ones(),
]


def made(late=True, **options) -> keras.layers.Embedding:
    layer = keras.layers.Embedding(101, options.pop("width", 3), **options)
    with uninitialized_tables() if late else contextlib.nullcontext():
        layer = type(layer).from_config(layer.get_config())
        layer.build()
    return layer


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_rows_are_drawn_with_the_bits_of_the_whole(initializer, width):
    """From any row on, in parts of any size."""
    whole = initializer((101, width)).numpy()
    with uninitialized_tables():
        layer = keras.layers.Embedding(101, width, initializer)
        layer.build()
    table = layer._embeddings
    assert isinstance(table, Uninitialized)
    for start, end, most in (0, 101, 1), (37, 50, 1 << 21), (38, 101, 40), (99, 100, 5):
        with mock.patch.object(uninitialized, "_ELEMENTS_AT_A_TIME", most):
            part = tf.Variable(tf.zeros([end - start, width]))
            for first, rows in table._rows(start, end):
                part[first - start : first - start + len(rows)].assign(rows)
        np.testing.assert_array_equal(part.numpy(), whole[start:end])


@pytest.mark.slow
@pytest.mark.parametrize("plan, replicas", [("sharded", 2), ("replicated", 2), ("replicated", 1)])
def test_a_loop_makes_the_tables_that_keras_makes(mirrored, plan, replicas):
    """And their variables have the same names, which weight decay may exclude."""
    found = []
    for late in (False, True):
        keras.utils.set_random_seed(1)
        with mirrored(replicas).scope():
            with uninitialized_tables() if late else contextlib.nullcontext():
                model = three_lookups()
            step = ctl.TrainStep(model, "adagrad", sparse_rows="on", embedding_plan=plan)
            tables = [v for v in model.variables if isinstance(v, Uninitialized)]
            assert len(tables) == 3 * late
        loop = ctl.Loop(step, tables_worker.batches(), strategy=mirrored(replicas))
        before = model.get_weights()
        loop.train(3)
        names = [v.value.name.split("/")[-1] for v in model.trainable_variables]
        found.append((names, [*before, *model.get_weights()]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_split_table_is_never_whole(mirrored):
    """Nobody reads it before it is split, also where a plan decides."""
    with (
        mock.patch.object(Uninitialized, "initialize", side_effect=AssertionError),
        mock.patch.object(ctl.phases.table_plan, "_available", lambda _: -(10**9)),
    ):
        keras.utils.set_random_seed(1)
        with mirrored(2).scope(), uninitialized_tables():
            model, optimizer = three_lookups(), keras.optimizers.AdamW(weight_decay=0.1)
            step = ctl.TrainStep(model, optimizer, sparse_rows="on", embedding_plan="auto")
        ctl.Loop(step, tables_worker.batches(), strategy=mirrored(2)).train(1)


@pytest.mark.slow
def test_no_replica_needs_the_memory_of_a_whole_table(mirrored):
    assert tables_worker.memory(mirrored(2), "sgd", late=True) < 1.6
    assert tables_worker.memory(mirrored(2), "sgd", late=False) > 2


@pytest.mark.slow
def test_slots_that_are_constants_need_no_memory_but_theirs(mirrored):
    assert tables_worker.memory(mirrored(1), "adagrad", True, "replicated") < 1.35


@pytest.mark.slow
def test_who_reads_a_table_first_makes_it():
    ids = tf.constant(examples()[0][:4])

    def model():
        keras.utils.set_random_seed(1)
        return three_lookups()

    plain = model()
    with uninitialized_tables():
        models = [model() for _ in range(4)]
    np.testing.assert_array_equal(models[0](ids), plain(ids))
    np.testing.assert_array_equal(tf.function(models[1])(ids), plain(ids))
    models[2].set_weights([w + 1 for w in plain.get_weights()])
    for one, other in zip(models[2].get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other + 1)
    models[3].compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    models[3].fit(*examples(), verbose=0)
    for one in models:
        assert not [v for v in one.variables if isinstance(v, Uninitialized)]


class Pooled(keras.Model):
    """Keras builds its layers in a symbolic call, and initializes them after it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = keras.layers.Embedding(101, 3), keras.layers.Dense(3)

    def call(self, ids):
        return self.head(keras.ops.mean(self.table(ids), 1))


@pytest.mark.slow
def test_replicas_that_read_a_table_first_make_it_together(mirrored):
    """An evaluation without a loop, and a model that `strategy.run` calls."""
    results, sums = [], []
    for late in (False, True):
        for of_evaluator in (True, False):
            keras.utils.set_random_seed(1)
            with mirrored(2).scope():
                with uninitialized_tables() if late else contextlib.nullcontext():
                    model = three_lookups()
                step = ctl.EvalStep(model)
            assert any(isinstance(v, Uninitialized) for v in model.variables) == late
            if of_evaluator:
                results.append(ctl.Evaluator(step, examples(), strategy=mirrored(2)).run())
            else:
                run = tf.function(lambda m=model: mirrored(2).run(m, (examples()[0][:4],)))
                sums.append([np.sum(v) for v in mirrored(2).experimental_local_results(run())])
    assert results[0] == results[1] and sums[0] == sums[1]


@pytest.mark.slow
def test_a_table_that_a_symbolic_call_makes(mirrored):
    ids, labels = examples()
    found = []
    for late in (False, True):
        keras.utils.set_random_seed(1)
        with mirrored(2).scope(), uninitialized_tables() if late else contextlib.nullcontext():
            model = Pooled()
            model(keras.Input([IDS], dtype="int32"))
            step = ctl.TrainStep(model, "sgd", sparse_rows="on", embedding_plan="sharded")
        assert isinstance(model.table._embeddings, Uninitialized) == late
        loop = ctl.Loop(step, (ids % 101, labels), global_batch_size=24, strategy=mirrored(2))
        loop.train(2)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {"embeddings_initializer": "glorot_uniform"},
        {"embeddings_initializer": keras.initializers.Constant(0.5)},
        {"lora_rank": 2},
        {"dtype": "float64"},
    ],
)
def test_what_cannot_wait_is_made_at_once(options):
    assert not isinstance(made(**options)._embeddings, Uninitialized)
    assert isinstance(made()._embeddings, Uninitialized)


def test_the_seed_of_a_generator_is_drawn_at_once():
    """Which row comes next depends on who has drawn before."""
    with uninitialized_tables():
        start = keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(1))
        layer = keras.layers.Embedding(101, 3, start)
        layer.build()
    assert not isinstance(layer._embeddings, Uninitialized)
    assert keras.layers.Embedding.build.__qualname__ == "Embedding.build"
