"""Embedding tables by rows, through the loop: equal to dense gradients, for whoever reads them."""

from __future__ import annotations

import functools
import logging as python_logging

import keras
import numpy as np
import pytest
import tables_worker
import tensorflow as tf
from tables_worker import CLASSES, IDS, ROWS, WIDTH, examples

from ctl.checkpoint.export import export_model
from ctl.checkpoint.reader import Reader
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.errors import CheckpointError, UsageError
from ctl.jobs import trials
from ctl.loop import Loop
from ctl.phases import deferred, optimizers, sparse_rows
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep
from ctl.testing import check_step

BATCH = 24
OPTIMIZERS = tables_worker.OPTIMIZERS | {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
}


def embedding_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([IDS], dtype="int32"),
            keras.layers.Embedding(ROWS, WIDTH, name="embedding"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def make(strategy, rows="on", optimizer="adamw", model=embedding_model, data=None, **options):
    keras.utils.set_random_seed(1)
    loop_options = {k: options.pop(k) for k in ("checkpoints", "steps_per_loop") if k in options}
    with strategy.scope():
        built = model()
        kind = options.pop("step_class", TrainStep)
        step = kind(built, OPTIMIZERS[optimizer](), sparse_rows=rows, **options)
        evaluation = EvalStep(built, metrics=["accuracy"])
    data = data or InMemory(examples(), global_batch_size=BATCH, seed=1)
    test = InMemory(examples(40), global_batch_size=16, training=False)
    evaluator = Evaluator(evaluation, test, strategy=strategy)
    return Loop(step, data, strategy=strategy, evaluator=evaluator, **loop_options)


def trained(strategy, rows, steps=20, **options) -> list[np.ndarray]:
    loop = make(strategy, rows, **options)
    loop.train(steps)
    return loop.step.model.get_weights()


@functools.cache
def by_dense_gradients(optimizer: str, clip_norm: float | None = None) -> list[np.ndarray]:
    """The weights on one device, which neither micro-batches nor a loss scale change."""
    alone = tf.distribute.OneDeviceStrategy("/cpu:0")
    return trained(alone, "off", optimizer=optimizer, clip_norm=clip_norm)


def assert_close(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * np.abs(other).max())


@pytest.mark.parametrize(
    "optimizer, replicas, options",
    [
        ("sgd", 1, {}),
        ("sgd", 2, {"clip_norm": 0.1, "on_nan": "skip"}),
        ("adagrad", 2, {"accumulate_steps": 3}),
        ("adagrad", 1, {"loss_scale": True, "accumulate_steps": 2}),
        ("momentum", 1, {"accumulate_steps": 3, "clip_norm": 0.2}),
        ("momentum", 2, {"loss_scale": True}),
        ("rmsprop", 2, {}),
        ("adamw", 1, {"clip_norm": 0.2}),
        ("adamw", 2, {"accumulate_steps": 2, "on_nan": "skip"}),
    ],
)
def test_equals_dense_gradients(mirrored, optimizer, replicas, options):
    want = by_dense_gradients(optimizer, options.get("clip_norm"))
    assert_close(trained(mirrored(replicas), "on", optimizer=optimizer, **options), want)


@pytest.mark.slow
def test_equals_them_for_several_tables_on_shares_of_any_size(mirrored):
    want = tables_worker.trained(mirrored(1), "adamw", "off")
    assert_close(tables_worker.trained(mirrored(3), "adamw", "on"), want)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_lazily_rows_without_a_gradient_stay(mirrored, split):
    """On several replicas, the tables whole or split, as on one."""
    ids, labels = np.array([[0, 1, 2, 0, 1]] * 32, "int32"), np.arange(32) % CLASSES
    data = InMemory((ids, labels), global_batch_size=8, seed=1)
    found = []
    for replicas in (1, 2):
        plan = "sharded" if split and replicas > 1 else "replicated"
        loop = make(mirrored(replicas), "lazy", "adamw", data=data, embedding_plan=plan)
        before = loop.step.model.get_weights()[0]
        loop.train(10)
        assert not loop.step.tables.deferred
        found.append(loop.step.model.get_weights())
        moved = (found[-1][0] != before).any(axis=1)
        assert moved[: ids.max() + 1].all() and not moved[ids.max() + 1 :].any()
    assert_close(found[1], found[0])


@pytest.mark.slow
def test_a_resume_changes_no_bit(mirrored, tmp_path):
    def variables(loop):
        return [v.numpy() for group in loop.state.variables().values() for v in group]

    whole = make(mirrored(2))
    whole.train(20)
    first = make(mirrored(2), checkpoints=str(tmp_path))
    first.train(7)
    first.save()
    first.checkpoints.close()
    second = make(mirrored(2), checkpoints=str(tmp_path))
    second.restore()
    second.evaluate()
    second.train(20)
    for one, other in zip(variables(second), variables(whole), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_full_history_is_emptied_at_the_same_steps_in_any_run(mirrored, monkeypatch, tmp_path):
    monkeypatch.setattr(deferred, "HISTORY", 8)
    whole = make(mirrored(1), on_nan="skip")
    whole.train(20)
    weights = whole.step.model.get_weights()
    assert_close(weights, by_dense_gradients("adamw"))
    for steps_per_loop in (3, 50):
        options = {"checkpoints": str(tmp_path / f"{steps_per_loop}"), "on_nan": "skip"}
        for end in (5, 20):
            part = make(mirrored(1), steps_per_loop=steps_per_loop, **options)
            part.restore()
            part.train(end)
            part.save()
            part.checkpoints.close()
        for one, other in zip(part.step.model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_who_reads_a_table_finds_all_rows_up_to_date(mirrored, tmp_path):
    want = by_dense_gradients("adamw")
    loop = make(mirrored(1), checkpoints=str(tmp_path / "checkpoints"))
    loop.train(20)
    table = loop.step.model.get_layer("embedding").embeddings
    assert np.abs(table.value.numpy() - want[0]).max() > 1e-3  # what is deferred
    state = [v.numpy() for v in loop.step.state()["rows"]]
    loop.save()
    loop.checkpoints.wait()
    assert_close([table.numpy(), np.array(table), tf.identity(table).numpy()], want[:1] * 3)
    read = [table + 0.0, 1.0 * table, table[0:], abs(-table) * tf.sign(table), table**1]
    assert_close([value.numpy() for value in read], want[:1] * len(read))
    of_rows, of_width = tf.eye(ROWS), tf.eye(WIDTH)
    assert_close([(of_rows @ table).numpy(), (table @ of_width).numpy()], want[:1] * 2)
    assert_close(loop.step.model.get_weights(), want)
    saved = Reader(tmp_path / "checkpoints")
    assert_close([saved[name] for name in list(saved)[: len(want)]], want)
    dense = make(mirrored(1), "off")
    dense.step.model.set_weights(want)
    np.testing.assert_allclose(loop.evaluate()["loss"], dense.evaluate()["loss"], rtol=1e-5)
    keras_file, saved_model = export_model(loop.step.model, tmp_path / "export")
    assert_close(keras.models.load_model(keras_file).get_weights(), want)
    features = tf.constant(examples()[0][:4])
    loaded = tf.saved_model.load(str(saved_model))
    np.testing.assert_allclose(
        loaded.serve(features), dense.step.model(features), rtol=1e-4, atol=1e-5
    )
    for one, other in zip(loop.step.state()["rows"], state, strict=True):  # all of this only reads
        np.testing.assert_array_equal(one.numpy(), other)


def test_updates_of_workers_that_read_the_same_rows():
    """What Keras adds to a slot is added twice, as with a dense gradient. What it assigns is
    assigned: added twice, the mean of squares of RMSprop would become negative."""
    for kind, added in ((keras.optimizers.Adam(0.1), True), (keras.optimizers.RMSprop(0.1), False)):
        table = keras.Variable(np.ones([4, 2], "float32"))
        kind.build([table])
        numbers = tf.constant([1, 3])
        read = optimizers.read_rows(table, kind, numbers)
        gradient = tf.IndexedSlices(tf.fill([2, 2], 0.5), numbers)
        for _ in range(2):
            optimizers.update_rows(kind, table, gradient, *read, asynchronous=True)
        square = 2 * 0.001 * 0.25 if added else 0.1 * 0.25
        velocity = optimizers.slots_of(kind, table)[-1 if added else 0]
        assert_close([velocity.numpy()[numbers.numpy()]], [np.full([2, 2], square, "float32")])
        assert_close([table.numpy()[::2]], [np.ones([2, 2], "float32")])
        np.testing.assert_allclose(1.0 - table.numpy()[1], 2 * (0.1 if added else 0.316), rtol=0.01)


@pytest.mark.slow
def test_a_table_that_is_set_forgets_what_it_has_missed(mirrored):
    loop = make(mirrored(2))
    loop.train(10)
    weights = [np.full_like(w, 0.5) for w in loop.step.model.get_weights()]
    loop.step.model.set_weights(weights)
    assert_close(loop.step.model.get_weights(), weights)


@pytest.mark.slow
def test_runs_go_on_with_rows_after_dense_gradients_and_not_the_other_way(mirrored, tmp_path):
    dense = make(mirrored(1), "off", checkpoints=str(tmp_path))
    dense.train(7)
    dense.save()
    dense.checkpoints.close()
    rows = make(mirrored(1), "on", checkpoints=str(tmp_path))
    rows.restore()
    rows.train(20)
    assert_close(rows.step.model.get_weights(), by_dense_gradients("adamw"))
    rows.save()
    rows.checkpoints.close()
    with pytest.raises(CheckpointError, match="trained by rows: resume it with the same model"):
        make(mirrored(1), "off", checkpoints=str(tmp_path)).restore()


@pytest.mark.slow
def test_another_step_takes_the_model_over(mirrored):
    want = make(mirrored(1), "off")
    want.train(10)
    loop = make(mirrored(1))
    loop.train(10)
    model = loop.step.model
    with mirrored(1).scope():
        step = TrainStep(model, OPTIMIZERS["sgd"](), sparse_rows="off")
    Loop(
        step,
        InMemory(examples(), global_batch_size=BATCH, seed=1),
        strategy=mirrored(1),
    )
    table = model.get_layer("embedding").embeddings
    assert type(table) is keras.Variable
    assert_close([table.value.numpy()], want.step.model.get_weights()[:1])


class Tied(keras.Model):
    """The table is looked up, and is the last layer, too."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, WIDTH)

    def call(self, ids):
        mean = keras.ops.mean(self.table(ids), axis=1)
        return keras.ops.matmul(mean, keras.ops.transpose(self.table.embeddings))


def tied() -> keras.Model:
    model = Tied()
    model(np.zeros([1, IDS], "int32"))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}])
def test_a_table_that_is_not_only_looked_up(mirrored, options):
    options = {"model": tied, "steps": 8, **options}
    want = trained(mirrored(1), "off", **options)
    assert_close(trained(mirrored(2), "on", **options), want)


def test_ragged_ids_and_ids_from_the_end(mirrored):
    """Keras counts ids below 0 from the end."""
    layer = keras.layers.Embedding(ROWS, WIDTH)
    ragged = tf.ragged.constant([[1, 2, 2], [], [ROWS - 1]])
    want = [layer(ragged), layer(tf.constant([[-1, 4]])), layer(tf.constant([2.0]))]
    vars(layer)["call"] = sparse_rows._Lookup(layer)
    got = [layer(ragged), layer(tf.constant([[-1, 4]])), layer(tf.constant([2.0]))]
    assert got[0].to_list() == want[0].to_list()
    for one, other in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(one, other)


def of_words(kind: str) -> keras.Model:
    """A model of words, or of their ids padded with 0, each with a weight."""
    embedding, pool = keras.layers.Embedding(ROWS, WIDTH), keras.layers.GlobalAveragePooling1D()
    words, weights = keras.Input([IDS], dtype="string"), keras.Input([IDS])
    if kind == "hashing":
        found = pool(embedding(keras.layers.Hashing(ROWS)(words)))
    elif kind == "lookup":
        found = pool(embedding(keras.layers.StringLookup(vocabulary=WORDS)(words)))
    else:
        words = keras.Input([IDS], dtype="int32")
        embedding.mask_zero = kind == "padded"
        found = pool(embedding(words))  # of those that are no padding
        if kind == "weighted":
            found = keras.ops.einsum("nt,ntd->nd", weights, embedding(words))
        elif kind == "shared":
            found += pool(embedding(keras.ops.flip(words, 1)[:, :2]))
    inputs = [words, weights] if kind == "weighted" else words
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(found))


WORDS = [f"word {number}" for number in range(ROWS - 1)]


@pytest.mark.parametrize(
    "kind",
    [
        "lookup",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("hashing", "padded", "weighted", "shared")
        ),
    ],
)
def test_hashed_words_and_bags(mirrored, kind):
    random = np.random.default_rng(0)
    ids = random.integers(0, 9, (40, IDS)) * random.integers(0, 2, (40, IDS))
    words = np.array(WORDS)[ids] if kind in ("hashing", "lookup") else ids.astype("int32")
    features = words
    if kind == "weighted":
        features = words, random.uniform(size=ids.shape).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((features, random.integers(0, CLASSES, 40)))

    def weights(replicas, rows, plan):
        keras.utils.set_random_seed(1)
        with mirrored(replicas).scope():
            model = of_words(kind)
            step = TrainStep(model, OPTIMIZERS["adamw"](), sparse_rows=rows, embedding_plan=plan)
        loop = Loop(step, data.batch(8).repeat(), strategy=mirrored(replicas))
        assert len([*loop.step.tables]) == (rows == "on")
        loop.train(10)
        return model.get_weights()

    assert_close(weights(2, "on", "sharded"), weights(1, "off", "replicated"))


class Clips(TrainStep):
    def clip(self, gradients):
        return super().clip(gradients)


def constrained() -> keras.Model:
    model = embedding_model()
    model.layers[0]._embeddings.regularizer = keras.regularizers.L2(0.1)
    return model


@pytest.mark.parametrize(
    "options, words",
    [
        ({"ema_decay": 0.9}, "ema_decay averages all rows"),
        ({"log_norms": True}, "log_norms takes the norms of all rows"),
        ({"jit_compile": True}, "jit_compile is on"),
        ({"step_class": Clips}, r"Clips.clip\(\) may expect a dense gradient"),
        ({"model": constrained}, "its regularizer or constraint takes all rows"),
    ],
)
def test_says_why_a_table_is_dense(mirrored, monkeypatch, caplog, options, words):
    with pytest.raises(UsageError, match=f"embedding cannot be trained by rows, because {words}"):
        make(mirrored(1), "on", **options)
    monkeypatch.setattr(sparse_rows, "LEAST_BYTES", 1000)
    with caplog.at_level(python_logging.INFO):
        loop = make(mirrored(1), "auto", **options)
    assert not loop.step.tables.deferred
    assert any("4.7 KiB: dense, because" in line for line in caplog.messages)


def test_large_tables_are_by_rows_if_no_other_row_moves(mirrored, monkeypatch, caplog):
    def table(optimizer):
        step = make(mirrored(1), "auto", optimizer).step
        return step.model.layers[0].embeddings.value in step.tables

    assert not table("sgd")  # too small
    monkeypatch.setattr(sparse_rows, "LEAST_BYTES", 1000)
    with caplog.at_level(python_logging.INFO):
        assert table("sgd") and table("adagrad") and not table("adamw")
    assert "AdamW moves rows that have no gradient, which sparse_rows=on defers" in caplog.text


class Sequences(keras.Model):
    """An Embedding in another layer, and the same table for the outputs."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, WIDTH)
        self.each = keras.layers.TimeDistributed(self.table)
        self.head = keras.layers.Dense(CLASSES)

    def call(self, ids):
        mean = keras.ops.mean(self.each(ids[:, :, None]), axis=(1, 2))
        scores = keras.ops.matmul(mean, keras.ops.transpose(self.table.embeddings))
        return keras.ops.cast(self.head(keras.ops.tanh(scores)), "float32")


def sequences() -> keras.Model:
    model = Sequences()
    model(np.zeros([1, IDS], "int32"))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_where_keras_casts_by_itself(mirrored, optimizer):
    options = {"model": sequences, "steps": 6, "optimizer": optimizer}
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        want = trained(mirrored(1), "off", **options)
        got = trained(mirrored(1), "on", **options)
    finally:
        keras.config.set_dtype_policy("float32")
    for one, other in zip(got, want, strict=True):  # a step of bfloat16 is 2^-8
        np.testing.assert_allclose(one, other, atol=2e-2 * np.abs(other).max())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_call_with_other_weights_has_these(mirrored, optimizer):
    loop = make(mirrored(1), optimizer=optimizer)
    loop.train(3)
    model = loop.step.model
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    outputs, _ = model.stateless_call(zeros, [], tf.constant(examples()[0][:2]))
    np.testing.assert_array_equal(outputs, np.zeros([2, CLASSES]))


def test_an_evaluator_from_before_the_loop(mirrored):
    keras.utils.set_random_seed(1)
    with mirrored(1).scope():
        model = embedding_model()
        evaluation = EvalStep(model)
    test = InMemory(examples(40), global_batch_size=16, training=False)
    evaluator = Evaluator(evaluation, test, strategy=mirrored(1))
    evaluator.run()
    data = InMemory(examples(), global_batch_size=BATCH, seed=1)
    with mirrored(1).scope():
        step = TrainStep(model, OPTIMIZERS["momentum"](), sparse_rows="on")
    loop = Loop(step, data, strategy=mirrored(1), evaluator=evaluator)
    loop.train(20)
    dense = make(mirrored(1), "off", "momentum")
    dense.step.model.set_weights(model.get_weights())
    np.testing.assert_allclose(loop.evaluate()["loss"], dense.evaluate()["loss"], rtol=1e-6)


@pytest.mark.slow
def test_the_first_of_two_loops_of_a_model_is_refused(mirrored):
    loop = make(mirrored(1))
    loop.train(2)
    with mirrored(1).scope():
        step = TrainStep(loop.step.model, OPTIMIZERS["adamw"](), sparse_rows="on")
    later = Loop(step, loop.dataset, strategy=mirrored(1))
    later.train(2)
    with pytest.raises(UsageError, match="belongs to a step that was made later"):
        loop.train(4)


class Beside(TrainStep):
    """Trains a model that is an attribute, too."""

    def __init__(self, model, optimizer, **options):
        own = keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])
        super().__init__(own, [(optimizer, own), (OPTIMIZERS["momentum"](), model)], **options)
        self.other = model

    def loss(self, batch):
        ids, labels = batch
        outputs = self.other(ids, training=True)
        rest = tf.reduce_sum(self.model(tf.ones([1, 2])))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs) + rest


