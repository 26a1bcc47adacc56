"""Files and arrays that are not what they should be: one line that names them, or skipped, and
never other values. No case starts a process or a pipeline."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

from ctl.data import InMemory, Streaming, text
from ctl.data.errors import translate_data_errors
from ctl.data.load import read_all
from ctl.data.records import ArrayRecords, TFRecords
from ctl.data.sources import ImageFolder, JsonLines, mapped
from ctl.errors import UsageError

RECORDS = [bytes([65 + n]) * 9 for n in range(4)]
LINES = [{"x": n + 0.5, "y": [n, 2]} for n in range(4)]
ARRAY = np.arange(1, 9, dtype=">i4").reshape(4, 2)


def of_tfrecord() -> bytes:
    path = Path("records")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in RECORDS:
            writer.write(record)
    return path.read_bytes()


def of_array_record() -> bytes:
    path = Path("array_records")
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in RECORDS:
        writer.write(record)
    writer.close()
    return path.read_bytes()


def of_npy() -> bytes:
    file = io.BytesIO()
    np.save(file, ARRAY)
    return file.getvalue()


def of_json() -> bytes:
    return "".join(f'{{"x": {line["x"]}, "y": {line["y"]}}}\n' for line in LINES).encode()


# What makes a file, what opens it, and the values that may be read.
READERS = {
    "TFRecords": (of_tfrecord, TFRecords, RECORDS),
    "ArrayRecords": (of_array_record, ArrayRecords, RECORDS),
    "mapped": (of_npy, mapped, ARRAY.tolist()),
    "JsonLines": (of_json, JsonLines, [(line["x"], *line["y"]) for line in LINES]),
}


def rows(data) -> list:
    if isinstance(data, dict):
        return [(x, *y) for x, y in zip(data["x"].tolist(), data["y"].tolist(), strict=True)]
    return data.tolist()


def malformed(content: bytes):
    """Files like ``content``, cut short, changed, in another encoding, or of something else."""
    yield from (content[:end] for end in range(0, len(content), max(1, len(content) // 60)))
    yield from (b"\n", b"\0" * 99, b"no such format, whatever it is\n" * 9, b"PK\3\4" + content)
    yield from (b"\xef\xbb\xbf" + content, content + b"\0", content + content[:9], content[1:])
    yield content.decode("latin-1").encode("utf-16")
    yield content.replace(b"\n", b"\r\n")
    yield b"\x1f\x8b" + content


@pytest.mark.parametrize("kind", READERS)
def test_a_malformed_file_is_refused_or_skipped(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, opened, values = READERS[kind]
    content, path = make(), tmp_path / "file"
    refused, read = 0, 0
    for bad in [content, *malformed(content)]:
        path.unlink(missing_ok=True)  # one that is mapped must not shrink
        path.write_bytes(bad)
        for on_bad_record in ("stop", "skip"):
            try:
                stream = Streaming(
                    opened(path), global_batch_size=1, training=False, on_bad_record=on_bad_record
                )
                got = rows(stream.read(np.arange(stream.num_examples)))
            except UsageError as error:
                said = str(error)
                assert "\n" not in said and len(said) < 500, said
                assert "file" in said or said == "the dataset has no examples", said
                assert on_bad_record == "stop" or "--on_bad_record=skip" not in said, said
                refused += 1
            else:
                assert all(row in values for row in got), (bad, got)
                assert bad != content or got == values
                read += 1
    assert refused > 20 and read > 1


def images() -> dict[str, bytes]:
    pixels = tf.constant(np.arange(192).reshape(8, 8, 3), tf.uint8)
    return {
        "a.png": tf.io.encode_png(pixels).numpy(),
        "a.jpg": tf.io.encode_jpeg(pixels).numpy(),
    }


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_malformed_image_is_named(name, tmp_path):
    (tmp_path / "cat").mkdir()
    content = images()[name]
    for bad in (b"", b"no image", *(content[: len(content) * part // 4] for part in (1, 2, 3))):
        (tmp_path / "cat" / name).write_bytes(bad)
        with pytest.raises(UsageError, match=f"cat/{name} cannot be decoded") as error:
            Streaming(ImageFolder(tmp_path, (8, 8, 3)), global_batch_size=1)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_what_is_said_of_a_malformed_image_is_not_of_the_pipeline(name, tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(images()["a.png"])  # the first one is looked at alone
    (tmp_path / "cat" / name).write_bytes(images()[name][:-20])
    with pytest.raises(UsageError, match=f"cat/{name} cannot be decoded: .*; prepare") as error:
        read_all(ImageFolder(tmp_path, (8, 8, 3)))
    assert "Iterator" not in str(error.value) and "passed to" not in str(error.value)


@pytest.mark.parametrize("empty", ["", "cat", ".hidden"])
def test_a_folder_without_images(tmp_path, empty):
    (tmp_path / empty).mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="has no images: it needs a folder for each class"):
        ImageFolder(tmp_path, (8, 8, 3))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_records_are_no_damaged_ones(tmp_path, compression):
    path = tmp_path / "file"
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        writer.write(RECORDS[0])
    with pytest.raises(UsageError, match=rf"file is compressed \({compression}\).* without comp"):
        len(TFRecords(path))


def test_what_is_lost_of_a_damaged_file_and_how_to_keep_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, path = of_tfrecord(), tmp_path / "file"
    for bad in (content[:60], content[:51] + b"?" + content[52:]):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="keep the 2 records before it: truncate -s 50 file"):
            len(TFRecords(path))
    path.write_bytes(content[:50])
    assert TFRecords([path]).read(np.arange(2)) == RECORDS[:2]


class Own:
    """Numbers as bytes, of the user's."""

    def __init__(self, **methods):
        vars(self).update(methods)

    def __len__(self):
        return 6

    def read(self, indices):
        return [str(index).encode() for index in indices.tolist()]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"read": lambda i: [b"x"] * (len(i) + 1)}, r"of 1 examples gave an array of shape \[2\]"),
        ({"read": lambda i: []}, r"of 1 examples gave an array of shape \[0\]"),
        ({"read": lambda i: [b"x"]}, r"of 2 examples gave an array of shape \[1\]"),
        ({"read": lambda i: None}, "objects .NoneType."),
        ({"decode": lambda row: None}, r"decode\(\) returns NoneType"),
        ({"decode": lambda row: ()}, r"decode\(\) returns nothing"),
        ({"decode": lambda row: tf.RaggedTensor.from_row_lengths([1], [1])}, "returns RaggedTen"),
    ],
)
def test_a_source_that_does_not_do_as_it_should(methods, says):
    with pytest.raises(UsageError, match=says):
        Streaming(Own(**methods), global_batch_size=2).read(np.arange(2))


