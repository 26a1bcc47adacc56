"""Click data of Criteo's form: text or TFRecord with a label, 13 integers and 26 hashed categories.

A line of text has 40 fields between tabs: the label, 0 or 1; 13 integers; 26 categories, each a
hash of 32 bits in 8 hexadecimal digits. The field of an integer or a category that is missing is
empty. A record is a `tf.train.Example` with the same: int64 for the label and the integers, bytes
for the categories; what is missing is left out. Its keys are ``label``, ``I1`` to ``I13``, ``C1``
to ``C26``, or those of TensorFlow's own examples for these data: ``clicked``, ``int-feature-1`` to
``int-feature-13``, ``categorical-feature-14`` to ``categorical-feature-39``.

An example is ``({"dense": float32 [13], "ids": int64 [26]}, label)``, with a label float32. The
values are as they are stored, the hashes from 0 to 2**32 - 1; what is missing is 0.
"""

from __future__ import annotations

import copy
import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from ctl.base.names import CLICK_CATEGORIES as CATEGORIES
from ctl.base.names import CLICK_NUMBERS as NUMBERS
from ctl.base.names import suffix
from ctl.base.remote import AnyPath, PathLike, read_spans, unzipped
from ctl.data import index
from ctl.data.dataset import DatasetInfo
from ctl.data.records import BadRecord, Lines, Records, TFRecords
from ctl.data.sources import Arrays
from ctl.data.tables import quoted
from ctl.errors import UsageError

FIELDS = (
    "label",
    *(f"I{number}" for number in range(1, NUMBERS + 1)),
    *(f"C{number}" for number in range(1, CATEGORIES + 1)),
)
# What TensorFlow's examples call them.
_OTHER_KEYS = (
    "clicked",
    *(f"int-feature-{number}" for number in range(1, NUMBERS + 1)),
    *(f"categorical-feature-{number}" for number in range(NUMBERS + 1, len(FIELDS))),
)
# Of the columns in the records.
_FEATURES = (
    tf.io.FixedLenFeature([], tf.int64),
    *[tf.io.FixedLenFeature([], tf.int64, 0)] * NUMBERS,
    *[tf.io.FixedLenFeature([], tf.string, "")] * CATEGORIES,
)
_DIGITS, _HASH_DIGITS = 18, 8  # that fit into int64; of a hash
_LINES_AT_ONCE = 1 << 14

# The value of each character as a hexadecimal digit, -1 for others.
_HEX = np.full(256, -1)
_HEX[[*b"0123456789abcdef"]] = range(16)
_HEX[[*b"ABCDEF"]] = range(10, 16)

Examples = tuple[dict[str, np.ndarray], np.ndarray]


class _Damaged(Exception):
    """A row of what was parsed, and what is wrong with it."""

    def __init__(self, row: int, what: str):
        super().__init__(what)
        self.row = row
        self.what = what


