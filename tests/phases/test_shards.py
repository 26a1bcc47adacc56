"""Embedding tables that are split over the replicas: equal to whole ones, on any number of them."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tables_worker
import tensorflow as tf
import test_sparse_rows
from paths import SUPPORT
from tables_worker import IDS, ROWS, STEPS, examples, make
from test_sparse_rows import assert_close, tied
from worker_jobs import run_job

from ctl.checkpoint import CheckpointManager
from ctl.checkpoint.export import export_model
from ctl.checkpoint.reader import Reader
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases import fetching, shards, sparse_rows
from ctl.phases.optimizers import slots_of
from ctl.step import TrainStep
from ctl.testing import check_step

OPTIMIZERS = [*tables_worker.OPTIMIZERS]


@pytest.fixture(scope="module")
def dense():
    """The weights after ``STEPS`` steps with dense gradients, on one replica."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    return {kind: tables_worker.trained(strategy, kind, "off") for kind in OPTIMIZERS}


@pytest.mark.slow
def test_equals_whole_tables(mirrored, dense):
    """On shares of any size, some of which have no examples. AdamW, and four replicas: see
    `test_a_checkpoint_of_any_number_of_replicas_goes_on_with_any_other`."""
    split = tables_worker.trained(mirrored(2), "adagrad", "on", "sharded")
    assert_close(split, dense["adagrad"])


@pytest.fixture(scope="module")
def two_workers(job, tmp_path_factory):
    """What two workers left, see tables_worker.py."""
    directory = tmp_path_factory.mktemp("workers")
    run_job(job, directory, program=SUPPORT / "tables_worker.py")
    return directory


