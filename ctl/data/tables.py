"""Tables in files: columns of numbers or text, of which some are features and some are labels.

What a file says is not trusted: no Python object is read from it, and messages cut what they show.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import math
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.names import (
    BINARY,
    CLASSES,
    DROP,
    LANGUAGE_MODEL,
    MEAN,
    NUMBERS,
    RECORDS,
    TABLES,
    UNKNOWN,
    suffix,
)
from ctl.base.remote import AnyPath, on_disk, unzipped
from ctl.data import index
from ctl.data.records import compression
from ctl.errors import UsageError
from ctl.flags.record_schema import IMAGE, TEXT, Feature

# Columns that hold the labels where none is named; if there is none of these, the last one does.
LABELS = ("label", "labels", "class", "target", "y")

# The parts of data, by what files, folders and arrays call them.
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
PARTS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")

_MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # in a column of numbers
_BOOLS = {"true": 1.0, "false": 0.0}
# 1,234 and 1,234,567.8, and others without a comma
_THOUSANDS = re.compile(r"[-+]?([1-9]\d{0,2}(,\d{3})+|\d+)(\.\d+)?")
# 1,72 and 1.234,5; 1,234 and 1,234,567.8
_COMMAS = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?|[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_MOST_CLASSES = 1000
_MOST_WORDS = 100  # of a column
_MOST_PASTED = 1000  # characters of a flag
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff")
_ROWS_AT_ONCE = 1 << 16
_SHOWN = 40  # characters of a name or a value, and names of a list
_HELD = {bytes: "byte strings", int: "integers", float: "floats", type(None): "values"}


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of one length, by name.

    Attributes:
        name: of the file, for messages.
        columns: numbers, float64 [N], NaN where one is missing; text, object [N], "" where it is
            missing; or numbers of any type and shape [N, ...].
        lines: the line of each row, int64 [N]; None where the file has none.
        files: the tables that were joined, if this is not of one file.
        taken_from: the table of which these are some rows, and their numbers there, int64 [N].
    """

    name: str
    columns: dict[str, np.ndarray]
    lines: np.ndarray | None = None
    files: Sequence[Table] = ()
    taken_from: tuple[Table, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, row: int) -> str:
        """Says where a row is, for messages."""
        if self.taken_from:
            whole, rows = self.taken_from
            return whole.where(rows[row])
        for table in self.files:
            if row < len(table):
                return table.where(row)
            row -= len(table)
        if self.lines is None:
            return f"{self.name}, row {row}"
        return f"{self.name}, line {self.lines[row]}"

    def take(self, rows: np.ndarray) -> Table:
        """The table of ``rows``, int64 [n]."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Table(self.name, columns, taken_from=(self, rows))


def read(path: AnyPath, record_schema: Mapping[str, Feature] | None = None) -> dict[str, Table]:
    """The tables of a file by the part that they are, such as ``{"train": …, "test": …}``; one that
    says nothing of parts is ``train``.

    Args:
        path: of the file.
        record_schema: the features of TFRecord files that are read, by their names. Without it,
            all are, by what they hold.

    Raises:
        UsageError: the file is missing, damaged, or has no rows.
    """
    with index.readable(path):
        try:
            end = suffix(path.name)
            tables = _tfrecord(path, record_schema) if end == RECORDS else _READERS[end](path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{path.name} is damaged: {_cut(str(error))}") from error
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UsageError(
                f"{path.name} is not UTF-8 (byte {byte:#x}): save it as UTF-8"
            ) from error
    for table in tables.values():
        if not len(table):
            raise UsageError(f"{path.name} has no rows")
    return tables


def joined(name: str, parts: Sequence[Table]) -> Table:
    """The rows of several tables, one after the other.

    Raises:
        UsageError: they differ in their columns.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for other in parts[1:]:
        for column in {**first.columns, **other.columns}:
            kinds = [
                (of.dtype == object, of.shape[1:])
                for of in (first.columns.get(column), other.columns.get(column))
                if of is not None
            ]
            if len(kinds) < 2 or kinds[0] != kinds[1]:
                raise UsageError(
                    f"{first.name} and {other.name} differ in the column {quoted(column)}: give "
                    "all files of a part the same columns"
                )
    columns = {
        column: np.concatenate([part.columns[column] for part in parts]) for column in first.columns
    }
    return Table(name, columns, files=parts)


def quoted(text: object) -> str:
    """``text`` of a file for a message: cut, and with what does not print escaped."""
    return _cut(repr(str(text)[: _SHOWN + 1]))


def plain(text: object) -> str:
    """As `quoted`, without quotes where nothing had to be escaped."""
    text = str(text)
    return _cut(text if text.isprintable() else quoted(text))


def listed(names: Iterable[object]) -> str:
    """Some of ``names`` for a message."""
    texts = [*map(plain, names)]
    return ", ".join(texts[:_SHOWN]) + (f", … ({len(texts)})" if len(texts) > _SHOWN else "")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN + 2 else f"{text[:_SHOWN]}…"


