"""Files of records that are read in any order: TFRecord, ArrayRecord and lines of text."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from ctl.base.remote import AnyPath, PathLike, StorePath, located, read_spans
from ctl.data import crc, index
from ctl.errors import UsageError

# A record of a TFRecord file is its length (8 bytes), the checksum of that (4), data, and the
# checksum of these (4), all little-endian. See tensorflow/core/lib/io/record_writer.h.
_HEADER, _FOOTER = 12, 4
_INDEXED_AT_ONCE = 1 << 16


class BadRecord(Exception):
    """An example that cannot be read or decoded; ``--on_bad_record`` says what follows.

    Attributes:
        index: of the example in its source.
        what: what is wrong with it, with the file and the number of the record in the file.
    """

    def __init__(self, index: int, what: str):
        super().__init__(what)
        self.index = index
        self.what = what


class Records:
    """Records of several files, numbered file after file. A subclass reads them.

    Args:
        paths: of the files, or of one file.
        decode: makes one example of one record, a scalar string, by operations of TensorFlow.
        name: of the data.
    """

    def __init__(
        self,
        paths: Sequence[PathLike] | PathLike,
        decode: Callable[[Any], Any] | None = None,
        *,
        name: str = "records",
    ):
        several = [paths] if isinstance(paths, str | os.PathLike | StorePath) else paths
        self.paths = [located(path) for path in several]
        if not self.paths:
            raise UsageError(f"{name}: there are no files to read")
        if decode:
            self.decode = decode
        self.name = name

    def counts(self) -> np.ndarray:
        """Records in each file, int64 [files]."""
        raise NotImplementedError

    @functools.cached_property
    def begins(self) -> np.ndarray:
        """The first record of each file, and the number of all, int64 [files + 1]."""
        return np.cumsum([0, *self.counts()])

    def __len__(self) -> int:
        return int(self.begins[-1])

    def locate(self, indices: Any) -> tuple[Any, Any]:
        """The file of each record of ``indices``, int64 [...], and its number in the file."""
        files = np.searchsorted(self.begins, indices, side="right") - 1
        return files, indices - self.begins[files]

    def where(self, index: int) -> str:
        """The file of a record and its number there, from 0."""
        file, number = self.locate(index)
        return f"{self.paths[file].name}, record {number}"

    def content_hash(self) -> str:
        """Returns what identifies the data: names and sizes of the files."""
        return str([(path.name, path.stat().st_size) for path in self.paths])


class TFRecords(Records):
    """Files in TFRecord, uncompressed. Their headers are read once, see `ctl.data.index`."""

    reads_quickly = (
        True  # by no code of the user's, so `Streaming` may read ahead for several steps
    )

    @functools.cached_property
    def _offsets(self) -> list[np.ndarray]:
        return index.offsets(self.paths, _walk, "tfrecord")

    def counts(self) -> np.ndarray:
        """See `Records.counts`."""
        return np.array([len(offsets) - 1 for offsets in self._offsets])

    @functools.cached_property
    def _file(self) -> Callable[[int], Any]:
        return index.opener(self.paths)

    def read(self, indices: np.ndarray) -> list[bytes]:
        """Returns the records at ``indices``, int64 [n]. Neighbours are read together.

        Raises:
            BadRecord: a checksum is wrong, or the file has become shorter.
            OSError: the file cannot be read.
        """
        if not len(indices):  # the share of a replica may be empty
            return []
        files, numbers = self.locate(indices)
        order = np.lexsort((numbers, files))
        files, numbers = files[order], numbers[order]
        begins, ends = np.empty_like(numbers), np.empty_like(numbers)
        for file in np.unique(files).tolist():
            rows, offsets = files == file, self._offsets[file]
            begins[rows], ends[rows] = offsets[numbers[rows]], offsets[numbers[rows] + 1]
        is_next = (np.diff(files) == 0) & (np.diff(numbers) == 1)
        firsts = np.flatnonzero(np.append(True, ~is_next))  # of runs of neighbours
        sizes = np.append(ends[firsts[1:] - 1], ends[-1]) - begins[firsts]
        runs = zip(*(of.tolist() for of in (files[firsts], sizes, begins[firsts])), strict=True)
        spans = [(self._file(file), size, begin) for file, size, begin in runs]
        parts = read_spans(spans)
        for first, part, (_, size, _) in zip(firsts.tolist(), parts, spans, strict=True):
            if len(part) < size:
                self._bad(indices[order[first]], "the file has become shorter")
        data, lengths = b"".join(parts), ends - begins
        bytes_of, ends = np.frombuffer(data, np.uint8), np.cumsum(lengths)
        begins = ends - lengths
        headers = bytes_of[begins[:, None] + np.arange(8)].view("<u8")[:, 0]
        stored = bytes_of[ends[:, None] + np.arange(-_FOOTER, 0)].view("<u4")[:, 0]
        of_records = zip((begins + _HEADER).tolist(), (ends - _FOOTER).tolist(), strict=True)
        records = [data[begin:end] for begin, end in of_records]
        for wrong, what in (
            (headers != lengths - _HEADER - _FOOTER, "the length has changed"),
            (crc.masked(records) != stored, "corrupted record: its checksum is wrong"),
        ):
            if wrong.any():
                self._bad(indices[order[wrong.argmax()]], what)
        result: list[bytes] = [b""] * len(indices)
        for row, record in zip(order.tolist(), records, strict=True):
            result[row] = record
        return result

    def _bad(self, row: int, what: str) -> NoReturn:
        raise BadRecord(int(row), f"{self.where(int(row))}: {what}")


def _walk(path: AnyPath) -> Iterator[np.ndarray]:
    """Yields the offsets of the records of a TFRecord file, and where it ends."""
    size, offset, number = path.stat().st_size, 0, 0
    offsets, headers = [], []
    with path.open("rb", buffering=0) as file:
        if not isinstance(path, StorePath):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while offset < size:
            file.seek(offset)
            header = file.read(_HEADER)
            offsets.append(offset)
            headers.append(header)
            offset += int.from_bytes(header[:8], "little") + _HEADER + _FOOTER
            whole = len(header) == _HEADER and offset <= size
            if len(offsets) == _INDEXED_AT_ONCE or offset >= size or not whole:
                _check_headers(path, number, headers, whole, offsets)
                yield np.array(offsets, np.int64)
                number += len(offsets)
                offsets, headers = [], []
    yield np.array([offset], np.int64)


def _check_headers(
    path: AnyPath, first: int, headers: list[bytes], whole: bool, offsets: list[int]
) -> None:
    """Raises `UsageError` for the first header of a wrong checksum, or for a file cut short."""
    complete = [header for header in headers if len(header) == _HEADER]  # the last may be cut
    sums = crc.masked([header[:8] for header in complete])
    stored = np.array([int.from_bytes(header[8:], "little") for header in complete], np.uint32)
    wrong = np.flatnonzero(sums != stored)
    if len(wrong):
        number, what = int(wrong[0]), "corrupted record: the checksum of its length is wrong"
    elif not whole:
        number, what = len(headers) - 1, "it is truncated"
    else:
        return
    intact, begin = first + number, offsets[number]
    if not intact and (kind := compression(headers[0])):
        raise UsageError(
            f"{path} is compressed ({kind}), so its records cannot be read in any order: write it "
            "without compression" + (f", as gzip -dc {path.name} does" if kind == "GZIP" else "")
        )
    remedy = "prepare it again"
    if intact:
        remedy += f", or keep the {intact} records before it: truncate -s {begin} {path.name}"
    raise UsageError(
        f"{path.name}, record {intact}: the file is damaged: {what}, and what follows in this file "
        f"cannot be found, also not to skip it; {remedy}"
    )


def compression(begin: bytes) -> str:
    """The compression of a file that has these first bytes: ``GZIP``, ``ZLIB``, or "" for none."""
    if begin[:2] == b"\x1f\x8b":
        return "GZIP"
    is_zlib = begin[:1] == b"\x78" and int.from_bytes(begin[:2], "big") % 31 == 0  # RFC 1950
    return "ZLIB" if is_zlib else ""


class Lines(Records):
    """Lines of text files. Where each begins is read once, see `ctl.data.index`. Blank lines are
    left out. A base of sources."""

    def __init__(self, paths: Sequence[PathLike] | PathLike, *, name: str = "lines"):
        super().__init__(paths, name=name)
        self._offsets = index.offsets(self.paths, _walk_lines, "lines")
        # The lines of each file that are not blank, where some are.
        self._lines = [
            None if (offsets >= 0).all() else np.flatnonzero(offsets[:-1] >= 0)
            for offsets in self._offsets
        ]
        self.opened = index.opener(self.paths)

    def counts(self) -> np.ndarray:
        """Lines in each file that are not blank, int64 [files]."""
        pairs = zip(self._offsets, self._lines, strict=True)
        return np.array([len(o) - 1 if lines is None else len(lines) for o, lines in pairs])

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The files of records, int64 [n], and their lines there, from 0."""
        files, lines = self.locate(indices)
        for file in {*files.tolist()}:
            if (filled := self._lines[file]) is not None:
                lines = np.where(files == file, filled[np.where(files == file, lines, 0)], lines)
        return files, lines

    def span(self, file: int, line: int, count: int = 1) -> tuple[int, int]:
        """Where ``count`` lines of a file begin and end: the first is not blank."""
        begin, end = int(self._offsets[file][line]), int(self._offsets[file][line + count])
        return begin, max(end, ~end)

    def where(self, index: int) -> str:
        """The file of a line and its number there, from 1."""
        (file,), (line,) = self.places(np.array([index]))
        return f"{self.paths[file].name}, line {line + 1}"


