from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

from ctl.data import index
from ctl.data.records import ArrayRecords, BadRecord, TFRecords
from ctl.data.sources import JsonLines
from ctl.errors import UsageError

RECORDS = [bytes([n]) * n for n in range(40)]  # the first is empty


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of 25 and 15 records; an index is always kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_KEEP_SECONDS", 0.0)
    paths = [tmp_path / name for name in ("a", "b")]
    for path, part in zip(paths, (RECORDS[:25], RECORDS[25:]), strict=True):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in part:
                writer.write(record)
    return paths


def array_record(path: Path, records: list[bytes], options: str = "group_size:1") -> Path:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_records_in_any_order(files, tmp_path):
    parts = [array_record(tmp_path / "c", RECORDS[:25]), array_record(tmp_path / "d", RECORDS[25:])]
    order = np.random.default_rng(0).permutation(40)
    for records in (TFRecords(files), ArrayRecords(parts)):
        assert len(records) == 40
        assert records.read(order) == [RECORDS[n] for n in order]
        assert records.read(np.array([39, 3, 3])) == [RECORDS[n] for n in (39, 3, 3)]
        assert records.read(np.array([], np.int64)) == []
        assert records.where(27).endswith(", record 2")


def test_neighbours_are_read_together(files, monkeypatch):
    records, calls, pread = TFRecords(files), [], os.pread
    len(records)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: calls.append(size) or pread(fd, size, at))
    assert records.read(np.array([30, 5, 4, 6, 31])) == [RECORDS[n] for n in (30, 5, 4, 6, 31)]
    assert sorted(calls) == [3 * 16 + 15, 2 * 16 + 61]  # bytes of the records and no others


def test_the_index_is_kept_and_made_again_where_it_does_not_fit(files, tmp_path, monkeypatch):
    (first, second), walks = files, []
    whole = index.offsets(files, lambda path: walk(path), "test")

    def counted(path):
        walks.append(path.name)
        yield from walk(path)

    def look(wanted: str) -> None:
        walks.clear()
        for ours, theirs in zip(index.offsets(files, counted, "test"), whole, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert "".join(walks) == wanted

    look("")
    (kept,) = (tmp_path / "cache/ctl").iterdir()
    content = kept.read_bytes()
    for damaged in (content[:-9], content[:-1] + b"\xff", content[1:], b"", b"{}\n", b"[]\n"):
        kept.write_bytes(damaged)
        look("ab")
        look("")
    kept.parent.chmod(0o777)  # others may write there
    look("ab")
    assert kept.read_bytes() == content
    kept.parent.chmod(0o700)
    os.utime(second, ns=(1, 1))
    look("ab")
    look("")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # cannot be written
    look("ab")
    first.unlink()
    with pytest.raises(UsageError, match="a is missing"):
        index.offsets(files, counted, "test")


def walk(path):
    yield np.arange(path.stat().st_size)


def test_damage_is_named_by_file_and_record(files):
    path, other = files
    intact = path.read_bytes()
    offset = sum(len(record) + 16 for record in RECORDS[:7])
    damages = {
        "a, record 7: corrupted record: its checksum": (offset + 13, None),
        "a, record 7: .*checksum of its length": (offset + 1, None),
        "a, record 24: .*truncated": (None, -3),
        "a, record 7: .*truncated": (None, offset + 5),
    }
    for says, (flip, cut) in damages.items():
        content = bytearray(intact[:cut])
        if flip is not None:
            content[flip] ^= 1
        path.write_bytes(content)
        with pytest.raises((BadRecord, UsageError), match=says):
            TFRecords(files).read(np.arange(40))
    path.write_bytes(intact)
    records = TFRecords(files)
    len(records)
    other.write_bytes(b"")
    with pytest.raises(BadRecord, match="b, record 0: the file has become shorter"):
        records.read(np.array([25]))
    assert records.read(np.array([1])) == [RECORDS[1]]


def test_array_records_that_are_damaged(tmp_path):
    written = [np.random.default_rng(number).bytes(100) for number in range(9)]
    path = array_record(tmp_path / "a", written, "group_size:1,uncompressed")
    content = bytearray(path.read_bytes())
    content[content.index(written[5])] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadRecord, match="a, record 5: corrupted record"):
        ArrayRecords([path]).read(np.arange(9))
    assert ArrayRecords([path]).read(np.array([6, 4])) == [written[6], written[4]]
    path.write_bytes(b"no such format" * 99)
    with pytest.raises(UsageError, match="cannot be read as ArrayRecord"):
        len(ArrayRecords([path]))
    with pytest.raises(UsageError, match="missing"):
        len(ArrayRecords([tmp_path / "b"]))


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_OPEN_FILES", 3)
    paths = [tmp_path / f"{number}.jsonl" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}\n{10 + number}\n")
    lines = JsonLines(paths)
    assert [lines[n] for n in range(18)] == [n // 2 + 10 * (n % 2) for n in range(18)]
    links = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    assert sum(str(tmp_path) in link for link in links) == 3