# Readers ----------------------------------------------------------------------------------------


def _csv(path: AnyPath) -> dict[str, Table]:
    text: set[str] = set()
    while True:
        table, restart = _parsed(path, text)
        if not restart:
            return {"train": table}


def _parsed(path: AnyPath, text: set[str]) -> tuple[Table, bool]:
    """The table of a CSV file. Adds to ``text`` the columns that are not of numbers. Returns
    whether such a column began with numbers, so that the file is to be read again."""
    parts: dict[str, list[np.ndarray]] = {}
    lines: list[int] = []
    restart = False
    with _opened(path) as file:
        rows: Iterator[Any] = _rows(path, file)
        header = next(rows, None)
        if header is None:
            raise UsageError(f"{path.name} has no rows")
        names = header[1]
        if any(_is_number(name) for name in names):  # a first line of data
            rows = itertools.chain([header], rows)
            names = [f"column{number}" for number in range(len(names))]
        names = [name.strip() for name in names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"{path.name}, line {header[0]}: the column {quoted(twice)} is there twice: rename "
                "one"
            )
        parts = {name: [] for name in names}
        while chunk := [*itertools.islice(rows, _ROWS_AT_ONCE)]:
            for line, cells in chunk:
                if len(cells) != len(names):
                    raise UsageError(
                        f"{path.name}, line {line} has {len(cells)} cells, and line {header[0]} "
                        f"has {len(names)}: give all lines the same columns"
                    )
            lines += [line for line, _ in chunk]
            for name, cells in zip(
                names, zip(*(cells for _, cells in chunk), strict=True), strict=True
            ):
                numbers = None if name in text else _numbers(cells)
                if numbers is None and name not in text:
                    text.add(name)
                    restart |= bool(parts[name])
                parts[name].append(
                    np.array([cell.strip() for cell in cells], object)
                    if numbers is None
                    else numbers
                )
    columns = {name: np.concatenate(chunks) for name, chunks in parts.items() if chunks}
    return Table(path.name, columns, np.array(lines, np.int64)), restart


def _opened(path: AnyPath) -> io.TextIOWrapper:
    raw = unzipped(path.open("rb"), path.name)
    return io.TextIOWrapper(raw, "utf-8-sig", newline="")


def _rows(path: AnyPath, file: io.TextIOWrapper) -> Iterator[Any]:
    """Yields the line and the cells of each row that is not blank."""
    first = file.readline()
    delimiter = max(",;\t|", key=first.count)
    reader = csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield reader.line_num, cells
    except csv.Error as error:
        raise UsageError(
            f"{path.name}, line {reader.line_num}: it cannot be read as CSV: {_cut(str(error))}"
        ) from error


def _check_separated(table: Table) -> None:
    """Raises `UsageError` if the only column has rows of numbers with spaces between them."""
    columns = [*table.columns.values()]
    words = str(columns[0][0]).split() if len(columns) == 1 and len(table) else []
    if len(words) > 1 and all(map(_is_number, words)):
        raise UsageError(
            f"{table.name} has spaces between its columns: separate them by commas, semicolons, "
            "tabs or |"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """The numbers of ``cells``, float64 [n], NaN where one is missing; None if one is text. If all
    are true or false, they are 1 and 0."""
    if any("_" in cell for cell in cells):  # Python takes 1_0 for 10
        return None
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError:
        pass
    lower = [cell.strip().lower() for cell in cells]
    known = dict.fromkeys(_MISSING, np.nan)
    if {*lower} <= known.keys() | _BOOLS.keys():
        known |= _BOOLS
    try:
        return np.array([known[cell] if cell in known else float(cell) for cell in lower])
    except ValueError:
        return None


def _npz(path: AnyPath) -> dict[str, Table]:
    """The arrays of a file of NumPy. ``x_train`` is x of the part ``train``."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, part = key.rpartition("_")
                if not name or part not in PARTS:
                    name, part = key, "train"
                parts.setdefault(PARTS[part], {})[name] = _column(path, key, arrays[key])
    except (ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        what = "it has Python objects" if "pickle" in str(error) else str(error).split("\n")[0][:80]
        raise UsageError(f"{path.name} cannot be read as .npz: {what}") from error
    for part, columns in parts.items():
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            shapes = [f"{name} {list(column.shape)}" for name, column in columns.items()]
            raise UsageError(
                f"{path.name}: the arrays of {part} differ in length: {listed(shapes)}: save those "
                "of one length, or with names such as x_train and x_test"
            )
    return {part: Table(path.name, columns) for part, columns in parts.items()}


def _column(path: AnyPath, name: str, array: np.ndarray) -> np.ndarray:
    if not array.ndim:
        raise UsageError(f"{path.name}: {quoted(name)} is one value, not one for each example")
    if array.dtype.kind in "SU":
        texts = array.astype(str) if array.dtype.kind == "U" else np.char.decode(array, "utf-8")
        return texts.astype(object)
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"{path.name}: {quoted(name)} has the type {array.dtype}: save numbers or text"
        )
    return array.astype(np.float64) if array.ndim == 1 else array


def _jsonl(path: AnyPath) -> dict[str, Table]:
    """Lines that are objects of JSON: their keys are the columns."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    with _opened(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                what = _cut(str(error))
                raise UsageError(f"{path.name}, line {line}: it is not JSON: {what}") from error
            if not isinstance(row, dict):
                raise UsageError(
                    f"{path.name}, line {line} is no object, such as {{{quoted('label')}: 1}}"
                )
            rows.append(row)
            lines.append(line)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _values([row.get(name) for row in rows]) for name in names}
    return {"train": Table(path.name, columns, np.array(lines, np.int64))}