def _walk_lines(path: AnyPath) -> Iterator[np.ndarray]:
    """Yields where the lines of a file begin, of blank ones ``~`` that, and where it ends. The last
    line may lack its newline."""
    begin, rest = 0, b""
    with path.open("rb") as file:
        while text := rest + (read := file.read(1 << 22)):
            codes = np.frombuffer(text, np.uint8)
            ends = np.flatnonzero(codes == ord("\n")) + 1 if read else np.array([len(text)])
            edges = np.concatenate([[0], ends])
            begins = begin + edges[:-1]
            for line in np.flatnonzero(codes[edges[:-1]] <= ord(" ")).tolist():
                if text[edges[line] : edges[line + 1]].isspace():
                    begins[line] = ~begins[line]
            if len(begins):
                yield begins
            begin, rest = begin + int(edges[-1]), text[edges[-1] :]
    yield np.array([begin], np.int64)


class ArrayRecords(Records):
    """Files in ArrayRecord, which have an index of their own; best of group_size 1, as of TFDS."""

    reads_quickly = True

    @functools.cached_property
    def _readers(self) -> list[Any]:
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError as error:
            raise UsageError("ArrayRecord needs a package: pip install array_record") from error

        def open_reader(path: AnyPath) -> Any:
            reader = ArrayRecordReader(
                str(path.copied() if isinstance(path, StorePath) else path),
                options="readahead_buffer_size:0,max_parallelism:0",
                file_reader_buffer_size=1 << 15,
            )
            if not reader.ok():
                raise UsageError(f"{path} cannot be read as ArrayRecord: prepare it again")
            return reader

        for path in self.paths:
            with index.readable(path):
                path.open("rb").close()
        return [open_reader(path) for path in self.paths]

    def counts(self) -> np.ndarray:
        """See `Records.counts`."""
        return np.array([reader.num_records() for reader in self._readers])

    def read(self, indices: np.ndarray) -> list[bytes]:
        """Returns the records at ``indices``, int64 [n]. Raises `BadRecord` for one that its file
        cannot give."""
        files, numbers = self.locate(indices)
        result: list[bytes] = [b""] * len(indices)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            try:
                records = self._readers[file].read(numbers[rows].tolist())
            except Exception:  # of what kind depends on the damage; which record, it does not say
                pairs = zip(indices[rows].tolist(), numbers[rows].tolist(), strict=True)
                records = [self._read_one(file, *pair) for pair in pairs]
            for row, record in zip(rows.tolist(), records, strict=True):
                result[row] = record
        return result

    def _read_one(self, file: int, index: int, number: int) -> bytes:
        try:
            (record,) = self._readers[file].read([number])
        except Exception as error:
            what = str(error).splitlines()[0][:150]
            raise BadRecord(index, f"{self.where(index)}: corrupted record: {what}") from error
        return record
