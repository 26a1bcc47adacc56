"""TFDS datasets of numbers: which columns become a batch, and trainings on them by flags."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_tfds

from ctl.data import load_columns
from ctl.errors import UsageError

MINE = """
import keras
from keras import layers


def table():
    inputs = {name: keras.Input([], name=name) for name in ("a", "b")}
    joined = layers.Concatenate()([layers.Reshape([1])(x) for x in inputs.values()])
    return keras.Model(inputs, layers.Dense(1)(joined))


def signs():
    inputs = {"table/a": keras.Input([]), "bytes": keras.Input([3])}
    numbers = layers.Rescaling(1e-2)(inputs["bytes"])
    joined = layers.Concatenate()([layers.Reshape([1])(inputs["table/a"]), numbers])
    return keras.Model(inputs, layers.Dense(2)(joined))
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("table"))
    tiny_tfds.prepare(tiny_tfds.CtlTinyTable, directory)
    return directory


def columns(data_dir: str, features: str, labels: str, **options):
    names = features.split(","), labels.split(",")
    options = {"global_batch_size": 8, "data_dir": data_dir, **options}
    return load_columns("ctl_tiny_table", *names, **options)


def test_columns_are_arrays_and_dicts(data_dir):
    dataset = columns(data_dir, "table", "value")
    table, value = dataset.arrays
    np.testing.assert_allclose(table["a"] + table["b"], value, rtol=1e-6)
    assert value.shape == (90,) and dataset.info.num_classes is None
    features, signs = columns(data_dir, "table/b,bytes,kind", "signs", training=False).arrays
    assert set(features) == {"table/b", "bytes", "kind"}
    assert features["bytes"].dtype == np.int32  # not an image, which a step would scale
    assert features["bytes"].shape == (20, 3) and signs.dtype == np.bool_
    np.testing.assert_array_equal(signs[:, 1], features["table/b"] > 0)
    twice, both = columns(data_dir, "table,table/a,bytes", "kind,value", split="train[80:]").arrays
    np.testing.assert_array_equal(twice["table"]["a"], twice["table/a"])
    assert twice["bytes"].shape == (10, 3) and set(both) == {"kind", "value"}
    assert columns(data_dir, "bytes", "kind").info.num_classes == 7
    assert columns(data_dir, "bytes", "group").info.num_classes == 4


@pytest.mark.parametrize(
    ("features", "labels", "options", "says"),
    [
        ("tble", "value", {}, "has no feature 'tble'; it has .*table/a, table/b"),
        ("table/c", "value", {}, "has no feature 'table/c'"),
        ("note", "value", {}, "'note' is object of shape .*only numbers of one shape"),
        ("table", "words", {}, r"'words' is int64 of shape \(None,\)"),
        ("table", "value", {"split": "trian"}, "has no split 'trian'; it has"),
        ("table", "value", {"global_batch_size": 91}, "larger than the dataset"),
        ("table", "value", {"resident_limit_mib": 1e-4}, "over the limit of 0.0001 MiB"),
    ],
)
def test_columns_that_cannot_be_had(data_dir, features, labels, options, says):
    with pytest.raises(UsageError, match=says) as caught:
        columns(data_dir, features, labels, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mine")
    (directory / "mine.py").write_text(MINE)
    return [directory]


@pytest.mark.parametrize("task", ["regression", "several labels"])
def test_trains_and_evaluates_by_flags(zygote, path, data_dir, tmp_path, task):
    data = ["--dataset=ctl_tiny_table", f"--data_dir={data_dir}"]
    if task == "regression":
        data += ["--features=table", "--labels=value", "--loss=mean_squared_error"]
        model, metrics, best = "--model=mine:table", "mae", {"loss": 0.02, "mae": 0.1}
    else:
        data += ["--features=table/a,bytes", "--labels=signs", "--loss=binary_cross_entropy"]
        model, metrics, best = "--model=mine:signs", "accuracy,auc", {}
    run = ["--train_steps=100", "--learning_rate=0.1", "--noexport", "--notensorboard"]
    zygote.run(
        "ctl.train",
        *(f"--model_dir={tmp_path}", model, f"--metrics={metrics}", "--replicas=2", *data, *run),
        path=path,
    )
    command = zygote.run("ctl.evaluate", "--json", f"--model_dir={tmp_path}", model, path=path)
    found = json.loads(command.stdout)
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    for name in ("loss", *metrics.split(",")):
        assert found[name] == pytest.approx(last[name], rel=1e-5)
    assert all(found[name] < limit for name, limit in best.items())
    if not best:  # one of two labels can be told from the features
        assert found["accuracy"] > 0.6 and found["auc"] > 0.6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--features=table"], "--features and --labels belong together: give both"),
        (["--features=a", "--labels=b", "--dataset=synthetic"], "no effect with --dataset=synth"),
        (["--features=a", "--labels=b", "--image_shape=8,8,1"], "--image_shape has no effect"),
    ],
)
def test_flags_that_contradict(zygote_without_tensorflow, tmp_path, given, says):
    run = zygote_without_tensorflow.run("ctl.train", f"--model_dir={tmp_path}", *given, exit_code=2)
    assert says in run.stderr