def _values(values: list[Any]) -> np.ndarray:
    """A column of values of Python: numbers, lists of numbers of one shape, or else text."""
    kinds = {type(value) for value in values} - {type(None)}
    try:
        if kinds <= {int, float, bool}:
            return np.array([np.nan if value is None else float(value) for value in values])
        if kinds == {list} and None not in values:
            return np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError):
        pass
    texts = np.empty(len(values), object)
    for row, value in enumerate(values):
        texts[row] = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return texts


def _parquet(path: AnyPath) -> dict[str, Table]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path.name}: Parquet needs a package: pip install 'ctl[parquet]'"
        ) from error
    try:
        with path.open("rb") as file:
            table = parquet.ParquetFile(file).read()
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        what = str(error).split("\n")[0][:80]
        raise UsageError(f"{path.name} cannot be read as Parquet: {what}") from error
    names = table.column_names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{path.name}: the column {quoted(twice)} is there twice: rename one")
    columns = {}
    for name, column in zip(names, table.columns, strict=True):
        if name.startswith("__index_level_"):  # row names of pandas
            continue
        kind = column.type
        is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
        if is_number or pyarrow.types.is_boolean(kind) or pyarrow.types.is_decimal(kind):
            columns[name] = column.cast(pyarrow.float64(), safe=False).to_numpy()
        elif pyarrow.types.is_nested(kind) or pyarrow.types.is_null(kind):
            columns[name] = _values(column.to_pylist())
        else:
            columns[name] = _values([v if v is None else str(v) for v in column.to_pylist()])
    return {"train": Table(path.name, columns)}


def _tfrecord(path: AnyPath, schema: Mapping[str, Feature] | None) -> dict[str, Table]:
    """Records that are a `tf.train.Example` each: its features are the columns."""
    with path.open("rb") as file:
        kind = compression(file.read(2))
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    try:
        for record in _records(path, kind):
            features = {
                name: getattr(feature, feature.WhichOneof("kind") or "int64_list").value
                for name, feature in sorted(_example(record).features.feature.items())
            }
            first = first or features
            if schema:
                rows.append({name: [_of_schema(features, name, schema[name])] for name in schema})
                continue
            row = {}
            for name, values in features.items():
                row[name] = [_text_or_image(v) if isinstance(v, bytes) else v for v in values]
            rows.append(row)
    except tf.errors.OpError as error:
        raise UsageError(
            f"{path.name}, record {len(rows)} is damaged: {_cut(error.message)}"
        ) from error
    except ValueError as error:
        hint = _types(first) if first and not schema else ""
        raise UsageError(f"{path.name}, record {len(rows)}: {error}{hint}") from error
    except Exception as error:  # of protobuf, which TensorFlow brings
        raise UsageError(f"{path.name}, record {len(rows)} is no tf.train.Example") from error
    names = [*schema] if schema else sorted({name for row in rows for name in row})  # have no order
    hint = "" if schema else _types(first)
    return {"train": Table(path.name, {name: _feature(path, name, rows, hint) for name in names})}


def _records(path: AnyPath, kind: str) -> Iterator[bytes]:
    with on_disk(path) as file:
        yield from tf.data.TFRecordDataset(str(file), kind).as_numpy_iterator()


def _types(features: Mapping[str, Any]) -> str:
    """What the first record holds, and the flag that says so, for messages."""
    found, schema = [], []
    for name, values in [*features.items()][:_SHOWN]:
        held = next((type(value) for value in values), int)
        kind, count = {float: "float32", int: "int64", bytes: TEXT}[held], len(values)
        found.append(f"{plain(name)} of {count} {_HELD[held]}")
        if held is bytes:
            found[-1] += f" ({len(values[0])} bytes)"
            try:
                kind = IMAGE if isinstance(_text_or_image(values[0]), np.ndarray) else TEXT
            except ValueError:
                kind, count = "uint8", len(values[0])
        schema.append(f"{plain(name)}:{Feature(kind, () if count == 1 else (count,))}")
    flag = f"--record_schema={','.join(schema)}"
    return f"; record 0 has {', '.join(found)}: give the types, as {flag}"


