"""Builds the embedded dataset from the full Fashion-MNIST, byte for byte the same every time.

    python -m ctl.data.datasets.fashion_mnist_mini.build --source_data_dir=DATA_DIR --out=DIR

``DATA_DIR`` is a TFDS data_dir that contains ``fashion_mnist/3.0.1``. The dataset is written to
``DIR/fashion_mnist_mini/1.0.0`` and compared with ``SHA256SUMS``, which lists the files of the
committed copy beside this file.

The PNG bytes are copied, not encoded again, so the result does not depend on an image library.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds
from absl import app, flags

PER_CLASS = {"train": 1_000, "test": 200}
CHECKSUMS = pathlib.Path(__file__).with_name("SHA256SUMS")
LICENSE = pathlib.Path(__file__).with_name("LICENSE")

_SOURCE = flags.DEFINE_string("source_data_dir", None, "TFDS data_dir with the full Fashion-MNIST")
_OUT = flags.DEFINE_string("out", None, "TFDS data_dir to write to")


class FashionMnistMini(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The first 1,000 training and 200 test images of every class, in the order of the full dataset
    as TFDS prepares it.

    ``source_data_dir`` contains the full dataset; None for the default of TFDS.
    """

    # Recorded in dataset_info.json, so it must not depend on whether this file is imported or run.
    __module__ = "ctl.data.datasets.fashion_mnist_mini.build"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, source_data_dir: str | None, **kwargs: Any):
        self._source = tfds.builder("fashion_mnist:3.0.1", data_dir=source_data_dir)
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="10,000 training and 2,000 test images of Fashion-MNIST, class-balanced: "
            "the first of each class in the order of the full set.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(
                        names=self._source.info.features["label"].names
                    ),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            license=LICENSE.read_text(encoding="utf-8"),
            citation=self._source.info.citation,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in PER_CLASS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        examples = self._source.as_dataset(
            split=split,
            decoders={"image": tfds.decode.SkipDecoding()},
            read_config=tfds.ReadConfig(interleave_cycle_length=1),
        )
        taken: Counter[int] = Counter()
        for index, example in enumerate(examples.as_numpy_iterator()):
            label = int(example["label"])
            if taken[label] < PER_CLASS[split]:
                taken[label] += 1
                yield index, {"image": example["image"], "label": label}


def _sort_features(path: pathlib.Path) -> None:
    """Rewrites the examples of a file with their features in alphabetical order."""
    # Features are a protobuf map, which TFDS serializes in an order that differs between processes.
    examples = [
        tf.train.Example.FromString(record)
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    ]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            writer.write(example.SerializeToString(deterministic=True))


def checksums(folder: pathlib.Path) -> str:
    """The checksums of the files in ``folder``, in the format of ``sha256sum``, sorted by name."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {folder.name}/{path.name}\n"
        for path in sorted(folder.iterdir())
    )


def main(argv: list[str]) -> int:
    """Builds the dataset and prints its checksums. Returns 0 if they match, else 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    builder = FashionMnistMini(source_data_dir=_SOURCE.value, data_dir=_OUT.value)
    builder.download_and_prepare()
    folder = pathlib.Path(builder.data_dir)
    for path in folder.glob("*.tfrecord-*"):
        _sort_features(path)
    sums = checksums(folder)
    print(sums, end="")
    same = sums == CHECKSUMS.read_text()
    print("identical to" if same else "DIFFERS from", CHECKSUMS)
    return 0 if same else 1


if __name__ == "__main__":
    flags.mark_flags_as_required(["source_data_dir", "out"])
    app.run(main)
