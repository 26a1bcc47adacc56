"""Sources of other libraries, which `Items` reads: Hugging Face `datasets`, and Grain."""

from __future__ import annotations

import numpy as np
import pytest

from ctl.data import Streaming
from ctl.data.sources import Items
from ctl.errors import UsageError

COUNT = 20


def batches(source, **options) -> list:
    stream = Streaming(source, global_batch_size=8, training=False, **options)
    return [batch for _, batch in stream.batches().as_numpy_iterator()]


def test_a_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    columns = {"x": [[n, n + 0.5] for n in range(COUNT)], "text": [f"é{n}" for n in range(COUNT)]}
    data = datasets.Dataset.from_dict(columns | {"label": [n % 3 for n in range(COUNT)]})

    def example(item):
        return {"x": np.float32(item["x"]), "text": item["text"]}, item["label"]

    found = batches(Items(data, example, name="hub"))
    features = np.concatenate([features["x"] for features, _ in found])
    np.testing.assert_array_equal(features, np.float32(columns["x"]))
    assert [t.decode() for f, _ in found for t in f["text"]] == columns["text"]
    assert [int(label) for _, labels in found for label in labels] == [n % 3 for n in range(COUNT)]
    formatted = data.select_columns(["x", "label"]).with_format("numpy")
    (first, *_) = batches(Items(formatted))
    np.testing.assert_array_equal(first["x"], np.array(columns["x"][:8]))
    with pytest.raises(UsageError, match="hub, example 0: KeyError"):
        batches(Items(data, lambda item: item["none"], name="hub"))


def test_a_dataset_of_grain():
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    data = grain.MapDataset.range(COUNT).map(lambda n: (np.float32([n, n + 0.5]), n % 3))
    found = batches(Items(data, name="grain"))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in found])[:, 0], np.arange(COUNT))
    shuffled = data.shuffle(seed=1)
    assert {*np.concatenate([x for x, _ in batches(Items(shuffled))])[:, 0]} == {*range(COUNT)}