def _of_schema(features: Mapping[str, Any], name: str, feature: Feature) -> Any:
    """The value that a record has of a ``feature``: a number, text, or an array."""
    if name not in features:
        raise ValueError(f"it has no {quoted(name)}; it has {listed(features)}")
    values, (kind, shape) = features[name], feature
    held = {type(value) for value in values} or {type(None)}
    has = f"{quoted(name)} has {len(values)} {_HELD[max(held, key=str)]}"
    has += f", and the schema says {feature}"
    if kind in (IMAGE, TEXT):
        if held != {bytes} or len(values) != 1:
            raise ValueError(has)
        try:
            if kind == TEXT:
                return values[0].decode("utf-8")
            return tf.io.decode_image(values[0], expand_animations=False).numpy()
        except (UnicodeDecodeError, tf.errors.OpError) as error:
            what = "no text in UTF-8" if kind == TEXT else "no image"
            raise ValueError(f"{quoted(name)} is {what}") from error
    dtype, count = np.dtype(kind).newbyteorder("<"), math.prod(shape)
    if held == {bytes} and len(values) == 1:  # as `tf.io.decode_raw` reads them
        if len(values[0]) != count * dtype.itemsize:
            raise ValueError(
                f"{quoted(name)} has {len(values[0])} bytes, and the schema says {feature}, "
                f"{count * dtype.itemsize} bytes"
            )
        array = np.frombuffer(values[0], dtype)
    else:
        if held != {float if dtype.kind == "f" else int} or len(values) != count:
            raise ValueError(has)
        whole = np.array(values)
        array = whole.astype(dtype)
        if dtype.kind != "f" and (array != whole).any():
            raise ValueError(
                f"{quoted(name)} has {whole[array != whole][0]}, which no {kind} holds"
            )
    return array.reshape(shape) if shape else array[0].item()


def _example(record: bytes) -> tf.train.Example:
    try:
        return tf.train.Example.FromString(record)
    except Exception as error:  # of protobuf, which ctl does not import
        raise ValueError("it is no tf.train.Example") from error


def _text_or_image(value: bytes) -> str | np.ndarray:
    if value.startswith(_IMAGES):
        return tf.io.decode_image(value, expand_animations=False).numpy()
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("it has bytes that are neither text in UTF-8 nor PNG or JPEG") from error


def _feature(
    path: AnyPath, name: str, rows: Sequence[dict[str, list[Any]]], hint: str
) -> np.ndarray:
    """A column: one value of each record, or arrays of one shape."""
    lists = [row.get(name, []) for row in rows]
    if {len(values) for values in lists} <= {0, 1}:
        values: list[Any] = [one[0] if one else None for one in lists]
        if not any(isinstance(value, np.ndarray) for value in values):
            return _values(values)
    else:
        values = [np.array(value) for value in lists]
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1 or np.asarray(values[0]).dtype.kind not in "iuf":
        raise UsageError(
            f"{path.name}: {quoted(name)} has values of several sizes or of text: read the file by "
            "a function of your own, with ctl.data.records.TFRecords, or leave it out of a "
            f"--record_schema{hint}"
        )
    return np.stack(values)


