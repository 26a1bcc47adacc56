"""Small TFDS builders for the tests: registered with TFDS under their class names in snake case."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds


class _Tiny(tfds.core.GeneratorBasedBuilder):
    """50 training and 7 validation examples of 5 classes; every byte of an image is its number."""

    VERSION = tfds.core.Version("1.0.0")
    SHAPE: tuple[int | None, int | None, int] = (4, 6, 3)
    SUPERVISED = ("image", "label")
    LABEL = tfds.features.ClassLabel(names=["a", "b", "c", "d", "e"])

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=self.SHAPE, encoding_format="png"),
                    "label": self.LABEL,
                    "note": tfds.features.Text(),
                }
            ),
            supervised_keys=self.SUPERVISED,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(50), "validation": self._generate_examples(7)}

    def _size(self, number: int) -> tuple[int, int]:
        return self.SHAPE[:2]

    def _generate_examples(self, count: int):
        for number in range(count):
            image = np.full((*self._size(number), self.SHAPE[2]), number, np.uint8)
            yield number, {"image": image, "label": number % 5, "note": "not needed"}


class CtlTinyColor(_Tiny):
    pass


class CtlTinySizes(_Tiny):
    SHAPE = (None, None, 1)

    def _size(self, number: int) -> tuple[int, int]:
        return 3 + number % 4, 5 + number % 3


class CtlTinyNoPair(_Tiny):
    SUPERVISED = None


class CtlTinyText(_Tiny):
    SUPERVISED = ("note", "label")


class CtlTinyUnlabelled(_Tiny):
    LABEL = tfds.features.Scalar(np.int64)

    def _generate_examples(self, count: int):
        for key, example in super()._generate_examples(count):
            yield key, {**example, "label": -1}


class CtlTinyDownload(_Tiny):
    """Its test sets ``url_infos``, so that it comes from a server of the test."""

    url_infos: dict[str, None] = {}

    def _split_generators(self, dl_manager):
        dl_manager.download(list(self.url_infos)[0])
        return super()._split_generators(dl_manager)


class CtlTinyTable(tfds.core.GeneratorBasedBuilder):
    """Numbers of several kinds: 90 rows to train on and 20 to test, in which ``value`` is the sum
    of the table, and ``signs`` says which of its columns are positive."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "table": {"a": np.float32, "b": np.float32},
                    "bytes": tfds.features.Tensor(shape=(3,), dtype=np.uint8),
                    "signs": tfds.features.Tensor(shape=(2,), dtype=np.bool_),
                    "value": np.float32,
                    "group": np.int64,
                    "kind": tfds.features.ClassLabel(num_classes=7),
                    "words": tfds.features.Sequence(np.int64),
                    "note": tfds.features.Text(),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(90), "test": self._generate_examples(20)}

    def _generate_examples(self, count: int):
        table = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)
        for number, (a, b) in enumerate(table):
            yield (
                number,
                {
                    "table": {"a": a, "b": b},
                    "bytes": np.full([3], number, np.uint8),
                    "signs": [a > 0, b > 0],
                    "value": a + b,
                    "group": number % 4,
                    "kind": number % 5,
                    "words": list(range(number % 3)),
                    "note": "",
                },
            )


def prepare(builder: type[tfds.core.GeneratorBasedBuilder], data_dir: str, shards: int = 1) -> None:
    builder(data_dir=data_dir).download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=shards)
    )


def rewrite(file: pathlib.Path, change: Callable[[tf.train.Example], None]) -> None:
    """Writes the records of ``file`` again, with valid checksums, after ``change`` of all but the
    first, which is read as a check."""
    records = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(file))]
    with tf.io.TFRecordWriter(str(file)) as writer:
        for number, record in enumerate(records):
            if number:
                change(record)
            writer.write(record.SerializeToString())