def test_a_table_of_a_model_that_is_an_attribute(mirrored, tmp_path):
    with mirrored(1).scope():
        model = embedding_model()
        step = Beside(model, OPTIMIZERS["sgd"](), sparse_rows="on")
    data = InMemory(examples(), global_batch_size=BATCH, seed=1)
    loop = Loop(step, data, strategy=mirrored(1), checkpoints=str(tmp_path))
    loop.train(10)
    loop.save(wait=True)
    saved = Reader(tmp_path)
    [name] = [name for name in saved if saved[name].shape == (ROWS, WIDTH) and name[:4] == "step"]
    assert_close([saved[name]], model.get_weights()[:1])


def test_a_resume_with_another_momentum_is_refused(mirrored, tmp_path):
    loop = make(mirrored(1), optimizer="momentum", checkpoints=str(tmp_path))
    loop.train(3)
    loop.save(wait=True)
    loop.checkpoints.close()
    other = make(mirrored(1), optimizer="momentum", checkpoints=str(tmp_path))
    other.step.optimizer.momentum = 0.5
    for table in other.step.tables.deferred:
        table._settings["momentum"] = 0.5
    with pytest.raises(CheckpointError, match=r"saved with SGD\(momentum=0.9\), which is 0.5 now"):
        other.restore()


