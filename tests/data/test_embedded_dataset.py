from __future__ import annotations

import numpy as np
import pytest

from ctl import data
from ctl.data.datasets.fashion_mnist_mini import build
from ctl.data.tfds_source import EMBEDDED

FOLDER = EMBEDDED / "fashion_mnist_mini"


def test_files_are_those_that_were_built():
    assert build.checksums(FOLDER / "1.0.0") == build.CHECKSUMS.read_text()


def test_licence_travels_with_the_data():
    licence = (FOLDER / "LICENSE").read_text(encoding="utf-8")
    assert "2017" in licence and "Zalando SE" in licence
    assert (FOLDER / "1.0.0/LICENSE").read_text(encoding="utf-8").strip() == licence.strip()


@pytest.mark.parametrize(("training", "per_class"), [(True, 1_000), (False, 200)])
def test_classes_are_balanced(training, per_class):
    dataset = data.load(global_batch_size=64, training=training)
    images, labels = dataset.arrays
    assert images.shape == (10 * per_class, 28, 28, 1) and images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [per_class] * 10
    assert dataset.info.version == "1.0.0" and dataset.info.class_names[9] == "Ankle boot"
    # Images of a class differ: no example was written twice.
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)
