"""TFDS datasets of numbers: which columns become a batch, and trainings on them by flags."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import tensorflow as tf
import tiny_tfds

from ctl.data import Streaming, load_columns
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


def test_streamed_columns_are_those_in_memory(tmp_path):
    """Of both kinds of files, with parts that are dicts and bytes; a damaged row is named."""
    for kind in ("tfrecord", "array_record"):
        tiny_tfds.CtlTinyTable(data_dir=tmp_path / kind, file_format=kind).download_and_prepare()
        chosen = str(tmp_path / kind), "table,bytes", "signs,kind"
        arrays = columns(*chosen).arrays
        streamed = columns(*chosen, resident_limit_mib=0, shuffle_block=2)
        assert isinstance(streamed, Streaming) and streamed.block == 2
        assert streamed.description.endswith(
            "table, bytes, streamed: 0.0 MiB are over the limit of 0 MiB"
        )
        for keys, batch in streamed.batches(9).take(4).as_numpy_iterator():
            wanted = tf.nest.map_structure(lambda a, rows=keys[:, 1]: a[rows], arrays)
            same = functools.partial(np.testing.assert_array_equal, strict=True)  # types, too
            tf.nest.map_structure(same, batch, wanted)
    (file,) = (tmp_path / "tfrecord").glob("**/*train*")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match="record 89: corrupted record: .*checksum") as caught:
        columns(str(tmp_path / "tfrecord"), "table", "value")
    assert "\n" not in str(caught.value)
    skipped = columns(str(tmp_path / "tfrecord"), "table", "value", on_bad_record="skip").arrays
    assert skipped[1][89] == skipped[1][0]


@pytest.mark.parametrize(
    ("features", "labels", "options", "says"),
    [
        ("tble", "value", {}, "has no feature 'tble'; it has .*table/a, table/b"),
        ("table/c", "value", {}, "has no feature 'table/c'"),
        ("note", "value", {}, "'note' is object of shape .*only numbers of one shape"),
        ("table", "words", {}, r"'words' is int64 of shape \(None,\)"),
        ("table", "value", {"split": "trian"}, "has no split 'trian'; it has"),
        ("table", "value", {"global_batch_size": 91}, "larger than the dataset"),
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
        data += ["--resident_limit_mib=0", "--replicas=2"]
        data += ["--features=table", "--labels=value", "--loss=mean_squared_error"]
        model, metrics, best = "--model=mine:table", "mae", {"loss": 0.02, "mae": 0.1}
    else:
        data += ["--features=table/a,bytes", "--labels=signs", "--loss=binary_cross_entropy"]
        model, metrics, best = "--model=mine:signs", "accuracy,auc", {}
    run = ["--train_steps=100", "--learning_rate=0.1", "--noexport", "--notensorboard"]
    run += ["--jit_compile=off"]
    zygote.run(
        "ctl.train",
        *(f"--model_dir={tmp_path}", model, f"--metrics={metrics}", *data, *run),
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
