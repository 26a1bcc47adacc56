"""Finds, prepares and reads TFDS datasets.

A dataset is downloaded only if it is not on disk. Its hosts are probed first, because TFDS itself
takes minutes to report a missing network.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import http.client
import importlib.resources
import pathlib
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from ctl.data.dataset import DatasetInfo, distribution_options
from ctl.data.records import ArrayRecords, BadRecord, Records, TFRecords
from ctl.data.sources import resized
from ctl.errors import UsageError

# A TFDS data_dir that comes with ctl. It is searched after the user's own.
EMBEDDED = pathlib.Path(str(importlib.resources.files("ctl") / "datasets"))

# Limit in seconds for the answers of all hosts together, including name resolution.
PROBE_SECONDS = 5.0

# Status codes for which the downloader retries for minutes.
_UNAVAILABLE = (500, 502, 503, 504)

# Examples that `Source.decoded` decodes together, to make the cost per element of a pipeline small.
_READ_BATCH = 256


def find(
    name: str, data_dir: str | None = None, *, download: bool = True
) -> tfds.core.DatasetBuilder:
    """Returns the builder of a prepared dataset; prepares the dataset if necessary.

    Looks in ``data_dir`` (default: that of TFDS), then in `EMBEDDED`, and then downloads into
    ``data_dir`` with the progress bar of TFDS.

    Raises:
        UsageError: there is no such dataset, or it cannot be opened, downloaded or prepared.
            Without a network, this takes less than 10 s.
    """
    root = str(pathlib.Path(data_dir).expanduser()) if data_dir else None
    builder = _builder(name, root)
    if builder and builder.is_prepared():
        return builder
    if name.split(":")[0] in _embedded_names():
        embedded = _builder(name, str(EMBEDDED))
        if embedded:
            return embedded
    if builder is None:
        raise UsageError(f"there is no dataset {name!r}{_similar(name)}")
    where = f"{builder.info.full_name} is not prepared at {builder.data_dir}"
    if not download:
        raise UsageError(f"{where}: allow the download or name another data_dir")
    if problem := _unreachable(builder.url_infos or ()):
        raise UsageError(
            f"{where}, and {problem}: prepare it where there is a network, and name that data_dir"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # this runs code of the dataset
        raise UsageError(f"{where}, and preparing it failed: {_line(error)}") from error
    return builder


def _builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder | None:
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        return None
    except Exception as error:  # bad names, versions, configs, files: AssertionError, ValueError, …
        where = f" in {data_dir}" if data_dir else ""
        raise UsageError(f"{name!r} cannot be opened{where}: {_line(error)}") from error


def _embedded_names() -> list[str]:
    return [path.parent.parent.name for path in EMBEDDED.glob("*/*/dataset_info.json")]


def _similar(name: str) -> str:
    known = tfds.list_builders(with_community_datasets=False) + _embedded_names()
    near = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(near)}" if near else ""


def _line(error: BaseException) -> str:
    """The class of an error, and at most 200 characters of the first line of its message."""
    # Names of graph nodes, and the prefix that TFDS adds.
    noise = r"\{\{.*?\}\}| \[Op:.*|Failed to construct dataset .*?\}\": "
    text = re.sub(noise, "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _unreachable(urls: Iterable[str]) -> str | None:
    """Describes a host of ``urls`` that cannot be reached; None if all answer in `PROBE_SECONDS`.

    Each host is asked once, in a daemon thread, because neither a name resolution nor a connection
    that yields one byte at a time has a time limit.
    """
    by_host = {urllib.parse.urlsplit(url).netloc: url for url in urls if url.startswith("http")}
    answers: dict[str, str] = {}

    def probe(host: str, url: str) -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
            answers[host] = ""
        except urllib.error.HTTPError as error:
            answers[host] = f"HTTP {error.code}" if error.code in _UNAVAILABLE else ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers[host] = str(getattr(error, "reason", error))

    threads = [threading.Thread(target=probe, args=item, daemon=True) for item in by_host.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PROBE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for host in by_host:
        if problem := answers.get(host, f"no answer within {PROBE_SECONDS:g} s"):
            return f"{host} cannot be reached ({problem})"
    return None


class Source:
    """One split of a prepared TFDS dataset of uint8 images and integer labels, in TFRecord or
    ArrayRecord; a `ctl.data.sources.Source`.

    Examples are numbered in the order of the files, shard after shard.
    """

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        split: str,
        image_shape: tuple[int, int, int] | None = None,
    ):
        """Opens a split.

        Args:
            builder: of a prepared dataset, see `find`.
            split: a TFDS split string such as ``train[:80%]``.
            image_shape: [H, W, C] to resize images to; needed where their sizes vary.

        Raises:
            UsageError: the split, its files, its features or ``image_shape`` are not suitable.
        """
        self._name = builder.info.full_name
        self._folder = pathlib.Path(builder.data_dir)
        self._image_key, self._label_key = _supervised_pair(builder)
        features = builder.info.features
        image, label = features[self._image_key], features[self._label_key]
        # Other features of the examples are neither parsed nor decoded.
        self._features = tfds.features.FeaturesDict(
            {self._image_key: image, self._label_key: label}
        )
        self._shards = _shards(builder, split)
        self._ends = np.cumsum([shard.take for shard in self._shards])
        self._image_shape = _image_shape(self._name, image.shape, image_shape)
        is_class = isinstance(label, tfds.features.ClassLabel)
        self.info = DatasetInfo(
            name=builder.name,
            version=str(builder.info.version),
            split=split,
            image_shape=self._image_shape,
            num_classes=label.num_classes if is_class else None,
            class_names=tuple(label.names or ()) if is_class else (),
        )
        self.is_sequential = builder.info.file_format.value == "tfrecord"

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded images and labels."""
        return len(self) * (int(np.prod(self._image_shape)) + 8)

    @functools.cached_property
    def _records(self) -> Records:
        """The records of the files, which have an index: to read them in any order."""
        kind = TFRecords if self.is_sequential else ArrayRecords
        expected = {shard.filename: shard.examples_in_shard for shard in self._shards}
        records = kind(list(expected))
        for path, count, wanted in zip(
            records.paths, records.counts(), expected.values(), strict=True
        ):
            if count != wanted:
                raise self._damaged(f"{path.name} has {count} records, not {wanted}")
        return records

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        """What to add to the number of an example of each shard, for its number in `_records`."""
        files = {str(path): number for number, path in enumerate(self._records.paths)}
        counts = self._records.counts()
        firsts = np.cumsum(counts) - counts
        parts = zip(self._shards, self._ends, strict=True)
        return np.array([firsts[files[s.filename]] + s.skip - (end - s.take) for s, end in parts])

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        return indices + self._offsets[np.searchsorted(self._ends, indices, side="right")]

    def read(self, indices: np.ndarray) -> list[bytes]:
        """Returns the serialized examples at ``indices``, int64 [n].

        Raises:
            BadRecord: one of them is damaged.
            UsageError: the first read finds that a file is not whole.
        """
        rows = self._rows(indices)
        try:
            return self._records.read(rows)
        except BadRecord as bad:
            raise BadRecord(int(indices[np.flatnonzero(rows == bad.index)[0]]), bad.what) from bad

    def where(self, index: int) -> str:
        """The shard of an example, and its record there."""
        return self._records.where(int(self._rows(np.array([index]))[0]))

    @tf.autograph.experimental.do_not_convert
    def decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (image uint8 [H, W, C], label int64 []) of one serialized example."""
        example = self._features.deserialize_example(record)
        image, label = example[self._image_key], tf.cast(example[self._label_key], tf.int64)
        return resized(image, self._image_shape), label

    def check(self) -> None:
        """Raises `UsageError` if the first example is damaged or has no label."""
        try:
            _, label = self.decode(tf.constant(self.read(np.zeros(1, np.int64))[0]))
        except BadRecord as bad:
            raise self._damaged(bad.what) from bad
        except tf.errors.OpError as error:
            raise self._damaged(f"{self.where(0)}: {_line(error)}") from error
        self._check_labels(int(label))

    def _check_labels(self, smallest: int) -> None:
        if smallest < 0:
            raise UsageError(f"{self._name}: the split {self.info.split!r} has no labels (-1)")

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all examples of files in TFRecord: images uint8 [N, H, W, C], labels int64 [N].

        They are read in the order of the files, which needs no index.

        Raises:
            UsageError: files end early or hold no labels.
            tf.errors.OpError: an example is damaged.
        """
        images = np.empty((len(self), *self._image_shape), np.uint8)
        labels = np.empty(len(self), np.int64)
        signature = (
            tf.TensorSpec(self._image_shape, tf.uint8),
            tf.TensorSpec((), tf.int64),
        )
        files = tf.constant([shard.filename for shard in self._shards])
        parts = tf.constant([(shard.skip, shard.take) for shard in self._shards], tf.int64)

        @tf.autograph.experimental.do_not_convert
        def records(file: tf.Tensor, part: tf.Tensor) -> tf.data.Dataset:
            return tf.data.TFRecordDataset(file, buffer_size=1 << 20).skip(part[0]).take(part[1])

        batches = (
            tf.data.Dataset.from_tensor_slices((files, parts))
            .flat_map(records)
            .batch(_READ_BATCH)
            .map(
                tf.autograph.experimental.do_not_convert(
                    lambda records: tf.map_fn(self.decode, records, fn_output_signature=signature)
                ),
                num_parallel_calls=tf.data.AUTOTUNE,
                deterministic=True,
            )
            .with_options(distribution_options())
        )
        end = 0
        for batch_images, batch_labels in batches.as_numpy_iterator():
            begin, end = end, end + len(batch_labels)
            images[begin:end], labels[begin:end] = batch_images, batch_labels
        if end != len(self):
            raise self._damaged(f"{end} of {len(self)} examples are left")
        self._check_labels(int(labels.min()))
        return images, labels

    def _damaged(self, what: str) -> UsageError:
        return UsageError(
            f"{self._name}: the files of the split {self.info.split!r} are damaged ({what}): "
            f"remove {self._folder} and prepare it again"
        )

    def content_hash(self) -> str:
        """Returns a sha256 of the names and sizes of the files and of TFDS's metadata."""
        content = hashlib.sha256()
        for shard in self._shards:
            path = pathlib.Path(shard.filename)
            content.update(
                f"{path.name} {path.stat().st_size} {shard.skip} {shard.take}\n".encode()
            )
        for name in ("dataset_info.json", "features.json"):
            content.update((self._folder / name).read_bytes())
        return content.hexdigest()


