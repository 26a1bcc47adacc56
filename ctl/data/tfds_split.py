"""One split of a prepared TFDS dataset: its records, by their numbers."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from ctl.data.index import readable
from ctl.data.records import ArrayRecords, BadRecord, TFRecords
from ctl.errors import UsageError


class Split:
    """The serialized examples of a split, in TFRecord or ArrayRecord. A subclass decodes them; it
    is a `ctl.data.sources.Source`.

    Examples are numbered in the order of the files, shard after shard.

    Attributes:
        name: of the dataset, with its config and version.
        split: as TFDS writes it.
        shards: the parts of files to read, ``FileInstruction`` of TFDS.
    """

    def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
        """Opens a split of a prepared dataset, see `ctl.data.tfds_source.find`.

        Raises:
            UsageError: there is no such split, or its files are missing, cut short or of a kind
                that is not read.
        """
        self.name = builder.info.full_name
        self.split = split
        self.shards = _shards(builder, split)
        self._kind = TFRecords if builder.info.file_format.value == "tfrecord" else ArrayRecords
        self._folder = pathlib.Path(builder.data_dir)
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
        records = self._kind(list(expected))
        for path, count, wanted in zip(
            records.paths, records.counts(), expected.values(), strict=True
        ):
            if count != wanted:
                raise self.damaged(f"{path.name} has {count} records, not {wanted}")
        return records

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        """What to add to the number of an example of each shard, for its number in `_records`."""
        files = {str(path): number for number, path in enumerate(self._records.paths)}
        begins = self._records.begins
        parts = zip(self.shards, self._ends, strict=True)
        return np.array([begins[files[s.filename]] + s.skip - (end - s.take) for s, end in parts])

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

    def content_hash(self) -> str:
        """Returns a sha256 of the names and sizes of the files and of TFDS's metadata."""
        content = hashlib.sha256()
        for shard in self.shards:
            path = pathlib.Path(shard.filename)
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
            "of them such as train[:80%]"
        ) from error
    shards = found.file_instructions
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
                f"{expected} bytes): remove {builder.data_dir} and prepare it again"
            )
    return shards


def one_line(error: BaseException) -> str:
    """The class of an error, and at most 200 characters of the first line of its message."""
    # Names of graph nodes, and the prefix that TFDS adds.
    noise = r"\{\{.*?\}\}| \[Op:.*|Failed to construct dataset .*?\}\": "
    text = re.sub(noise, "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
