"""DLRM: against NumPy, on several replicas, over a resume; AUC and log loss against all pairs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import Files
from ctl.data.datasets import clicks
from ctl.errors import UsageError
from ctl.jobs import models
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.phases.losses import binary_cross_entropy
from ctl.phases.metrics import from_name
from ctl.step import TrainStep

SIZES = {"embedding_dim": 4, "bottom_units": (8,), "top_units": (8,)}
ROWS = tuple(range(3, 29))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("clicks") / "train.txt"
    clicks.write(path, 0, 3000)
    return Files(path, loss_of="binary")


def small(rows=(50,)):
    keras.utils.set_random_seed(1)
    return models.make_model("dlrm", None, None, sizes={"table_rows": rows, **SIZES})


def in_numpy(model, dense, ids):
    """The logits of ``model`` as the paper computes them."""

    def mlp(x, name):
        layers = [layer for layer in model.layers if layer.name.startswith(name)]
        for kernel, bias in (layer.get_weights() for layer in layers):
            x = np.maximum(x @ kernel + bias, 0)
        return x

    x = mlp(np.log(np.maximum(dense, 0) + 1), "bottom_")
    vectors = [x]
    for column in range(26):
        (table,) = model.get_layer(f"table_{column + 1}").get_weights()
        vectors.append(table[ids[:, column] % len(table)])
    products = [(vectors[i] * vectors[j]).sum(axis=1) for i in range(27) for j in range(i)]
    y = mlp(np.concatenate([x, np.stack(products, axis=1)], axis=1), "top_")
    kernel, bias = model.get_layer("logits").get_weights()
    return y @ kernel + bias


def test_logits_are_those_of_the_paper(tmp_path):
    model = small(ROWS)
    random = np.random.default_rng(0)
    dense = np.float32(random.integers(-3, 1000, [9, 13]))
    ids = random.integers(0, 1 << 32, [9, 26])
    wanted = in_numpy(model, dense, ids)
    found = model({"dense": dense, "ids": ids})
    assert found.shape == (9, 1) and found.dtype == tf.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6)
    model.save(tmp_path / "dlrm.keras")
    loaded = keras.models.load_model(tmp_path / "dlrm.keras")
    np.testing.assert_array_equal(loaded({"dense": dense, "ids": ids}), found)


def test_sizes():
    """Tables, the layers of both networks, and 351 pairs of 27 vectors."""
    bottom = 14 * 8 + 9 * 4
    top = (4 + 351 + 1) * 8 + 9
    assert small(ROWS).count_params() == 4 * sum(ROWS) + bottom + top
    assert small().count_params() == 4 * 26 * 50 + bottom + top
    table = small().get_layer("table_1").get_weights()[0]
    assert 0.9 * 50**-0.5 < np.abs(table).max() <= 50**-0.5
    with pytest.raises(UsageError, match="table_rows has 2 numbers: give one for all tables, or"):
        small((5, 6))


@pytest.fixture
def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_logits_are_float32_under_a_mixed_policy(mixed):
    """And large numbers lose no digits before their logarithm is taken."""
    model = small()
    assert model.get_layer("top_0").compute_dtype == "bfloat16"
    assert {variable.dtype for variable in model.variables} == {"float32"}
    dense, ids = np.full([2, 13], 999_999, np.float32), np.full([2, 26], (1 << 32) - 1)
    assert model({"dense": dense, "ids": ids}).dtype == tf.float32
    (logs,) = [node.output for node in model.operations if type(node).__name__ == "Log1p"]
    found = keras.Model(model.inputs, logs)([dense, ids])
    np.testing.assert_allclose(found, np.log1p(dense), rtol=1e-6)


def make_loop(files, strategy, directory=None):
    train = files.load("train[:90%]", global_batch_size=60, training=True)
    with strategy.scope():
        step = TrainStep(small(), keras.optimizers.Adagrad(0.05), binary_cross_entropy)
    checkpoints = directory and CheckpointManager(directory, fingerprint=train.fingerprint())
    return Loop(step, train, strategy=strategy, checkpoints=checkpoints or None)


def weights(loop):
    return [weight.numpy() for weight in loop.step.model.weights]


@pytest.mark.slow
def test_two_replicas_equal_one_and_a_resume_changes_no_bit(files, mirrored, tmp_path):
    whole = make_loop(files, mirrored(1), tmp_path)
    whole.train(7)
    whole.save(wait=True)
    whole.train(12)
    whole.checkpoints.close()
    two = make_loop(files, mirrored(2))
    two.train(12)
    for found, wanted in zip(weights(two), weights(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    second = make_loop(files, mirrored(1), tmp_path)
    assert second.restore().step == 7
    second.train(12)
    second.checkpoints.close()
    for found, wanted in zip(weights(second), weights(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_auc_and_log_loss_are_those_of_all_examples(files, mirrored, replicas):
    """The last of 7 batches has 30 examples. Keras counts the AUC at 200 thresholds."""
    held = files.load("train[:13%]", global_batch_size=60, training=False)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = small()
        step = EvalStep(model, binary_cross_entropy, [from_name("auc", True)])
    results = Evaluator(step, held, strategy=strategy).run()
    features, labels = held.arrays
    logits = in_numpy(model, **features)[:, 0].astype(np.float64)
    losses = np.log1p(np.exp(-np.where(labels > 0, logits, -logits)))
    assert len(labels) == 390
    assert results["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert results["auc"] == pytest.approx(clicks.auc(labels > 0, logits), abs=5e-3)


def test_data_that_are_no_clicks():
    with pytest.raises(UsageError, match="do not say the shape of their images"):
        models.make_model("dense", None, 1)
