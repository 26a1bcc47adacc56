"""Several models in checkpoints, exports and files: each is found by its name."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.base.models import Models, split
from ctl.checkpoint import CheckpointManager, load_weights
from ctl.checkpoint.export import KERAS_FILE, SAVED_MODEL, export_model, found_beside, load_model
from ctl.errors import UsageError


def dense(*widths: int) -> keras.Model:
    layers = [keras.layers.Dense(width) for width in widths[1:]]
    return keras.Sequential([keras.Input([widths[0]]), *layers])


def make(seed: int = 0) -> Models:
    """Two of one shape, so that one may be taken for the other, and a third."""
    models = Models({"q2": dense(3, 2), "q1": dense(3, 2), "policy": dense(3, 4, 2)})
    random = np.random.default_rng(seed)
    models.set_weights([random.normal(size=w.shape) for w in models.get_weights()])
    return models


def equal(one: keras.Model, other: keras.Model) -> bool:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def as_checkpoint(models: Models, path) -> None:
    """With averages of twice the weights."""
    averages = [tf.Variable(2 * v.numpy(), name=v.value.name[:-2]) for v in models.variables]
    state = {"model": [v.value for v in models.variables], "ema": averages}
    with CheckpointManager(path / "checkpoints") as manager:
        manager.save(1, split(models, state, dict.fromkeys(state, models.variables)), wait=True)
    models.set_weights([2 * w for w in models.get_weights()])


def as_export(models: Models, path) -> None:
    ctl.checkpoint.export_model(models, str(path))


def of_tensorflow(models: Models, path) -> None:
    tf.train.Checkpoint(**dict(models.items())).save(str(path / "ckpt"))


WRITERS = [as_checkpoint, as_export, of_tensorflow]


@pytest.mark.parametrize("write", WRITERS)
def test_each_gets_the_weights_of_its_name(tmp_path, write):
    source, models = make(), make(seed=1)
    write(source, tmp_path / "run")
    given = load_weights(models, tmp_path / "run")
    assert equal(models, source)
    assert {name.split("/")[0] for name in given} == {"policy", "q1", "q2"}
    assert len(given) == len(models.weights)


@pytest.mark.parametrize("write", WRITERS)
def test_one_is_read_by_its_name(tmp_path, write):
    source, model = make(), dense(3, 2)
    write(source, tmp_path / "run")
    with pytest.raises(UsageError, match=r"several|holds the models policy, q1, q2: choose one"):
        load_weights(model, tmp_path / "run")
    for name in ("q1", "q2"):
        load_weights(model, tmp_path / "run", name=name)
        assert equal(model, source[name])


def test_some_start_from_paths_of_their_own(tmp_path):
    models, before, source = make(), make(), make(seed=1)
    as_checkpoint(source, tmp_path)
    source["policy"].save(tmp_path / "policy.keras")
    given = load_weights(models, {"policy": tmp_path / "policy.keras", "q2": tmp_path})
    assert f"; {len(models['q1'].weights)} are as before: q1/" in repr(given)
    assert [name for name in models if equal(models[name], before[name])] == ["q1"]
    assert equal(models["policy"], source["policy"]) and equal(models["q2"], source["q2"])
    with pytest.raises(UsageError, match="unknown model to load"):
        load_weights(models, {"actor": tmp_path})


def test_parts_that_start_anew(tmp_path):
    models, before, source = make(), make(), make(seed=1)
    as_checkpoint(source, tmp_path)
    head = models["policy"].layers[-1].name
    load_weights(models, tmp_path, reinit=["q1", head])
    assert equal(models["q1"], before["q1"]) and equal(models["q2"], source["q2"])
    kernels = [one["policy"].layers[-1].kernel for one in (models, before)]
    np.testing.assert_array_equal(*kernels)


def test_all_or_none_are_assigned(tmp_path):
    models, before, source = make(), make(), make(seed=1)
    source = Models({**dict(source.items()), "q2": dense(3, 5)})
    as_checkpoint(source, tmp_path)
    with pytest.raises(UsageError, match="do not fit the model"):
        load_weights(models, tmp_path)
    assert equal(models, before)


def test_a_file_of_one_model_is_not_for_all(tmp_path):
    dense(3, 2).save(tmp_path / "one.keras")
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, {"model": dense(3, 2).variables}, wait=True)
    for path in (tmp_path / "one.keras", tmp_path):
        with pytest.raises(UsageError, match=f"^{path} holds one model, and there are policy, q1"):
            load_weights(make(), path)
    with pytest.raises(UsageError, match="are one path, not a dict"):
        load_weights(dense(3, 2), {"q1": tmp_path})


def test_an_export_has_a_directory_for_each(tmp_path):
    models, features = make(), np.ones([5, 3], np.float32)
    written = export_model(models, tmp_path / "export", found={"columns": 3})
    names = [str(path.relative_to(tmp_path / "export")) for path in written]
    each = [f"{name}/{file}" for name in models for file in (KERAS_FILE, SAVED_MODEL)]
    assert names == [*each, "training_data.json"] and all(path.exists() for path in written)
    loaded = load_model(tmp_path / "export", "model")
    assert list(loaded) == list(models) and equal(loaded, models)
    assert found_beside(tmp_path / "export") == {"columns": 3}
    for name, one in models.items():
        saved = tf.saved_model.load(str(tmp_path / "export" / name / SAVED_MODEL))
        np.testing.assert_allclose(saved.serve(features), one(features), rtol=1e-5)


def test_a_run_beside_its_export_is_read_from_its_checkpoints(tmp_path):
    """It holds one model; its export stands in a directory, too."""
    model, source = dense(3, 2), dense(3, 2)
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, {"model": source.variables}, wait=True)
    export_model(model, tmp_path / "export")
    load_weights(model, tmp_path)
    assert equal(model, source)


def test_a_shared_layer_is_saved_with_each():
    trunk = keras.layers.Dense(4)
    inputs = keras.Input([3])
    features = trunk(inputs)
    heads = {name: keras.layers.Dense(1)(features) for name in ("actor", "critic")}
    models = Models({name: keras.Model(inputs, head) for name, head in heads.items()})
    state = split(models, {"model": [*models.variables]}, {"model": models.variables})
    assert len(models.variables) == 6
    assert [len(group) for group in state.values()] == [4, 4]
    assert all(any(v is trunk.kernel for v in group) for group in state.values())
