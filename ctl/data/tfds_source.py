"""Datasets of TFDS: finds and prepares them, and reads images with a class, or columns of numbers.

A dataset is downloaded only if it is not on disk. Its hosts are probed first, because TFDS itself
takes minutes to report a missing network.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import http.client
import importlib.resources
import math
import os
import pathlib
import re
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from ctl.base.names import HOLD_OUT
from ctl.base.remote import AnyPath, PathLike, StorePath, located, map_of
from ctl.data.dataset import DatasetInfo, distribution_options
from ctl.data.index import readable
from ctl.data.records import ArrayRecords, BadRecord, TFRecords
from ctl.data.sources import resized
from ctl.errors import UsageError

# A TFDS data_dir that comes with ctl. It is searched after the user's own.
EMBEDDED = pathlib.Path(str(importlib.resources.files("ctl") / "data/datasets"))

# Limit in seconds for the answers of all hosts together, including name resolution.
PROBE_SECONDS = 5.0

_READ_BATCH = 256  # examples that `ImageSource.in_order` decodes together

# Where the files are of datasets in a store, by their builders.
_FOLDERS: weakref.WeakKeyDictionary[Any, StorePath] = weakref.WeakKeyDictionary()

# The end of the names of files with examples.
_SHARD = re.compile(r"-\d{5}-of-\d{5}")

# Status codes for which the downloader retries for minutes.
_UNAVAILABLE = (500, 502, 503, 504)


def find(
    name: str, data_dir: PathLike | None = None, *, download: bool = True
) -> tfds.core.DatasetBuilder:
    """Returns the builder of a prepared dataset; prepares the dataset if necessary.

    Looks in ``data_dir`` (default: that of TFDS), then in `EMBEDDED`, and then downloads into
    ``data_dir`` with the progress bar of TFDS. In a ``data_dir`` of a store, the dataset must be
    prepared, and no other place is looked in.

    Raises:
        UsageError: there is no such dataset, or it cannot be opened, downloaded or prepared.
            Without a network, this takes less than 10 s.
    """
    given = data_dir or os.environ.get("TFDS_DATA_DIR")
    place = located(given) if given else None
    short = name.split(":")[0]
    if isinstance(place, StorePath):
        return _of_store(name, place)
    root = str(place) if place else None
    embedded = _builder(name, str(EMBEDDED)) if short in _embedded() else None
    own = pathlib.Path(root or "~/tensorflow_datasets").expanduser() / short
    if embedded and not own.exists():
        return embedded
    builder = _builder(name, root)
    if builder and builder.is_prepared():
        return builder
    if embedded:
        return embedded
    if builder is None:
        raise UsageError(f"there is no dataset {name!r}{_similar(name)}")
    where = f"{builder.info.full_name} is not prepared at {builder.data_dir}"
    if not download:
        raise UsageError(
            f"{where}: allow the download, which --dry_run and --precompile never do, or name "
            "another data_dir"
        )
    if problem := _unreachable(builder.url_infos or ()):
        raise UsageError(
            f"{where}, and {problem}: prepare it where there is a network, and name that data_dir"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # this runs code of the dataset
        raise UsageError(f"{where}, and preparing it failed: {one_line(error)}") from error
    return builder


def _builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder | None:
    try:
        if data_dir == str(EMBEDDED) and name in _embedded():
            # `tfds.builder` looks for code of that name first, in hundreds of modules.
            return tfds.builder_from_directory(_embedded()[name])
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        return None
    except Exception as error:  # bad names, versions, configs, files: AssertionError, ValueError, …
        where = f" in {data_dir}" if data_dir else ""
        raise UsageError(f"{name!r} cannot be opened{where}: {one_line(error)}") from error


def _of_store(name: str, place: StorePath) -> tfds.core.DatasetBuilder:
    """The builder of a dataset in a store: of a copy of all its files but those with examples."""
    folder = place / re.split("[/:]", name)[0]
    with tempfile.TemporaryDirectory() as copies:
        with readable(place):
            found = [*folder.rglob("*")] if folder.is_dir() else []
            about = [path for path in found if path.is_file() and not _SHARD.search(path.name)]
            contents = map_of(place)(lambda path: path.read_bytes(), about)
            for path, content in zip(about, contents, strict=True):
                copy = pathlib.Path(copies) / path.relative_to(place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(content)
        builder = _builder(name, copies) if about else None
        if builder is None or not pathlib.Path(builder.data_dir, "dataset_info.json").is_file():
            raise UsageError(
                f"{place} has no dataset {name!r}: prepare it on a disk, and copy its folder there"
            )
        _FOLDERS[builder] = place / os.path.relpath(builder.data_dir, copies)
    return builder


def _folder(builder: tfds.core.DatasetBuilder) -> AnyPath:
    """Where the files of a dataset are."""
    return _FOLDERS.get(builder) or pathlib.Path(builder.data_dir)


def _embedded() -> dict[str, pathlib.Path]:
    """The directories of the embedded datasets, by name."""
    return {path.parents[1].name: path.parent for path in EMBEDDED.glob("*/*/dataset_info.json")}


def _similar(name: str) -> str:
    known = [*tfds.list_builders(with_community_datasets=False), *_embedded()]
    near = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(near)}" if near else ""


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


def one_line(error: BaseException) -> str:
    """The class of an error, and at most 200 characters of the first line of its message."""
    # Names of graph nodes, and the prefix that TFDS adds.
    noise = r"\{\{.*?\}\}| \[Op:.*|Failed to construct dataset .*?\}\": "
    text = re.sub(noise, "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class Split:
    """The serialized examples of one split of a prepared dataset, in TFRecord or ArrayRecord. A
    subclass decodes them; it is a `ctl.data.sources.Source`.

    Examples are numbered in the order of the files, shard after shard.

    Attributes:
        name: of the dataset, with its config and version.
        split: as TFDS writes it.
        shards: the parts of files to read, ``FileInstruction`` of TFDS.
        is_sequential: whether the files are in TFRecord, and can be read by TensorFlow in their
            order, without an index.
    """

    def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
        """Opens a split of a dataset, see `find`.

        Raises:
            UsageError: there is no such split, or its files are missing, cut short or of a kind
                that is not read.
        """
        self.name = builder.info.full_name
        self.split = split
        self.shards = _shards(builder, split)
        self._folder = _folder(builder)
        self._is_tfrecord = builder.info.file_format.value == "tfrecord"
        self.is_sequential = self._is_tfrecord and isinstance(self._folder, pathlib.Path)
        self._ends = np.cumsum([shard.take for shard in self.shards])

    @property
    def description(self) -> str:
        """One line for the log."""
        return f"{self.name} {self.split}, {len(self)} examples"

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def _records(self) -> TFRecords | ArrayRecords:
        """The records of the files, which have an index: to read them in any order."""
        expected = {shard.filename: shard.examples_in_shard for shard in self.shards}
        kind = TFRecords if self._is_tfrecord else ArrayRecords
        records = kind([self._folder / os.path.basename(name) for name in expected])
        for path, count, wanted in zip(
            records.paths, records.counts(), expected.values(), strict=True
        ):
            if count != wanted:
                raise self.damaged(f"{path.name} has {count} records, not {wanted}")
        return records

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        """What to add to the number of an example of each shard, for its number in `_records`."""
        files = {path.name: number for number, path in enumerate(self._records.paths)}
        begins = self._records.begins
        parts = zip(self.shards, self._ends, strict=True)
        return np.array(
            [
                begins[files[os.path.basename(s.filename)]] + s.skip - (end - s.take)
                for s, end in parts
            ]
        )

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

    def decode(self, record: tf.Tensor) -> Any:
        """The example of a serialized one, a scalar string; see `ctl.data.sources.Source`."""
        raise NotImplementedError

    def first(self) -> Any:
        """Returns the first example. Raises `UsageError` if it is damaged."""
        try:
            return self.decode(tf.constant(self.read(np.zeros(1, np.int64))[0]))
        except BadRecord as bad:
            raise self.damaged(bad.what) from bad
        except tf.errors.OpError as error:
            raise self.damaged(f"{self.where(0)}: {one_line(error)}") from error

    def check(self) -> None:
        """Raises `UsageError` if the first example is damaged."""
        self.first()

    def damaged(self, what: str) -> UsageError:
        """The error for files that are not what they should be."""
        return UsageError(
            f"{self.name}: the files of the split {self.split!r} are damaged ({what}): "
            f"remove {self._folder} and prepare it again"
        )

    @property
    def paths(self) -> list[AnyPath]:
        """The files of the split."""
        return [self._folder / os.path.basename(shard.filename) for shard in self.shards]

    def content_hash(self) -> str:
        """Returns a sha256 of the names and sizes of the files and of TFDS's metadata."""
        content = hashlib.sha256()
        for shard, path in zip(self.shards, self.paths, strict=True):
            content.update(
                f"{path.name} {path.stat().st_size} {shard.skip} {shard.take}\n".encode()
            )
        for name in ("dataset_info.json", "features.json"):
            content.update((self._folder / name).read_bytes())
        return content.hexdigest()


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list[Any]:
    """The parts of files to read (``FileInstruction`` of TFDS), after a check of all file sizes."""
    info = builder.info
    try:
        found = info.splits[split]
    except (ValueError, KeyError, AssertionError) as error:
        raise UsageError(
            f"{info.full_name} has no split {split!r}; it has {', '.join(info.splits)}, and parts "
            f"of them: to hold out a fifth, give {HOLD_OUT}"
        ) from error
    shards = found.file_instructions
    if not shards:
        raise UsageError(f"{info.full_name}: the split {split!r} has no examples")
    if info.file_format.value not in ("tfrecord", "array_record"):
        raise UsageError(
            f"{info.full_name} is stored as {info.file_format.value}: prepare it as tfrecord or "
            "array_record"
        )
    folder = _folder(builder)
    used = {shard.filename for shard in shards}
    for part in info.splits.values():
        if used.isdisjoint(map(str, part.filepaths)):
            continue
        paths = [folder / os.path.basename(path) for path in part.filepaths]
        for path in paths:
            with readable(path):
                path.stat()
        if info.file_format.value != "tfrecord":  # may be compressed
            continue
        # A record has a length (8 bytes), two checksums (4 bytes each) and its data.
        expected = int(part.num_bytes) + 16 * part.num_examples
        if (size := sum(path.stat().st_size for path in paths)) < expected:
            raise UsageError(
                f"{info.full_name}: the files of the split {part.name!r} are truncated ({size} of "
                f"{expected} bytes): remove {folder} and prepare it again"
            )
    return shards


