"""Weights of others: what fits is found where it is, and what may be meant twice is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.checkpoint import CheckpointManager, Reader, load_weights
from ctl.errors import CheckpointError, UsageError


def fill(model: keras.Model, seed: int = 0) -> keras.Model:
    random = np.random.default_rng(seed)
    for variable in model.weights:
        variable.assign(random.random(variable.shape))
    return model


def make(classes: int = 3, seed: int = 0) -> keras.Model:
    """Its normalization is numbered by Keras: a process makes several of them."""
    layers = [
        keras.Input([4]),
        keras.layers.Dense(5, name="body"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(classes, name="head"),
    ]
    return fill(keras.Sequential(layers, name="net"), seed)


class Twins(keras.Model):
    """A subclassed model: TensorFlow gives both kernels one name. They have one shape."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.second = keras.layers.Dense(4)
        self.first = keras.layers.Dense(4)
        self(np.zeros([1, 4]))
        fill(self, seed)

    def call(self, x):
        return self.second(self.first(x))


def assert_equal(model: keras.Model, other: keras.Model) -> None:
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def checkpoint(path, model):
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    return tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(path / "ck"))


def root(path, model):
    return tf.train.Checkpoint(model).write(str(path / "ck"))


def deep(path, model):
    """As Orbit's: the model is an attribute of the trainer. The directory is given."""
    trainer = tf.train.Checkpoint(net=model, step=tf.Variable(7))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(trainer=trainer), path, 3)
    manager.save()
    return path


def beside_another(path, model):
    """Two objects fit, and one is the model."""
    average = make(seed=9) if isinstance(model, keras.Sequential) else Twins(seed=9)
    return tf.train.Checkpoint(average=average, model=model).write(str(path / "ck"))


def saved_model(path, model):
    tf.saved_model.save(model, str(path))
    return path


def weights_h5(path, model):
    model.save_weights(path / "own.weights.h5")
    return path / "own.weights.h5"


@pytest.mark.parametrize("kind", [make, Twins])
@pytest.mark.parametrize("write", [checkpoint, root, deep, beside_another, saved_model, weights_h5])
def test_weights_of_others_are_found(write, kind, tmp_path):
    model, other = kind(seed=1), kind(seed=2)
    path = write(tmp_path, model)
    assert len(load_weights(other, path)) == len(other.weights)
    assert_equal(other, model)


def test_an_export_by_keras(tmp_path):
    model, other = make(seed=1), make(seed=2)
    assert other.layers[1].name != model.layers[1].name
    model.export(tmp_path, verbose=False)
    load_weights(other, tmp_path)
    assert_equal(other, model)


@pytest.mark.parametrize("write", [checkpoint, weights_h5])
def test_a_new_head(write, tmp_path):
    model, other, before = make(seed=1), make(7, seed=2), make(7, seed=2)
    path = write(tmp_path, model)
    with pytest.raises(UsageError, match=r"do not fit the model: .*give reinit=.'LAYER'."):
        load_weights(other, path)
    assert_equal(other, before)
    load_weights(other, path, reinit=["head"])
    np.testing.assert_array_equal(other.layers[0].kernel, model.layers[0].kernel)
    np.testing.assert_array_equal(other.layers[-1].kernel, before.layers[-1].kernel)


def test_names_of_tensorflow_1(tmp_path, caplog):
    """With slots, and without an order."""
    names = {"body/kernel": [4, 5], "body/bias": [5], "head/kernel": [5, 3], "head/bias": [3]}
    norm = dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), [5])
    names |= {f"batch_normalization/{n}": shape for n, shape in norm.items()}
    random = np.random.default_rng(0)
    values = {n: random.random(shape).astype("float32") for n, shape in names.items()}
    slots = {"head/kernel/Adam": values["head/kernel"], "global_step": np.int64(7)}
    tensors = [*(values | slots).items()]
    prefix = str(tmp_path / "model.ckpt-7")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[n for n, _ in tensors],
        shape_and_slices=[""] * len(tensors),
        tensors=[v for _, v in tensors],
    )
    model = make()
    load_weights(model, prefix)
    for variable in model.weights:
        layer, name = variable.path.split("/")[-2:]
        layer = layer.rstrip("_0123456789") if layer.startswith("batch") else layer
        np.testing.assert_array_equal(variable, values[f"{layer}/{name}"])
    assert "weights that are not used: global_step" in caplog.text
    reader = Reader(prefix)
    assert reader.saved is None
    np.testing.assert_array_equal(reader["head/kernel"], values["head/kernel"])
    assert reader.tensors["head/kernel"][:3] == ((5, 3), "float32", "head")


def test_what_may_be_meant_twice_is_refused(tmp_path):
    path = tf.train.Checkpoint(one=Twins(1), other=Twins(2)).write(str(tmp_path / "ck"))
    with pytest.raises(UsageError, match="several objects that fit the model: one, other; read"):
        load_weights(Twins(), path)
    kernel, bias = np.zeros([4, 4], "float32"), np.zeros([4], "float32")
    layers = [
        tf.train.Checkpoint(k=tf.Variable(kernel, name="a/kernel"), b=tf.Variable(bias, name="a/b"))
        for _ in range(2)
    ]
    path = tf.train.Checkpoint(x=layers[0], y=layers[1]).write(str(tmp_path / "other"))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4, name="a")])
    with pytest.raises(UsageError, match="a/bias .* is missing"):
        load_weights(model, path)


def test_damaged_files_are_refused(tmp_path):
    path = checkpoint(tmp_path, make())
    for name in ("ck.index", "ck.data-00000-of-00001"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="ck (cannot be read|is damaged): "):
            load_weights(make(), path)
        (tmp_path / name).write_bytes(content)


def test_tensorflow_reads_a_checkpoint_of_ctl(tmp_path):
    """As the page says."""
    model, other = make(seed=1), make(seed=2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, {"model": [v.value for v in model.variables]}, wait=True)
        prefix = manager.latest().prefix
    status = tf.train.Checkpoint(model=[v.value for v in other.variables]).read(str(prefix))
    status.assert_existing_objects_matched()
    assert_equal(other, model)
