"""Finds, prepares and reads TFDS datasets.

A dataset is downloaded only if it is not on disk. Its hosts are probed first, because TFDS itself
takes minutes to report a missing network.
"""

from __future__ import annotations

import difflib
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
from ctl.errors import UsageError

# A TFDS data_dir that comes with ctl. It is searched after the user's own.
EMBEDDED = pathlib.Path(str(importlib.resources.files("ctl") / "datasets"))

# Limit in seconds for the answers of all hosts together, including name resolution.
PROBE_SECONDS = 5.0

# Status codes for which the downloader retries for minutes.
_UNAVAILABLE = (500, 502, 503, 504)

# Examples that `Source.read` decodes together, to make the cost per element of a pipeline small.
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
    """One split of a prepared TFDS dataset of uint8 images and integer labels.

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
        self.num_examples = sum(shard.take for shard in self._shards)
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
        self._resize = self._image_shape != tuple(image.shape)

    @property
    def num_shards(self) -> int:
        """Number of files that the split uses."""
        return len(self._shards)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded images and labels."""
        return self.num_examples * (int(np.prod(self._image_shape)) + 8)

    def records(self, shards: tf.Tensor | None = None, cycle_length: int = 1) -> tf.data.Dataset:
        """Returns serialized examples (scalar strings), which are cheap to shuffle and to skip.

        Args:
            shards: order of the shards, int64 [num_shards]; by default that of the files.
            cycle_length: number of shards read at the same time; their records are interleaved in a
                fixed order.
        """
        files = tf.constant([shard.filename for shard in self._shards])
        skips = tf.constant([shard.skip for shard in self._shards], tf.int64)
        takes = tf.constant([shard.take for shard in self._shards], tf.int64)

        @tf.autograph.experimental.do_not_convert
        def read(shard: tf.Tensor) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(files[shard], buffer_size=1 << 20)
            return records.skip(skips[shard]).take(takes[shard])

        order = tf.data.Dataset.from_tensor_slices(
            tf.range(self.num_shards, dtype=tf.int64) if shards is None else shards
        )
        if cycle_length == 1:
            return order.flat_map(read)
        return order.interleave(
            read,
            cycle_length=cycle_length,
            block_length=16,
            num_parallel_calls=cycle_length,
            deterministic=True,
        )

    @tf.autograph.experimental.do_not_convert
    def decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (image uint8 [H, W, C], label int64 []) of one serialized example."""
        example = self._features.deserialize_example(record)
        image, label = example[self._image_key], tf.cast(example[self._label_key], tf.int64)
        if self._resize:
            image = tf.image.resize(image, self._image_shape[:2], antialias=True)
            image = tf.saturate_cast(tf.round(image), tf.uint8)
        return tf.ensure_shape(image, self._image_shape), label

    def read(self, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first ``count`` or all examples: images uint8 [N, H, W, C], labels int64 [N].

        Raises:
            UsageError: the files are damaged or hold no labels.
        """
        count = self.num_examples if count is None else count
        images = np.empty((count, *self._image_shape), np.uint8)
        labels = np.empty(count, np.int64)
        signature = (
            tf.TensorSpec(self._image_shape, tf.uint8),
            tf.TensorSpec((), tf.int64),
        )
        batches = (
            self.records()
            .take(count)
            .batch(_READ_BATCH)
            .map(
                lambda records: tf.map_fn(self.decode, records, fn_output_signature=signature),
                num_parallel_calls=tf.data.AUTOTUNE,
                deterministic=True,
            )
            .with_options(distribution_options())
        )
        end = 0
        try:
            for batch_images, batch_labels in batches.as_numpy_iterator():
                begin, end = end, end + len(batch_labels)
                images[begin:end], labels[begin:end] = batch_images, batch_labels
        except tf.errors.OpError as error:
            raise self._damaged(_line(error)) from error
        if end != count:
            raise self._damaged(f"{end} of {count} examples are left")
        if labels.min() < 0:
            raise UsageError(f"{self._name}: the split {self.info.split!r} has no labels (-1)")
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
    keys, features, name = (
        builder.info.supervised_keys,
        builder.info.features,
        builder.info.full_name,
    )
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


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list[Any]:
    """The parts of files to read (``FileInstruction`` of TFDS), after a check of all file sizes."""
    info = builder.info
    try:
        shards = info.splits[split].file_instructions
    except (ValueError, KeyError, AssertionError) as error:
        raise UsageError(
            f"{info.full_name} has no split {split!r}; it has {', '.join(info.splits)}, and parts "
            "of them such as train[:80%]"
        ) from error
    if not shards:
        raise UsageError(f"{info.full_name}: the split {split!r} has no examples")
    if info.file_format.value != "tfrecord":
        raise UsageError(
            f"{info.full_name} is stored as {info.file_format.value}: prepare it as tfrecord"
        )
    used = {shard.filename for shard in shards}
    for part in info.splits.values():
        paths = [pathlib.Path(path) for path in part.filepaths]
        if used.isdisjoint(map(str, paths)):
            continue
        if missing := [path for path in paths if not path.exists()]:
            raise UsageError(f"{info.full_name}: {missing[0]} is missing: prepare it again")
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