_READERS: dict[str, Callable[[AnyPath], dict[str, Table]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".npz": _npz,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
assert {*_READERS, RECORDS} == {*TABLES}

# Features and labels ----------------------------------------------------------------------------


class Choice(NamedTuple):
    """The columns that are used, and how they become numbers.

    Attributes:
        features, labels: names of columns.
        classes: that the labels are; none for other numbers.
        words: of each feature that is text, its texts in order. Each is a number of the example: 1
            for the text that it has, 0 for the others.
        missing: of each feature, what stands for a value that is missing; "" for no word. Empty
            where no value may be missing.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...] = ()
    words: Mapping[str, Sequence[str]] = {}
    missing: Mapping[str, float | str] = {}


def choose(
    table: Table,
    features: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    loss_of: str = CLASSES,
    missing: str | None = None,
) -> Choice:
    """Chooses the columns: as labels one of `LABELS`, or else the last; as features all others that
    are numbers and not `is_index`. An array of rank 2 or more is the only feature. Text is a
    feature if it is named, and has few different texts.

    Args:
        table: to train on.
        features, labels: names of columns, instead of the choice.
        loss_of: what the loss takes, see `ctl.base.names.loss_of`. Text, and of `CLASSES` whole
            numbers, too, are the names of classes. With `UNKNOWN`, numbers are classes only if they
            are 0, 1, … without a gap.
        missing: `MEAN` fills the missing values of features, see `fitted`, and `DROP` leaves out
            their rows, see `complete`; None for neither.

    Raises:
        UsageError: there is no such column, the labels suit no loss or are all alike, a feature has
            too many different texts, or the last column is a feature and it is not evident which
            column has the labels.
    """
    columns = table.columns
    for what, names in (("features", features), ("labels", labels)):
        for name in names or ():
            if name not in columns:
                raise UsageError(
                    f"--{what}: {table.name} has no column {quoted(name)}; it has {listed(columns)}"
                )
    is_last = labels is None
    if labels is None:
        used = {*(features or ())}
        free = [name for name in columns if name not in used]
        named = [name for name in free if name.lower() in LABELS]
        if not free:
            raise UsageError(f"{table.name} has no column for labels: name fewer with --features")
        if not named and len(free) > 1 and [*columns][-1] in used:
            raise UsageError(
                f"{table.name}: the last column, {quoted([*columns][-1])}, is in --features: name "
                f"the column of the labels with --labels; there are {listed(free)}"
            )
        labels, is_last = named[:1] or free[-1:], not named
    if features is None:
        others = [name for name in columns if name not in labels]
        features = [name for name in others if columns[name].dtype != object]
        features = [name for name in features if not is_index(table, name)] or features
        deep = [name for name in features if columns[name].ndim > 1]
        features = deep if len(deep) == 1 else features
    if not features:
        text = any(columns[name].dtype == object for name in columns)
        numbers = [name for name in labels if columns[name].dtype != object]
        but = f" but {listed(numbers)}" if numbers else ""
        command = LANGUAGE_MODEL.format(path=table.name)
        _check_separated(table)
        words = _columns_of_words(table, labels)
        raise UsageError(
            f"{table.name} has no column of numbers{but}: features must be numbers"
            f"{f', or words that you name{_flag(words)}' if words else ''}"
            f"{f'; for a language model of its text, give {command}' if text else ''}"
            f"{'; for another task, --dataset=file.py:function of your own' if text else ''}"
            f"{comma_hint(table)}"
        )
    if both := {*features} & {*labels}:
        raise UsageError(f"{table.name}: {quoted(min(both))} is in --features and in --labels")
    table = complete(table, [*features, *labels]) if missing == DROP else table
    if is_last:
        _check_labels(table, labels[0], _IS_LAST)
    if len(labels) == 1:
        _check_vary(table, labels[0], _IS_LAST if is_last else "")
    _check_words(table, features)
    chosen = fitted(table, Choice(tuple(features), tuple(labels)), missing)
    is_text = any(columns[name].dtype == object for name in labels)
    if not is_text and loss_of != CLASSES:
        of_classes = loss_of == UNKNOWN and len(labels) == 1 and _is_numbered(columns[labels[0]])
        return chosen._replace(classes=_classes(table, labels[0])) if of_classes else chosen
    if len(labels) > 1:
        remedy = ", for a loss of numbers: give --loss=mean_squared_error or binary_cross_entropy"
        raise UsageError(
            f"{table.name}: {listed(labels)} are several labels, which must be numbers"
            f"{'' if loss_of == UNKNOWN else remedy}"
        )
    if loss_of == NUMBERS:
        raise UsageError(
            f"{table.name}: {quoted(labels[0])} is text, and the loss takes numbers: name a column "
            f"of numbers with --labels, or leave out --loss{comma_hint(table)}"
        )
    classes = _classes(table, labels[0])
    if loss_of == BINARY and len(classes) > 2:
        raise UsageError(
            f"{table.name}: {quoted(labels[0])} has {len(classes)} classes, and the loss is for 2: "
            "leave out --loss"
        )
    return chosen._replace(classes=classes)


# Why a column has the labels.
_IS_LAST = " (the last column, since --labels names none)"

INDEX = re.compile(r"(Unnamed: \d+)?")  # as pandas writes the name of an index, and reads it


def is_index(table: Table, name: str) -> bool:
    """Whether a column is one that pandas has added: it has no name, and distinct whole numbers."""
    if not INDEX.fullmatch(name):
        return False
    columns = [part.columns[name] for part in table.files or [table]]
    return all(
        c.ndim == 1
        and c.dtype != object
        and (c == np.floor(c)).all()
        and len(np.unique(c)) == len(c)
        for c in columns
    )


def _check_vary(table: Table, label: str, why: str) -> None:
    """Refuses labels that are all alike. ``why`` says why this column has the labels."""
    column = table.columns[label]
    if column.ndim == 1 and len(column) > 1 and (column == column[0]).all():
        value = column[0] if column.dtype == object else f"{column[0]:g}"
        raise UsageError(
            f"{table.name}: the label {quoted(label)}{why} is {quoted(value)} in all rows, so "
            "there is nothing to learn: name another column with --labels"
        )


def _is_numbered(column: np.ndarray) -> bool:
    """Whether the numbers of a column are 0, 1, … without a gap, and few enough for classes."""
    distinct = np.unique(column)
    is_few = 1 < len(distinct) <= _most_classes(column)
    return column.ndim == 1 and is_few and np.array_equal(distinct, np.arange(len(distinct)))


def _most_classes(column: np.ndarray) -> int:
    return min(_MOST_CLASSES, max(20, len(column) // 2))


def _classes(table: Table, label: str) -> tuple[str, ...]:
    """The classes of a column, in order."""
    column = table.columns[label]
    regression = "to predict numbers, give --loss=mean_squared_error"
    if column.ndim > 1:
        raise UsageError(
            f"{table.name}: {quoted(label)} has the shape {list(column.shape)}, and a class is one "
            f"value: {regression}"
        )
    _check_labels(table, label)
    if column.dtype != object:
        if len(broken := np.flatnonzero(column != np.floor(column))):
            raise UsageError(
                f"{table.where(broken[0])}: {quoted(label)} is {column[broken[0]]:g}, which is no "
                f"class: {regression}, or name another column with --labels"
            )
        column = column.astype(np.int64)
    distinct = sorted({*column.tolist()})
    if len(distinct) > _most_classes(column):
        raise UsageError(
            f"{table.name}: {quoted(label)} has {len(distinct)} values in {len(column)} rows, too "
            f"many for classes: {regression}, or name another column with --labels"
        )
    return tuple(map(str, distinct))


def complete(table: Table, names: Iterable[str]) -> Table:
    """The rows that have a value in each of the columns ``names``.

    Raises:
        UsageError: there is no such row.
    """
    names = [name for name in names if name in table.columns]
    lacking = np.any([missing_rows(table.columns[name]) for name in names], axis=0)
    if lacking.all():
        raise UsageError(
            f"{table.name}: no row has a value in each of {listed(names)}: name fewer columns with "
            "--features"
        )
    return table.take(np.flatnonzero(~lacking)) if lacking.any() else table


def fitted(table: Table, choice: Choice, missing: str | None = None) -> Choice:
    """``choice`` with the words of ``table``, the training examples, and with ``missing`` = `MEAN`
    with the means of their numbers, float64.

    Raises:
        UsageError: a column has no value there.
    """
    words: dict[str, tuple[str, ...]] = {}
    instead: dict[str, float | str] = {}
    for name in choice.features:
        column = table.columns[name]
        there = column[~missing_rows(column)]
        if missing == MEAN and not len(there):
            raise UsageError(
                f"{table.name}: {quoted(name)} has no value in any training example: leave it out"
                f"{_flag(other for other in choice.features if other != name)}"
            )
        if column.dtype == object:
            words[name], instead[name] = tuple(sorted({*there.tolist()})), ""
        elif column.ndim == 1 and missing == MEAN:
            _check_size(table, name)
            instead[name] = float(there.mean())
    return choice._replace(words=words, missing=instead if missing == MEAN else {})


def check(table: Table, choice: Choice, chosen_for_it: bool = True) -> None:
    """Raises `UsageError` if a column is not there, or a value of a feature is missing, is not
    finite, or is text that is no word.

    Messages name flags that make another choice if this one was ``chosen_for_it``, and not for the
    training data of a model.
    """
    for name in (*choice.features, *choice.labels):
        if name not in table.columns:
            of_labels = name in choice.labels and not chosen_for_it
            remedy = "; to predict without labels, give ctl.evaluate --predictions=FILE.csv"
            raise UsageError(
                f"{table.name} has no column {quoted(name)}, which the training data have; it has "
                f"{listed(table.columns)}{remedy if of_labels else ''}"
            )
    for name in choice.features:
        column = table.columns[name]
        if column.dtype == object and name not in choice.words:
            other = "leave it out of --features, or " if chosen_for_it else ""
            raise UsageError(
                f"{_first_text(table, name)}, and features must be numbers: {other}make numbers of "
                "it"
            )
        if column.ndim > 1 and len(choice.features) > 1:
            raise UsageError(
                f"{table.name}: {quoted(name)} has the shape {list(column.shape)}, which does not "
                "go with other columns: name it alone with --features"
            )
    _check_filled(table, choice, chosen_for_it)
    for name in choice.features:
        _check_size(table, name)


def features(table: Table, choice: Choice) -> np.ndarray:
    """The features of each row, of a table that passes `check`. Warns of words that ``choice`` does
    not have: they are as no word, all zeros.

    Returns:
        float32 [N, numbers], in the order of the columns, and of the words of each; or the one
        array as it is, images with a last axis of channels.
    """
    numbers = []
    for name in choice.features:
        column = table.columns[name]
        if name in choice.words:
            numbers.append(_one_hot(table, name, choice.words[name]))
        elif column.ndim == 1:
            if name in choice.missing:
                column = np.where(np.isnan(column), choice.missing[name], column)
            numbers.append(column[:, np.newaxis])
        elif column.dtype == np.uint8 and column.ndim > 2:  # images, which the step scales
            return column[..., np.newaxis] if column.ndim == 3 else column
        else:
            return column.astype(np.float32)
    return np.concatenate(numbers, axis=1).astype(np.float32)


def _one_hot(table: Table, name: str, words: Sequence[str]) -> np.ndarray:
    """1 for the word that each row has, else 0: float64 [N, words]."""
    places = {word: place for place, word in enumerate(words)}
    texts = _texts(table.columns[name])
    hot = np.zeros([len(table), len(words)])
    for row, text in enumerate(texts):
        if text in places:
            hot[row, places[text]] = 1
    if unknown := [text for text in texts if text and text not in places]:
        logging.warning(
            "%s: %d of %d values of %s are words that the training examples do not have; they are "
            "as no word: %s",
            *(table.name, len(unknown), len(table), plain(name), listed(sorted({*unknown}))),
        )
    return hot


def _texts(column: np.ndarray) -> list[str]:
    """The values of a column as words or classes: whole numbers without a point, "" for none."""
    texts = []
    for value in column.tolist():
        if isinstance(value, str):
            texts.append(value)
        elif math.isnan(value):
            texts.append("")
        else:
            texts.append(f"{value:.0f}" if float(value).is_integer() else str(value))
    return texts


def labels(table: Table, choice: Choice) -> np.ndarray:
    """The labels of each row, of a table that passes `check`.

    Returns:
        int64 [N] of classes, else float32 [N] or [N, labels].

    Raises:
        UsageError: a value is missing, is not finite, or is another class.
    """
    if not choice.classes:
        for name in choice.labels:
            if table.columns[name].dtype == object:
                raise UsageError(f"{table.name}: {quoted(name)} is text, and must be numbers")
            _check_labels(table, name)
        columns = [table.columns[name] for name in choice.labels]
        numbers = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return numbers.astype(np.float32)
    (name,) = choice.labels
    classes = {text: number for number, text in enumerate(choice.classes)}
    _check_labels(table, name)
    result = np.empty(len(table), np.int64)
    for row, text in enumerate(_texts(table.columns[name])):
        if text not in classes:
            raise UsageError(
                f"{table.where(row)}: {quoted(name)} is {quoted(text)}, which is no class of the "
                f"training data; they have {listed(choice.classes)}"
            )
        result[row] = classes[text]
    return result


def words_hint(table: Table, choice: Choice) -> str:
    """Which columns of text that are left out may be words, and the flag for it; "" for none."""
    words = _columns_of_words(table, (*choice.features, *choice.labels))
    if not words:
        return ""
    flag = _flag(name for name in table.columns if name in (*choice.features, *words))
    return f"text is left out; to use the words of {listed(words)} as features, give them{flag}"


def _columns_of_words(table: Table, others: Sequence[str]) -> list[str]:
    """The columns that are text, but not ``others``, and have few different texts."""
    commas = _columns_with_commas(table)
    text = [name for name, column in table.columns.items() if column.dtype == object]
    text = [name for name in text if name not in (*others, *commas)]
    return [name for name in text if 0 < _count_words(table, name) <= _most_words(table)]


def _count_words(table: Table, name: str) -> int:
    return len({*table.columns[name].tolist()} - {""})


def _most_words(table: Table) -> int:
    return min(_MOST_WORDS, max(20, len(table) // 2))


def _check_words(table: Table, names: Sequence[str]) -> None:
    """Refuses columns of text with many different ones."""
    text = [name for name in names if table.columns[name].dtype == object]
    many = [name for name in text if _count_words(table, name) > _most_words(table)]
    if many:
        raise UsageError(
            f"{_first_text(table, many[0])}, one of {_count_words(table, many[0])} texts in "
            f"{len(table)} rows, too many for words: leave out {listed(many)}"
            f"{_flag(name for name in names if name not in many)}{comma_hint(table)}"
        )


def _first_text(table: Table, name: str) -> str:
    """Says where a column has a text that is no number."""
    column = table.columns[name]
    row = next((row for row, text in enumerate(column) if text and not _is_number(text)), 0)
    return f"{table.where(row)}: {quoted(name)} is {quoted(column[row])}"


def _flag(names: Iterable[str]) -> str:
    """``: --features=…`` to paste, for messages; "" if there are none, or too many."""
    joined_names = ",".join(names)
    is_short = joined_names.isprintable() and len(joined_names) <= _MOST_PASTED
    return f": --features={shlex.quote(joined_names)}" if joined_names and is_short else ""


def typing_hint(table: Table, choice: Choice) -> str:
    """Which column is text, and so no feature, because of a few cells among numbers; "" for
    none."""
    for name, column in table.columns.items():
        if column.dtype != object or name in (*choice.features, *choice.labels):
            continue
        looked_at = column[:_ROWS_AT_ONCE]
        few = len(looked_at) // 10
        wrong = (text for text in looked_at if text and not _is_number(text))
        if 0 < len([*itertools.islice(wrong, few + 1)]) <= few:
            return f"{_first_text(table, name)}, where others are numbers, so it is no feature"
    return ""


def comma_hint(table: Table, before: str = "; ") -> str:
    """Which columns are text because their numbers have commas, as ``1,72`` or ``1,234,567``, and
    what to do, after ``before``; "" for none."""
    found = _columns_with_commas(table)
    hints = []
    for remedy in dict.fromkeys(found.values()):
        names = listed(name for name in found if found[name] == remedy)
        hints.append(f"columns that are text, because their numbers have commas: {names}; {remedy}")
    return before + "; ".join(hints) if hints else ""


def _columns_with_commas(table: Table) -> dict[str, str]:
    """What to do about the commas of each of these columns."""
    found = {}
    for name, column in table.columns.items():
        if column.dtype == object and any("," in cell for cell in column):
            cells = [cell for cell in column if cell.lower() not in _MISSING]
            if all(map(_THOUSANDS.fullmatch, cells)):
                found[name] = "write them without commas, as 1234567"
            elif all(map(_COMMAS.fullmatch, cells)):
                found[name] = "write them with a decimal point, as 1.72"
    return found


def missing_rows(column: np.ndarray) -> np.ndarray:
    """The rows of a column that have no value, bool [N]."""
    if column.dtype == object:
        return column == ""
    return (
        np.isnan(column.reshape(len(column), -1)).any(1)
        if column.dtype.kind == "f"
        else (np.zeros(len(column), bool))
    )


def _check_filled(table: Table, choice: Choice, chosen_for_it: bool) -> None:
    """Refuses features that have no value, and nothing that stands for it."""
    counts = {name: int(missing_rows(table.columns[name]).sum()) for name in choice.features}
    lacking = {name: n for name, n in counts.items() if n and name not in choice.missing}
    if not lacking:
        return
    said = [f"{plain(name)} in {count}" for name, count in [*lacking.items()][1:]]
    also = f" (and {listed(said)})" if said else ""
    remedy = "add --missing=drop, which leaves these rows out"
    if chosen_for_it and all(table.columns[name].ndim == 1 for name in lacking):
        mean = "--missing=mean, which takes the mean of the training examples"
        remedy = f"add {mean}, or {remedy.removeprefix('add ')}"
    if chosen_for_it and (whole := _flag(name for name in choice.features if name not in lacking)):
        remedy += f", or leave {'them' if said else 'it'} out{whole}"
    empty = [name for name, count in lacking.items() if count == len(table)]
    rest = _flag(name for name in choice.features if name not in empty)
    if chosen_for_it and empty and rest:  # no other remedy helps
        what = f"{table.name}: {listed(empty)} has no value in any row"
        raise UsageError(f"{what}: leave {'them' if empty[1:] else 'it'} out{rest}")
    first = next(iter(lacking))
    raise UsageError(_no_value(table, quoted(first), first, also, remedy))


def _check_labels(table: Table, name: str, why: str = "") -> None:
    """Refuses labels that are missing, infinite or too large. ``why`` says why this column has the
    labels."""
    if missing_rows(table.columns[name]).any():
        other = "name another column with --labels, " if why else ""
        remedy = f"{other}fill them, or add --missing=drop, which leaves these rows out"
        raise UsageError(_no_value(table, f"the label {quoted(name)}{why}", name, "", remedy))
    _check_size(table, name)


def _no_value(table: Table, what: str, name: str, also: str, remedy: str) -> str:
    rows = np.flatnonzero(missing_rows(table.columns[name]))
    return (
        f"{table.where(rows[0])}: {what} has no value, as in {len(rows)} of {len(table)} "
        f"rows{also}: {remedy}"
    )


def _check_size(table: Table, name: str) -> None:
    """Refuses values that are infinite or too large."""
    column = table.columns[name]
    if column.dtype.kind == "f":
        flat = np.abs(column.reshape(len(column), -1))
        rows = np.flatnonzero((flat > np.finfo(np.float32).max).any(axis=1))
        if len(rows):
            infinite = np.isinf(flat[rows[0]]).any()
            what = "infinite" if infinite else "too large for float32"
            raise UsageError(f"{table.where(rows[0])}: {quoted(name)} is {what}")


def described(table: Table, choice: Choice) -> list[list[str]]:
    """Rows for the log: column, use, type, minimum, maximum, missing values."""
    rows = [["column", "used as", "type", "minimum", "maximum", "missing"]]
    for name, column in table.columns.items():
        use = "feature" if name in choice.features else "label" if name in choice.labels else "-"
        use = "index" if use == "-" and is_index(table, name) else use
        use = "one-hot" if name in choice.words else use
        low, high = "", ""
        if column.dtype == object:
            kind = f"text, {_count_words(table, name)} values"
        else:
            finite = column[np.isfinite(column)]
            whole = column.dtype.kind != "f" or (finite == np.floor(finite)).all()
            kind = "integer" if whole else "number"
            if column.ndim > 1:
                kind = f"{column.dtype} {'x'.join(map(str, column.shape[1:]))}"
            if finite.size:
                low, high = f"{finite.min():g}", f"{finite.max():g}"
        lacking = str(int(missing_rows(column).sum()))
        if name in choice.missing and lacking != "0":
            instead = choice.missing[name]
            lacking += " as no word" if isinstance(instead, str) else f" as {instead:g}"
        rows.append([plain(name), use, kind, low, high, lacking])
    return rows
