"""Tensors by name, and models that start from them: what fits, what is said of what does not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.checkpoint import CheckpointManager, Reader, load_weights
from ctl.distributed.replicas import average_like
from ctl.errors import CheckpointError, UsageError
from ctl.phases.freezing import freeze


def make(classes: int = 3, head: str = "head") -> keras.Model:
    """Its normalization is numbered by Keras: a process makes several of them."""
    layers = [
        keras.Input([4]),
        keras.layers.Dense(5, name="body"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(classes, name=head),
    ]
    return keras.Sequential(layers, name="net")


class Twins(keras.Model):
    """A subclassed model: TensorFlow gives both kernels one name."""

    def __init__(self, classes: int):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(classes)
        self(np.zeros([1, 4]))

    def call(self, x):
        return self.second(self.first(x))


@pytest.fixture
def trained(tmp_path):
    """A model, as a checkpoint of step 7 and as a file."""
    model = make()
    for variable in model.weights:
        variable.assign(np.random.default_rng(len(variable.path)).random(variable.shape))
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(7, {"model": [v.value for v in model.variables]}, wait=True)
    model.save(tmp_path / "model.keras")
    return model, tmp_path


def test_a_reader_lists_and_reads(trained):
    model, path = trained
    reader = Reader(path)
    assert reader.saved.step == 7
    assert list(reader.tensors["model/net/head/kernel"][:2]) == [(5, 3), "float32"]
    assert len(reader) == len(model.variables)
    np.testing.assert_array_equal(reader["model/net/head/kernel"], model.layers[-1].kernel)
    for same in (path / "checkpoints", reader.saved.path):
        assert list(Reader(same)) == list(reader)
    with pytest.raises(UsageError, match="unknown tensor .*did you mean 'model/net/head/kernel'"):
        reader["model/net/head/kernl"]
    with pytest.raises(UsageError, match="holds no checkpoint: give a checkpoint, a directory of"):
        Reader(path / "model.keras")
    (reader.saved.path / "variables.data-00000-of-00001").write_bytes(b"damaged")
    with pytest.raises(
        CheckpointError, match="step-0000000007 is damaged: .*; restore it from a backup"
    ):
        Reader(reader.saved.path)
    with pytest.raises(CheckpointError, match="No intact checkpoint in .*step 7: .*; restore it"):
        Reader(path)


@pytest.mark.parametrize("source", ["", "model.keras"])
def test_weights_are_found_in_spite_of_keras_numbers(trained, source):
    model, path = trained
    other = make()
    assert other.layers[1].name != model.layers[1].name
    given = load_weights(other, path / source)
    assert len(given) == 8 and repr(given) == "<8 weights were read>"
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("source", ["", "model.keras"])
def test_a_new_head(trained, source):
    model, path = trained
    other = make(classes=7)
    before = other.layers[-1].get_weights()
    with pytest.raises(
        UsageError,
        match=r"do not fit the model: net/head/kernel is float32\[5, 3\] instead of float32\[5, 7\]"
        r"; net/head/bias is .*; use the model .*give reinit=",
    ):
        load_weights(other, path / source)
    assert not np.array_equal(other.layers[0].kernel, model.layers[0].kernel), "it assigned some"
    given = load_weights(other, path / source, reinit=["head"])
    kept = "2 are as before: net/head/kernel; net/head/bias"
    assert repr(given) == f"<6 weights were read; {kept}>"
    np.testing.assert_array_equal(other.layers[0].kernel, model.layers[0].kernel)
    for ours, old in zip(other.layers[-1].get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, old)


def test_what_does_not_fit_is_named(trained):
    _, path = trained
    with pytest.raises(
        UsageError, match=r"net/top/kernel float32\[5, 3\] is missing; .*and 1 more"
    ):
        load_weights(make(head="top"), path)
    with pytest.raises(UsageError, match="unknown layer of reinit 'haed': did you mean 'head'"):
        load_weights(make(), path, reinit=["haed"])
    (path / "no.keras").write_text("no model")
    with pytest.raises(UsageError, match="no.keras is not a Keras model that can be loaded"):
        load_weights(make(), path / "no.keras")


def test_weights_with_one_name_are_read_in_their_order(tmp_path):
    model, same, other = Twins(3), Twins(3), Twins(5)
    names = [v.value.name for v in model.weights]
    assert len(set(names)) < len(names)
    averages = [average_like(v) for v in model.weights]
    for average in averages:
        average.assign(tf.fill(average.shape, 2.0))
    with CheckpointManager(tmp_path) as manager:
        state = {"model": [v.value for v in model.variables], "ema": averages}
        manager.save(1, state, wait=True)
    load_weights(same, tmp_path)
    assert all((v.numpy() == 2.0).all() for v in same.weights), "the averages are what is read"
    load_weights(other, tmp_path, reinit=[other.second.name])
    assert (other.first.kernel.numpy() == 2.0).all()
    assert not (other.second.kernel.numpy() == 2.0).any()


def test_freezing_by_pattern():
    model = make()
    paths = freeze(model, ["bo*", model.layers[1].name])
    assert [v.path for v in model.trainable_variables] == ["net/head/kernel", "net/head/bias"]
    assert len(paths) == 6  # with the statistics
    with pytest.raises(UsageError, match="unknown layer of --freeze 'bdy': did you mean 'body'"):
        freeze(make(), ["bdy"])
    with pytest.raises(UsageError, match=r"--freeze=\* leaves no weight to train"):
        freeze(make(), ["*"])