class LeavesRows(TrainStep):
    """Its gradient of a table is rows, of which some occur twice."""

    def forward_backward(self, batch, count):
        with tf.GradientTape() as tape:
            loss, _ = self.forward(batch)
            loss /= count
        return loss, tape.gradient(loss, self.trainable_variables)


def test_rows_that_a_step_of_its_own_returns_become_dense(mirrored):
    got = trained(mirrored(1), "auto", optimizer="momentum", step_class=LeavesRows)
    assert_close(got, by_dense_gradients("momentum"))


class Whole(TrainStep):
    def __call__(self, batch):
        return super().__call__(batch)


def test_a_step_with_its_own_call_gets_dense_gradients(mirrored):
    with pytest.raises(UsageError, match=r"Whole.__call__\(\) may expect a dense gradient"):
        make(mirrored(1), "on", step_class=Whole)


@pytest.mark.slow
def test_trials_end_where_a_history_is_full(mirrored, monkeypatch):
    monkeypatch.setattr(deferred, "HISTORY", 4)
    loop = make(mirrored(2), optimizer="momentum")
    monkeypatch.setattr(trials, "candidates", lambda tensors: [0, 64])
    monkeypatch.setattr(trials, "_MOST_STEPS", 10)
    trials.tune_packs(loop)
    loop.train(6)
    want = trained(mirrored(1), "off", 6, optimizer="momentum")
    assert_close(loop.step.model.get_weights(), want)


