"""ctl.jobs.build: weights of classes that are counted."""

from __future__ import annotations

import json
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import Augmented, InMemory
from ctl.data.dataset import DatasetInfo
from ctl.errors import UsageError
from ctl.jobs.build import class_weights, open_files

LABELS = np.array([0, 0, 0, 0, 0, 0, 2, 2])


def prepared(train, found=None):
    return types.SimpleNamespace(train=train, found=found or {})


def flags(*class_weight: str):
    return types.SimpleNamespace(class_weight=[*class_weight])


def in_memory(labels: np.ndarray = LABELS) -> InMemory:
    images = np.zeros([len(labels), 4, 4, 1], np.uint8)
    return InMemory((images, labels), global_batch_size=4)


def test_each_class_has_the_same_sum():
    """As ``class_weight="balanced"`` of scikit-learn."""
    wanted = {0: 8 / (2 * 6), 2: 8 / (2 * 2)}
    assert class_weights(flags("balanced"), prepared(in_memory())) == wanted
    augmented = Augmented(in_memory(), "flip")
    assert class_weights(flags("balanced"), prepared(augmented)) == wanted
    found = {"examples": {"": [6, 0, 2]}}  # of a stream, too
    stream = types.SimpleNamespace(info=in_memory().info)
    assert class_weights(flags("balanced"), prepared(stream, found)) == wanted
    assert class_weights(flags("1:5"), prepared(in_memory())) == {1: 5.0}


def test_classes_have_names(caplog):
    caplog.set_level("INFO")
    info = DatasetInfo("table", class_names=("no", "yes", "1:2"))
    train = prepared(types.SimpleNamespace(info=info))
    assert class_weights(flags("yes:5", "2:0.5"), train) == {1: 5.0, 2: 0.5}
    assert class_weights(flags("1:2:3"), train) == {2: 3.0}
    grades = DatasetInfo("wine", class_names=("3", "4", "5"))
    weights = class_weights(flags("3:7", "1:2"), prepared(types.SimpleNamespace(info=grades)))
    assert weights == {0: 7.0, 1: 2.0}
    assert "class weights: 3: 7, 4: 2" in caplog.text
    with pytest.raises(UsageError, match="'churn': the choices are no, yes, 1:2 .or their numbers"):
        class_weights(flags("churn:2"), train)
    with pytest.raises(UsageError, match="^--class_weight names class 1 twice, also as yes"):
        class_weights(flags("1:5", "yes:2"), train)
    with pytest.raises(UsageError, match="^--class_weight=churn:2: the classes .* have no names"):
        class_weights(flags("churn:2"), prepared(in_memory()))


@pytest.mark.parametrize("labels", [LABELS > 0, (LABELS > 0)[:, None].astype(np.float32)])
def test_labels_of_0_and_1_are_classes(labels):
    weights = class_weights(flags("balanced"), prepared(in_memory(labels)))
    assert weights == {0: 8 / (2 * 6), 1: 8 / (2 * 2)}


@pytest.mark.parametrize(
    "labels", [LABELS.astype(np.float32), np.eye(3, dtype=np.int64)[LABELS], LABELS - 1]
)
def test_labels_that_are_no_classes_cannot_be_counted(labels):
    with pytest.raises(UsageError, match="^--class_weight=balanced counts classes, integers"):
        class_weights(flags("balanced"), prepared(in_memory(labels)))
    with pytest.raises(UsageError, match="raise --resident_limit_mib, or give weights such as 0:1"):
        stream = types.SimpleNamespace(info=in_memory().info)
        class_weights(flags("balanced"), prepared(stream))


def of_run(folder, loss: str, table: str, data: dict[str, Any]) -> Any:
    """Flags of a run in ``folder`` that found ``data`` when it began."""
    (folder / "config.json").write_text(json.dumps({"schema": 1, "flags": {}} | data))
    (folder / "t.csv").write_text(table)
    given = {"image_shape": None, "features": None, "labels": None, "record_schema": None}
    return types.SimpleNamespace(
        **given,
        model_dir=str(folder),
        dataset=str(folder / "t.csv"),
        data_cache=None,
        loss=loss,
        missing=None,
    )


@pytest.mark.parametrize("before", [None, ["age"], ["Unnamed: 0", "age"], [3], 3])
def test_a_run_that_was_trained_on_an_index_goes_on_with_it(tmp_path, before):
    data = {} if before is None else {"data": {"features": before}}
    table = "Unnamed: 0,age,y\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(20))
    wanted = ("Unnamed: 0", "age") if before == ["Unnamed: 0", "age"] else ("age",)
    flags = of_run(tmp_path, "cross_entropy", table, data)
    assert open_files(flags).schema["features"] == wanted


@pytest.mark.parametrize("before", [None, [], ["3", "7"]])
def test_a_run_whose_numbers_were_classes_goes_on_with_them(tmp_path, before):
    data = {} if before is None else {"data": {"classes": before}}
    table = "age,y\n" + "".join(f"{i},{3 + 4 * (i % 2)}\n" for i in range(20))
    flags = of_run(tmp_path, "package.module:loss", table, data)
    assert open_files(flags).schema["classes"] == tuple(before or ())


@pytest.mark.parametrize("before", [None, [8, 8, 1], [8, "8", 1], [8]])
def test_a_run_goes_on_with_images_of_its_shape(tmp_path, before):
    flags = of_run(tmp_path, "cross_entropy", "", {"data": {"image_shape": before}})
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        image = tf.io.encode_png(np.zeros([4, 4, 3], np.uint8)).numpy()
        (tmp_path / "images" / name / "1.png").write_bytes(image)
    flags.dataset = str(tmp_path / "images")
    assert open_files(flags).schema["image_shape"] == (
        (8, 8, 1) if before == [8, 8, 1] else (4, 4, 3)
    )