class ImageSource(Split):
    """One split of a prepared TFDS dataset of uint8 images and integer labels."""

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
        super().__init__(builder, split)
        self._image_key, self._label_key = _supervised_pair(builder)
        features = builder.info.features
        image, label = features[self._image_key], features[self._label_key]
        # Other features of the examples are neither parsed nor decoded.
        self._features = tfds.features.FeaturesDict(
            {self._image_key: image, self._label_key: label}
        )
        self._image_shape = _image_shape(self.name, image.shape, image_shape)
        is_class = isinstance(label, tfds.features.ClassLabel)
        self.info = DatasetInfo(
            name=builder.name,
            version=str(builder.info.version),
            split=split,
            image_shape=self._image_shape,
            num_classes=label.num_classes if is_class else None,
            class_names=tuple(label.names or ()) if is_class else (),
        )

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded images and labels."""
        return len(self) * (int(np.prod(self._image_shape)) + 8)

    def decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (image uint8 [H, W, C], label int64 []) of one serialized example."""
        example = self._features.deserialize_example(record)
        image, label = example[self._image_key], tf.cast(example[self._label_key], tf.int64)
        return resized(image, self._image_shape), label

    def check(self) -> None:
        """Raises `UsageError` if the first example is damaged or has no label."""
        _, label = self.first()
        self.check_labels(label.numpy())

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all examples of files in TFRecord: images uint8 [N, H, W, C], labels int64 [N].

        TensorFlow reads the files one after the other, without an index, in two thirds of the time
        of `ctl.data.load.read_all`. It does not say which example is damaged.

        Raises:
            UsageError: files end early.
            tf.errors.OpError: an example is damaged.
        """
        images = np.empty((len(self), *self._image_shape), np.uint8)
        labels = np.empty(len(self), np.int64)
        signature = tf.TensorSpec(self._image_shape, tf.uint8), tf.TensorSpec((), tf.int64)
        files = tf.constant([shard.filename for shard in self.shards])
        parts = tf.constant([(shard.skip, shard.take) for shard in self.shards], tf.int64)

        def records(file: tf.Tensor, part: tf.Tensor) -> tf.data.Dataset:
            return tf.data.TFRecordDataset(file, buffer_size=1 << 20).skip(part[0]).take(part[1])

        batches = (
            tf.data.Dataset.from_tensor_slices((files, parts))
            .flat_map(records)
            .batch(_READ_BATCH)
            .map(
                lambda records: tf.map_fn(self.decode, records, fn_output_signature=signature),
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
            raise self.damaged(f"{end} of {len(self)} examples are left")
        return images, labels

    def check_labels(self, labels: np.ndarray) -> None:
        """Raises `UsageError` if one of ``labels`` is missing."""
        if labels.min() < 0:
            raise UsageError(f"{self.name}: the split {self.split!r} has no labels (-1)")


def _supervised_pair(builder: tfds.core.DatasetBuilder) -> tuple[str, str]:
    """The names of the features for the image and the label."""
    keys, features = builder.info.supervised_keys, builder.info.features
    name = builder.info.full_name
    if not keys or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        raise UsageError(
            f"{name} has no supervised (image, label) pair; its features are "
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


class Columns(Split):
    """Features of one split of a prepared TFDS dataset: a source of ``(features, labels)``."""

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        split: str,
        features: Sequence[str],
        labels: Sequence[str],
    ):
        """Opens a split. Arguments and errors as those of `ctl.data.load_columns`."""
        super().__init__(builder, split)
        kinds = builder.info.features.get_tensor_info()
        columns = *features, *labels
        self._bytes = sum(_bytes_of(kinds, column, self.name) for column in columns)
        self._features, self._labels = features, labels
        # All others are neither parsed nor decoded.
        chosen = tfds.decode.PartialDecoding(_tree(columns))
        self._parsed = chosen.extract_features(builder.info.features)
        image, label = _chosen(kinds, features), _chosen(builder.info.features, labels)
        is_image = not isinstance(image, dict) and image.np_dtype == np.uint8
        self.info = DatasetInfo(
            builder.name,
            str(builder.info.version),
            split,
            image.shape if is_image and len(image.shape) == 3 else None,
            label.num_classes if isinstance(label, tfds.features.ClassLabel) else None,
        )

    @property
    def description(self) -> str:
        """One line for the log."""
        return f"{super().description} of {', '.join(self._features)}"

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all examples in memory."""
        return len(self) * self._bytes

    def decode(self, record: tf.Tensor) -> tuple[Any, Any]:
        """Returns ``(features, labels)`` of one serialized example."""
        example = self._parsed.deserialize_example(record)
        chosen = _chosen(example, self._features), _chosen(example, self._labels)
        return tf.nest.map_structure(_number, chosen)