def test_equals_them_on_two_workers(mirrored, dense, two_workers):
    """Through a resume. A checkpoint of two workers is read by one, whole."""
    optimizer, want = tables_worker.SPLIT, dense[tables_worker.SPLIT]
    directory = two_workers / f"{optimizer} shards"
    reader = Reader(directory)
    assert_close([reader[name] for name in list(reader)[: len(want)]], want)
    loop = make(mirrored(1), optimizer, "on", checkpoints=str(directory))
    loop.restore()
    assert_close(loop.step.model.get_weights(), want)
    for index in range(2):
        loss = float(np.load(two_workers / f"{optimizer} loss {index}.npy"))
        np.testing.assert_allclose(loss, loop.evaluate()["loss"], rtol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_ones_equal_them_on_two_workers(dense, two_workers, optimizer):
    for index in range(2):
        got = [*np.load(two_workers / f"{optimizer} {index}.npz").values()]
        assert_close(got, dense[optimizer])


def test_the_wire_carries_what_the_plan_of_tables_says(two_workers):
    """By Linux's count of each worker's own sockets: by rows, then split."""
    for index in range(2):
        found = json.loads((two_workers / f"wire {index}.json").read_text())
        assert [one["how"] for one in found] == ["by rows", "split"]
        for one in found:
            assert 0.95 < one["counted"] / one["planned"] < 1.05, one


def test_two_workers_need_the_memory_of_their_parts(two_workers):
    """Also while the table is made; a whole one would be twice as large. One that is not split is
    sent to no other worker, which would need several times its memory."""
    for index in range(2):
        split, whole = json.loads((two_workers / f"memory {index}.json").read_text())
        assert split < 1.6 and whole < 1.6


@pytest.mark.slow
def test_a_checkpoint_of_any_number_of_replicas_goes_on_with_any_other(mirrored, dense, tmp_path):
    # That a split one goes on whole, see `test_equals_them_on_two_workers`.
    plans = (1, "replicated", 3), (4, "sharded", 7), (2, "sharded", STEPS)
    for replicas, plan, stop in plans:
        loop = make(mirrored(replicas), "adamw", "on", plan, checkpoints=str(tmp_path))
        loop.restore()
        loop.train(stop)
        loop.save(wait=True)
        loop.checkpoints.close()
    assert_close(loop.step.model.get_weights(), dense["adamw"])


def variables(loop) -> list[np.ndarray]:
    return [v.numpy() for group in loop.state.variables().values() for v in group]


@functools.cache
def trained_split(strategy, directory: Path) -> tuple[Loop, list[np.ndarray]]:
    loop = make(strategy, "adamw", "on", "sharded", checkpoints=CheckpointManager(directory))
    loop.train(5)
    loop.save(wait=True)
    loop.train(STEPS)
    loop.checkpoints.close()
    return loop, variables(loop)


@pytest.fixture(scope="module")
def directory_of_split(tmp_path_factory):
    return tmp_path_factory.mktemp("split")


@pytest.fixture  # of a test, so that it trains as tests do: without XLA
def split(mirrored, directory_of_split):
    """A loop of split tables on two replicas that has trained, and saved step 5; and what it had at
    the end."""
    return trained_split(mirrored(2), directory_of_split)


@pytest.mark.slow
def test_a_resume_changes_no_bit(mirrored, split, directory_of_split):
    _, whole = split
    checkpoints = CheckpointManager(directory_of_split)
    part = make(mirrored(2), "adamw", "on", "sharded", checkpoints=checkpoints)
    with checkpoints:
        assert part.restore().step == 5
        part.train(STEPS)
    for one, other in zip(variables(part), whole, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_replica_holds_its_part_of_the_tables_and_of_their_slots(mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        model = tables_worker.three_lookups()
        tables = [v for v in model.trainable_variables if "embedding" in v.path]
        before = [weakref.ref(v.value) for v in tables]
        optimizer = keras.optimizers.Adam(0.01)
        step = TrainStep(model, optimizer, sparse_rows="on", embedding_plan="sharded")
    loop = Loop(step, tables_worker.batches(), strategy=strategy)
    loop.train(2)
    most = -(-(ROWS + 7) // 2)
    for table in tables:
        slots = slots_of(optimizer, table)
        assert len(slots) == 2
        for variable in (table.value, *slots):
            copies = strategy.experimental_local_results(variable)
            assert {copy.shape[0] for copy in copies} <= {most, ROWS // 2}
    gc.collect()
    assert [whole() for whole in before] == [None] * 3


@pytest.mark.slow
def test_who_reads_a_table_finds_all_rows(mirrored, dense, split, tmp_path):
    """Another step, too, which takes the model over whole."""
    loop, _ = split
    model, want = loop.step.model, dense["adamw"]
    plain = tables_worker.three_lookups()
    plain.set_weights(want)
    ids = tf.constant(examples()[0][:4])
    assert_close(model.get_weights(), want)
    assert_close([table.numpy() for table in model.trainable_variables], want)
    assert [tuple(v.shape) for v in model.trainable_variables] == [w.shape for w in want]
    for outputs in (model(ids), tf.function(model)(ids)):
        np.testing.assert_allclose(outputs, plain(ids), rtol=1e-4, atol=1e-5)
    keras_file, saved_model = export_model(model, tmp_path / "export")
    assert_close(keras.models.load_model(keras_file).get_weights(), want)
    loaded = tf.saved_model.load(str(saved_model))
    np.testing.assert_allclose(loaded.serve(ids), plain(ids), rtol=1e-4, atol=1e-5)
    model.set_weights([w + 1 for w in want])
    assert_close(model.get_weights(), [w + 1 for w in want])
    with mirrored(2).scope():
        step = TrainStep(model, "sgd", sparse_rows="off")
    Loop(step, tables_worker.batches(), strategy=mirrored(2))
    assert_close([v.value.numpy() for v in model.trainable_variables], [w + 1 for w in want])
    with pytest.raises(UsageError, match="belongs to a step that was made later"):
        loop.train(STEPS + 1)


@pytest.mark.slow
def test_rows_of_one_width_are_fetched_together(mirrored):
    """Of four lookups in tables of two widths, with the same bits as one after the other."""

    def trained(fetch_first):
        with (
            mock.patch.object(sparse_rows, "fetch_first", fetch_first),
            mock.patch.object(shards, "fetch_rows", side_effect=shards.fetch_rows) as fetch,
        ):
            loop = make(mirrored(2), "adagrad", "on", "sharded")
            loop.train(2)
        return loop.step.model.get_weights(), fetch.call_count

    one_by_one, many = trained(lambda *_: None)
    together, few = trained(sparse_rows.fetch_first)
    assert many == 2 * few > 0
    for one, other in zip(one_by_one, together, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "between, known",
    [
        (lambda ids: ids[:, ::-1] * 2 % ROWS, True),
        (keras.layers.Reshape([IDS, 1]), True),
        (keras.layers.Lambda(lambda ids: ids + 1), False),
        (lambda ids: keras.ops.argmax(keras.layers.Embedding(ROWS, 4)(ids), -1), False),
        (lambda ids: keras.ops.cast(ids, "float32"), False),
    ],
)
def test_ids_that_are_known_before_the_model_runs(between, known):
    inputs = keras.Input([IDS], dtype="int32")
    table = keras.layers.Embedding(ROWS, 4)
    model = keras.Model(inputs, [table(inputs), table(between(inputs))])
    assert len(fetching.ids_of(model, table)) == (2 if known else 0)
    keras.Model(inputs, table(inputs))  # calls it once more, elsewhere
    assert fetching.ids_of(model, table) == []


def accumulates(model):
    return TrainStep(model, "sgd", accumulate_steps=2, sparse_rows="on", embedding_plan="sharded")


def is_built(model):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return TrainStep(model, optimizer, sparse_rows="on", embedding_plan="sharded")


def moves_all(model):
    return TrainStep(model, keras.optimizers.Lamb(), sparse_rows="on", embedding_plan="sharded")


@pytest.mark.parametrize(
    "make_step, reason",
    [
        (accumulates, "because micro-batches run in a loop"),
        (is_built, "because its optimizer was built before the step"),
        (moves_all, "because Lamb moves rows that have no gradient"),
    ],
)
def test_what_cannot_be_split_is_refused_and_stays_whole(mirrored, make_step, reason):
    with mirrored(2).scope():
        model = tables_worker.three_lookups()
        step = make_step(model)
    before = model.get_weights()
    with pytest.raises(UsageError, match=reason):
        Loop(step, tables_worker.batches(), strategy=mirrored(2))
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.value.numpy(), value)
    assert {type(variable) for variable in model.trainable_variables} == {keras.Variable}


@pytest.mark.parametrize(
    "replicas, rows, reason",
    [
        (1, "on", "there is one replica"),
        (2, "auto", "none has 4.0 MiB; sparse_rows=on"),
        (2, "off", "none is trained by rows"),
    ],
)
def test_a_plan_that_splits_nothing_says_so(mirrored, warnings_of, replicas, rows, reason):
    make(mirrored(replicas), "adagrad", rows, "sharded")
    assert any(reason in warning for warning in warnings_of())


@pytest.mark.slow
def test_the_checks_of_a_step_hold():
    def make_loop(strategy, checkpoints):
        return test_sparse_rows.make(strategy, embedding_plan="sharded", checkpoints=checkpoints)

    check_step(make_loop, replicas=[2], steps=3)


def test_a_table_that_is_not_only_looked_up_is_refused(mirrored):
    with mirrored(2).scope():
        step = TrainStep(tied(), "sgd", sparse_rows="on", embedding_plan="sharded")
    ids, labels = examples(24)
    loop = Loop(step, (ids, labels), global_batch_size=8, strategy=mirrored(2))
    with pytest.raises(UsageError, match="is used other than by lookups"):
        loop.train(1)


@pytest.mark.slow
def test_an_id_outside_of_a_table_is_named(mirrored):
    with mirrored(2).scope():
        model = keras.Sequential(
            [
                keras.layers.Lambda(lambda ids: ids + 2),
                keras.layers.Embedding(ROWS, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.build([None, IDS])
        step = TrainStep(model, "sgd", sparse_rows="on", embedding_plan="sharded")
    ids = np.full([8, IDS], ROWS - 1, "int32")
    loop = Loop(step, (ids, np.zeros(8, "int32")), global_batch_size=8, strategy=mirrored(2))
    with pytest.raises(UsageError, match=f"index {ROWS + 1} is outside of a table of {ROWS} rows"):
        loop.train(1)