def test_examples_that_are_decoded_to_different_shapes_are_named():
    def decode(row):
        return tf.ones([tf.strings.to_number(row, tf.int32) // 3])

    for options in ({}, {"on_bad_record": "skip"}):
        stream = Streaming(Own(decode=decode), global_batch_size=6, training=False, **options)
        says = r"decode\(\) makes shapes \[\[1\]\] of example 3, and \[\[0\]\] of others"
        with pytest.raises(UsageError, match=says), translate_data_errors(stream):
            list(stream.batches())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["abc"], "text 0 is a str: give bytes, as text.encode"),
        ("abc", "texts is one str: give a list"),
        (b"abc", "texts is one bytes: give a list"),
        ([b"a", None], "text 1 is a NoneType"),
        ([b"a", 3], "text 1 is a int"),
        ([[[1], [1, 2]]], "text 0 has lists of different lengths"),
        ([[[1, 2]]], r"text 0 has the shape \[1, 2\]"),
        ([["a"]], "tokens must be integers"),
    ],
)
def test_what_is_no_text(given, says):
    for rows_of in (text.pack, text.pad, text.windows):
        with pytest.raises(UsageError, match=says):
            rows_of(given, 4)


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "4"])
def test_what_is_no_length_of_a_row(length):
    for rows_of in (text.pack, text.pad, text.windows):
        with pytest.raises(UsageError, match="length of a row must be a whole number from 1"):
            rows_of([b"abc"], length)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy before 2.0")
def test_strings_of_numpy_2():
    names = np.array(["é", "", "a longer one"], np.dtypes.StringDType())
    stream = Streaming(names, global_batch_size=1, training=False)
    assert stream.read(np.arange(3)).tolist() == list(names)
    assert stream.fingerprint()
    assert InMemory(names, global_batch_size=1).arrays.tolist() == list(names)
    missing = np.array(["a", None], np.dtypes.StringDType(na_object=None))
    for make in (Streaming, InMemory):
        with pytest.raises(UsageError, match="objects .NoneType."):
            make(missing, global_batch_size=1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: Streaming(str(path), global_batch_size=1), "a str is not a source"),
        (lambda path: Streaming(([[1], [1, 2]],), global_batch_size=1), "lists of different len"),
        (lambda path: InMemory(([[1], [1, 2]],), global_batch_size=1), "equal leading dimensions"),
        (lambda path: mapped([path]), "is no path: give a str"),
        (lambda path: ImageFolder([path], (4, 4, 3)), "is no path: give a str"),
        (lambda path: TFRecords([None]), "None is no path"),
        (lambda path: JsonLines([[path]]), "is no path"),
    ],
)
def test_what_is_no_data(make, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        make(tmp_path)


def test_one_path_is_not_a_sequence_of_letters(tmp_path):
    path = tmp_path / "file é"
    path.write_bytes(of_json())
    for given in (path, str(path)):
        assert len(JsonLines(given)) == len(LINES)
    (tmp_path / "é.npy").write_bytes(of_npy())
    np.testing.assert_array_equal(mapped(str(tmp_path / "é.npy")), ARRAY)