def _tree(columns: Sequence[str]) -> dict[str, Any]:
    """``["a/b", "c"]`` as {"a": {"b": True}, "c": True}."""
    tree: dict[str, Any] = {}
    for column in sorted(columns, reverse=True):  # "a" after "a/b", which it includes
        *parents, name = column.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = True
    return tree


def _part(nest: Any, column: str) -> Any:
    for name in column.split("/"):
        nest = nest[name]
    return nest


def _chosen(example: Any, columns: Sequence[str]) -> Any:
    if len(columns) == 1:
        return _part(example, columns[0])
    return {column: _part(example, column) for column in columns}


def _bytes_of(kinds: Any, column: str, where: str) -> int:
    """Bytes of ``column`` in an example, after a check that it has numbers of one shape."""
    try:
        leaves = tf.nest.flatten(_part(kinds, column))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{where} has no feature {column!r}; it has {', '.join(_names(kinds))}"
        ) from error
    total = 0
    for leaf in leaves:
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.np_dtype)
        if None in shape or dtype.kind not in "biuf":
            raise UsageError(
                f"{where}: the feature {column!r} is {dtype} of shape {shape}: only numbers of one "
                "shape can be used: convert it in a function of your own, "
                "--dataset=package.module:function, without --features"
            )
        total += math.prod(shape) * dtype.itemsize
    return total


def _names(kinds: Any, before: str = "") -> list[str]:
    if not isinstance(kinds, dict):
        return [before]
    join = f"{before}/" if before else ""
    return [name for key, kind in kinds.items() for name in _names(kind, join + key)]


def _number(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.uint8 and value.shape.rank < 2 else value