class Clicks(Records):
    """Click data of which some examples may be taken. A base of sources."""

    _rows: np.ndarray | None = None  # of all; None for all

    def __init__(self, paths: Sequence[PathLike], *, name: str = "clicks"):
        super().__init__(paths, name=name)
        self.info = info(name)

    def __len__(self) -> int:
        return super().__len__() if self._rows is None else len(self._rows)

    def locate(self, indices: Any) -> tuple[Any, Any]:
        """See `Records.locate`."""
        return super().locate(indices if self._rows is None else self._rows[indices])

    def part(self, rows: np.ndarray) -> Clicks:
        """The examples ``rows``, int64 [n]."""
        part = copy.copy(self)
        part._rows = rows if self._rows is None else self._rows[rows]
        return part

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all examples."""
        return len(self) * (4 * NUMBERS + 8 * CATEGORIES + 4)

    def _bad(self, number: int, what: str) -> NoReturn:
        raise BadRecord(number, f"{self.where(number)}: {what}")


class ClickLines(Clicks, Lines):
    """Lines of text, not compressed."""

    def read(self, indices: np.ndarray) -> Examples:
        """Returns the examples at ``indices``, int64 [n]. Neighbours are read together.

        Raises:
            BadRecord: a line is damaged.
            OSError: the file cannot be read.
        """
        files, lines = self.places(indices)
        order = np.lexsort((lines, files))
        jumps = (np.diff(files[order]) != 0) | (np.diff(lines[order]) != 1)
        edges = [0, *(np.flatnonzero(jumps) + 1).tolist(), len(order)]
        firsts = order[edges[:-1]]
        places = files[firsts].tolist(), lines[firsts].tolist(), np.diff(edges).tolist()
        spans = []
        for file, line, count in zip(*places, strict=True):
            begin, end = self.span(file, line, count)
            spans.append((self.opened(file), end - begin, begin))
        texts = []
        for first, (_, size, _), text in zip(
            firsts.tolist(), spans, read_spans(spans), strict=True
        ):
            if len(text) < size:
                self._bad(int(indices[first]), "the file has become shorter")
            texts.append(text if text.endswith(b"\n") else text + b"\n")
        try:
            dense, ids, labels = parsed(b"".join(texts), len(indices))
        except _Damaged as damaged:
            self._bad(int(indices[order[damaged.row]]), damaged.what)
        back = np.argsort(order)
        return {"dense": dense[back], "ids": ids[back]}, labels[back]


class ClickRecords(Clicks, TFRecords):
    """Records of `tf.train.Example`."""

    def read(self, indices: np.ndarray) -> Any:
        """Returns the examples at ``indices``, int64 [n].

        Raises:
            BadRecord: a record is damaged, or its features are others.
            OSError: the file cannot be read.
        """
        records = super().read(indices)
        try:
            columns = self._columns(records)
        except tf.errors.OpError:
            for number, record in zip(indices.tolist(), records, strict=True):
                self._check(number, record)
            raise
        label, *numbers = columns[: 1 + NUMBERS]
        cells = np.stack(columns[1 + NUMBERS :], axis=1)
        texts = cells.ravel().tolist()
        widths = np.fromiter(map(len, texts), np.int64, len(texts)).reshape(cells.shape)
        begins = widths.cumsum().reshape(cells.shape) - widths
        try:
            _check(np.isin(label, (0, 1))[:, None], label[:, None], 0, "neither 0 nor 1")
            ids = _hashes(np.frombuffer(b"".join(texts), np.uint8), begins, widths)
        except _Damaged as damaged:
            self._bad(int(indices[damaged.row]), damaged.what)
        dense = np.stack(numbers, axis=1).astype(np.float32)
        return {"dense": dense, "ids": ids}, label.astype(np.float32)

    def _columns(self, records: Sequence[bytes]) -> list[np.ndarray]:
        """The columns in the order of `FIELDS`, each [n]."""
        keys = _OTHER_KEYS if _OTHER_KEYS[0].encode() in records[0] else FIELDS
        with tf.device("CPU"):
            found = tf.io.parse_example(
                tf.constant(records), dict(zip(keys, _FEATURES, strict=True))
            )
        return [found[key].numpy() for key in keys]

    def _check(self, number: int, record: bytes) -> None:
        try:
            self._columns([record])
        except tf.errors.OpError as error:
            self._bad(number, f"it has other features than click data: {error.message}"[:200])


def info(name: str) -> DatasetInfo:
    """What is known of click data: a model has one output."""
    return DatasetInfo(name, num_outputs=1)


def source(paths: Sequence[AnyPath], name: str) -> Clicks | Arrays:
    """The examples of ``paths``, one after the other. Text that is compressed is read into memory.

    Raises:
        UsageError: a file is missing, or damaged where it cannot be skipped, or none has examples.
    """
    if any(path.name.endswith(".gz") and suffix(path.name) != ".tfrecord" for path in paths):
        return Arrays(_whole(paths, name), info(name))
    kind = ClickRecords if suffix(paths[0].name) == ".tfrecord" else ClickLines
    found = kind(paths, name=name)
    if not len(found):
        raise UsageError(f"{name} has no examples")
    return found


def _whole(paths: Sequence[AnyPath], name: str) -> Examples:
    """All examples of files of text, of which some are compressed."""
    parts = [part for path in paths for part in _parts(path)]
    if not parts:
        raise UsageError(f"{name} has no examples")
    dense, ids, labels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return {"dense": dense, "ids": ids}, labels


def _parts(path: AnyPath) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    first = 1
    with index.readable(path), path.open("rb") as raw:
        file = unzipped(raw, path.name)
        try:
            while lines := [*itertools.islice(file, _LINES_AT_ONCE)]:
                filled = [row for row, line in enumerate(lines) if not line.isspace()]
                if filled:
                    text = b"".join(lines[row] for row in filled)
                    yield parsed(text if text.endswith(b"\n") else text + b"\n", len(filled))
                first += len(lines)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{path.name} is damaged: {str(error)[:80]}") from error
        except _Damaged as damaged:
            raise UsageError(
                f"{path.name}, line {first + filled[damaged.row]}: {damaged.what}; mend it, or "
                "decompress the file, which can then be read with --on_bad_record=skip"
            ) from damaged


def parsed(text: bytes, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers, float32 [count, 13], the hashes, int64 [count, 26], and the labels,
    float32 [count], of ``count`` lines that each end with a newline."""
    codes = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((codes == ord("\t")) | (codes == ord("\n")))
    fields = np.diff(np.flatnonzero(codes[ends] == ord("\n")), prepend=-1)
    if (fields != len(FIELDS)).any():
        row = int(np.argmax(fields != len(FIELDS)))
        what = f"it has {fields[row]} fields, and click data have {len(FIELDS)}"
        if fields[row] == len(FIELDS) - 1:
            what += ": a file without labels cannot be used"
        raise _Damaged(row, what)
    begins = np.concatenate([[0], ends[:-1] + 1]).reshape(count, len(FIELDS))
    ends = ends.reshape(begins.shape)
    widths = ends - begins
    widths[:, -1] -= codes[ends[:, -1] - 1] == ord("\r")  # of a file of Windows
    labels = codes[begins[:, 0]] - ord("0")  # of uint8: others than 0 and 1 are above
    good = (labels < 2) & (widths[:, 0] == 1)
    _check(good[:, None], _Cells(codes, begins, widths), 0, "neither 0 nor 1")
    split = slice(1, 1 + NUMBERS), slice(1 + NUMBERS, None)
    dense, ids = (
        parse(codes, begins[:, columns], widths[:, columns])
        for parse, columns in zip((_integers, _hashes), split, strict=True)
    )
    return dense.astype(np.float32), ids, labels.astype(np.float32)