def test_xla_that_is_chosen_later_is_refused(mirrored):
    loop = make(mirrored(1))
    loop.step.jit_compile = True
    with pytest.raises(UsageError, match="trained by rows, which XLA cannot compile"):
        loop.train(1)


def test_an_id_outside_of_the_table_is_named(mirrored):
    ids, labels = examples()
    ids[30, 2] = ROWS
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)
    with pytest.raises(UsageError, match=f"{ROWS}.* outside|{ROWS} is not in"):
        trained(mirrored(1), "on", data=data)


@pytest.mark.slow
def test_step_by_step_without_graphs(mirrored):
    want = trained(mirrored(1), "on", steps=3)
    loop = make(mirrored(2))
    loop.train(3, eager=True)
    assert_close(loop.step.model.get_weights(), want)


def test_the_plan_has_the_rows(mirrored):
    loop = make(mirrored(2), optimizer="adagrad")
    loop.train(1)
    plan = loop.plan()
    rows = [c for c in plan.collectives if "ctl_rows" in c.name]
    assert [c.shape for c in rows] == [(BATCH // 2 * IDS,), (BATCH // 2 * IDS, WIDTH)]
    assert not plan.lints


@pytest.mark.slow
def test_the_checks_of_a_step_hold(mirrored):
    def make_loop(strategy, checkpoints):
        return make(strategy, checkpoints=checkpoints)

    check_step(make_loop, replicas=[2], steps=3)
