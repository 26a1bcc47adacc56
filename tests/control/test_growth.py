"""Embedding tables that get more rows between two starts of a training."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ctl.data import InMemory
from ctl.errors import CheckpointError
from ctl.loop import Loop
from ctl.step import TrainStep

ROWS, MORE, WIDTH, CLASSES = 20, 31, 4, 3


def make(strategy, rows, directory, **options) -> Loop:
    random = np.random.default_rng(0)
    arrays = random.integers(0, ROWS, (64, 5)).astype("int32"), random.integers(0, CLASSES, 64)
    keras.utils.set_random_seed(rows)
    with strategy.scope():
        layers = [keras.Input([5], dtype="int32"), keras.layers.Embedding(rows, WIDTH)]
        layers += [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        adamw = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        step = TrainStep(keras.Sequential(layers), options.pop("optimizer", adamw), **options)
    data = InMemory(arrays, global_batch_size=8, seed=1)
    return Loop(step, data, strategy=strategy, checkpoints=directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, options",
    [
        (1, {"sparse_rows": "off", "ema_decay": 0.9}),
        (1, {"sparse_rows": "on"}),
        (2, {"sparse_rows": "lazy"}),
        (2, {"sparse_rows": "on", "embedding_plan": "sharded"}),
    ],
)
def test_the_rows_that_were_there_go_on_as_they_would(mirrored, tmp_path, replicas, options):
    before = make(mirrored(replicas), ROWS, tmp_path, **options)
    before.train(10)
    before.save(wait=True)
    before.checkpoints.close()
    after = make(mirrored(replicas), MORE, tmp_path, **options)
    new = after.step.model.get_weights()[0][ROWS:]
    with pytest.raises(CheckpointError, match=rf"instead of .*\[{MORE}, {WIDTH}\] \(.* --extend"):
        after.restore()
    assert after.restore(grow=True).step == 10
    np.testing.assert_array_equal(after.step.model.get_weights()[0][ROWS:], new)
    for loop in (before, after):
        loop.train(20)
    tables = [loop.step.model.get_weights()[0] for loop in (before, after)]
    np.testing.assert_allclose(tables[1][:ROWS], tables[0], atol=1e-6)
    decayed = 1.0 if options["sparse_rows"] == "lazy" else (1 - 0.01 * 0.1) ** 10
    np.testing.assert_allclose(tables[1][ROWS:], new * decayed, rtol=1e-5)
    if "ema_decay" in options:
        averages = [loop.step.updater.ema[0].numpy() for loop in (before, after)]
        np.testing.assert_allclose(averages[1][:ROWS], averages[0], atol=1e-6)
    after.save(wait=True)
    after.checkpoints.close()
    with pytest.raises(CheckpointError, match=f"has {MORE} rows .* {ROWS} in the model"):
        make(mirrored(replicas), ROWS, tmp_path, **options).restore(grow=True)


@pytest.mark.slow
def test_slots_of_new_rows_begin_as_the_optimizer_makes_them(mirrored, tmp_path):
    """Those of Adagrad are not 0. The run goes on on more replicas, with tables that are split."""

    def slot(loop):
        found = [v.numpy() for v in loop.state.variables()["optimizer"]]
        return next(one for one in found if one.shape == loop.step.model.get_weights()[0].shape)

    few = make(mirrored(1), ROWS, tmp_path, optimizer="adagrad")
    few.train(10)
    few.save(wait=True)
    few.checkpoints.close()
    options = {"optimizer": "adagrad", "sparse_rows": "on", "embedding_plan": "sharded"}
    more = make(mirrored(2), MORE, tmp_path, **options)
    more.restore(grow=True)
    np.testing.assert_array_equal(slot(more)[:ROWS], slot(few))
    np.testing.assert_array_equal(slot(more)[ROWS:], np.float32(0.1))
    for loop in (few, more):
        loop.train(20)
    tables = [loop.step.model.get_weights()[0] for loop in (few, more)]
    np.testing.assert_allclose(tables[1][:ROWS], tables[0], atol=1e-6)