class _Cells:
    """The text of cells by row and column."""

    def __init__(self, codes: np.ndarray, begins: np.ndarray, widths: np.ndarray):
        self._codes, self._begins, self._widths = codes, begins, widths

    def __getitem__(self, place: tuple[int, int]) -> str:
        begin, width = self._begins[place], self._widths[place]
        return self._codes[begin : begin + width].tobytes().decode("utf-8", "replace")


def _check(good: np.ndarray, cells: Any, first: int, what: str) -> None:
    """Raises `_Damaged` for the first cell that is not ``good``, [rows, columns]; the first column
    is the field ``first``."""
    if not good.all():
        row, column = np.argwhere(~good)[0].tolist()
        raise _Damaged(row, f"{FIELDS[first + column]} is {quoted(cells[row, column])}, {what}")


def _integers(codes: np.ndarray, begins: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The integers of cells, int64; 0 where a cell is empty."""
    negative = (codes[begins] == ord("-")) & (widths > 0)
    digits = widths - negative
    good = (digits <= _DIGITS) & ~(negative & (digits == 0))
    values = np.zeros(begins.shape, np.int64)
    for place in range(min(int(digits.max()), _DIGITS)):
        inside = place < digits
        found = _HEX[codes[np.where(inside, begins + negative + place, 0)]]
        good &= ~inside | ((found >= 0) & (found < 10))
        values = np.where(inside, 10 * values + found, values)
    _check(good, _Cells(codes, begins, widths), 1, "not an integer")
    return np.where(negative, -values, values)


def _hashes(codes: np.ndarray, begins: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The hashes of cells, int64; 0 where a cell is empty."""
    there = widths > 0
    good = ~there | (widths == _HASH_DIGITS)
    values = np.zeros(begins.shape, np.int64)
    codes = codes if len(codes) else np.zeros(1, np.uint8)
    whole = there & good
    for place in range(_HASH_DIGITS):
        found = _HEX[codes[np.where(whole, begins + place, 0)]]
        good &= ~whole | (found >= 0)
        values = 16 * values + found
    what = f"not {_HASH_DIGITS} hexadecimal digits"
    _check(good, _Cells(codes, begins, widths), 1 + NUMBERS, what)
    return np.where(there, values, 0)