def _supervised_pair(builder: tfds.core.DatasetBuilder) -> tuple[str, str]:
    """The names of the features for the image and the label."""
    keys, features = builder.info.supervised_keys, builder.info.features
    name = builder.info.full_name
    if not keys or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        raise UsageError(
            f"{name} has no supervised pair of an image and a label; its features are "
            + ", ".join(f"{key} ({type(feature).__name__})" for key, feature in features.items())
        )
    image, label = (features[key] for key in keys)
    is_image = isinstance(image, tfds.features.Image) and image.np_dtype == np.uint8
    is_label = label.shape == () and np.issubdtype(label.np_dtype, np.integer)
    if not (is_image and is_label):
        raise UsageError(
            f"{name} pairs {keys[0]} ({type(image).__name__}) with {keys[1]} "
            f"({type(label).__name__}), not a uint8 image with an integer label"
        )
    return keys


def split_of(builder: tfds.core.DatasetBuilder, split: str) -> Any:
    """What TFDS says of ``split``. Raises `UsageError` if there is none."""
    info = builder.info
    try:
        return info.splits[split]
    except (ValueError, KeyError, AssertionError) as error:
        raise UsageError(
            f"{info.full_name} has no split {split!r}; it has {', '.join(info.splits)}, and parts "
            "of them such as train[:80%]"
        ) from error


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list[Any]:
    """The parts of files to read (``FileInstruction`` of TFDS), after a check of all file sizes."""
    info = builder.info
    shards = split_of(builder, split).file_instructions
    if not shards:
        raise UsageError(f"{info.full_name}: the split {split!r} has no examples")
    if info.file_format.value not in ("tfrecord", "array_record"):
        raise UsageError(
            f"{info.full_name} is stored as {info.file_format.value}: prepare it as tfrecord or "
            "array_record"
        )
    used = {shard.filename for shard in shards}
    for part in info.splits.values():
        paths = [pathlib.Path(path) for path in part.filepaths]
        if used.isdisjoint(map(str, paths)):
            continue
        if missing := [path for path in paths if not path.exists()]:
            raise UsageError(f"{info.full_name}: {missing[0]} is missing: prepare it again")
        if info.file_format.value != "tfrecord":  # may be compressed
            continue
        # A record has a length (8 bytes), two checksums (4 bytes each) and its data.
        expected = int(part.num_bytes) + 16 * part.num_examples
        if (size := sum(path.stat().st_size for path in paths)) < expected:
            raise UsageError(
                f"{info.full_name}: the files of the split {part.name!r} are truncated ({size} of "
                f"{expected} bytes): remove {builder.data_dir} and prepare it again"
            )
    return shards


def _image_shape(
    name: str, stored: tuple[Any, ...], wanted: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    """The shape of all images. ``stored`` is that of TFDS: int, or None where it varies."""
    if wanted is None:
        if None in stored:
            raise UsageError(
                f"the images of {name} vary in size {tuple(stored)}: give an image_shape to resize "
                "them to, such as 224,224,3"
            )
        return tuple(stored)
    if len(wanted) != 3 or min(wanted) < 1 or wanted[2] != stored[2]:
        raise UsageError(
            f"image_shape must be height, width and the {stored[2]} channels of {name}, not "
            f"{','.join(map(str, wanted))}"
        )
    return (*wanted,)
