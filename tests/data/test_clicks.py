"""Click data of Criteo's form: values against a slow reference, files and parts, damage; and those
that are drawn at random."""

from __future__ import annotations

import gzip
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from ctl.base.names import click_files, has_table
from ctl.data import Files
from ctl.data.clicks import FIELDS, ClickLines, source
from ctl.data.datasets import clicks as drawn
from ctl.data.feed import open_batches
from ctl.errors import UsageError

COUNT = 3000
SUFFIXES = (".txt", ".txt.gz", ".tfrecord")
GOOD = "\t".join(["1", *["5"] * 13, *["0000abcd"] * 26])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The same examples in each format; and the lines."""
    root = tmp_path_factory.mktemp("clicks")
    for suffix in SUFFIXES:
        drawn.write(root / f"train{suffix}", 0, COUNT)
    return root, (root / "train.txt").read_text().splitlines()


def slow(lines):
    """What `source` gives for ``lines``, cell by cell."""
    rows = [line.split("\t") for line in lines]
    dense = [[float(int(cell or "0")) for cell in row[1:14]] for row in rows]
    ids = [[int(cell or "0", 16) for cell in row[14:]] for row in rows]
    labels = [float(row[0]) for row in rows]
    return {"dense": np.float32(dense), "ids": np.array(ids)}, np.float32(labels)


def equal(found, wanted):
    tf.nest.assert_same_structure(found, wanted)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def with_other_keys(path, lines):
    """TFRecord with the keys of TensorFlow's examples."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for line in lines:
            example = tf.train.Example()
            for number, cell in enumerate(line.split("\t")):
                if number == 0:
                    example.features.feature["clicked"].int64_list.value.append(int(cell))
                elif cell and number < 14:
                    feature = example.features.feature[f"int-feature-{number}"]
                    feature.int64_list.value.append(int(cell))
                elif cell:
                    feature = example.features.feature[f"categorical-feature-{number}"]
                    feature.bytes_list.value.append(cell.encode())
            writer.write(example.SerializeToString())


@pytest.mark.parametrize("suffix", [*SUFFIXES, "other"])
def test_values_are_those_of_a_slow_reference(written, tmp_path, suffix):
    root, lines = written
    path = root / f"train{suffix}"
    if suffix == "other":
        with_other_keys(path := tmp_path / "train.tfrecord", lines)
    examples = source([path], "clicks")
    assert len(examples) == COUNT
    wanted = slow(lines)
    cells = [cell for line in lines for cell in line.split("\t")]
    assert "" in cells and any(cell.startswith("-") for cell in cells)
    equal(examples.read(np.arange(COUNT)), wanted)
    rows = np.random.default_rng(0).integers(COUNT, size=257)
    equal(examples.read(rows), tf.nest.map_structure(lambda a: a[rows], wanted))
    part = examples.part(np.arange(0, COUNT, 7)).part(np.arange(5, 50))
    assert len(part) == 45
    equal(part.read(np.array([3])), tf.nest.map_structure(lambda a: a[[56]], wanted))


def test_what_lines_may_look_like(tmp_path):
    """Empty cells; capitals; large numbers; blank lines; several files; no newline at the end; the
    ends of lines of Windows."""
    empty = "\t".join(["0", *[""] * 39])
    odd = "\t".join(["0", "-0", "-123456789012", "00012", *["7"] * 10, *["FFFFFFFF"] * 26])
    (tmp_path / "a").write_bytes(f"\n{GOOD}\r\n\n{empty}\r\n".encode())
    (tmp_path / "b").write_text(f"{odd}\n \n{empty}\n{GOOD}")
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        file.write((tmp_path / "a").read_bytes())
    wanted = slow([GOOD, empty, odd, empty, GOOD])
    plain = source([tmp_path / "a", tmp_path / "b"], "clicks")
    equal(plain.read(np.arange(5)), wanted)
    assert [plain.where(row) for row in (1, 2, 4)] == ["a, line 4", "b, line 1", "b, line 4"]
    equal(source([tmp_path / "a.gz", tmp_path / "b"], "clicks").read(np.arange(5)), wanted)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_batches_are_the_same_on_two_replicas_and_from_any_step(written, mirrored, suffix):
    files = Files(written[0] / f"train{suffix}")

    def batches(replicas, start, end):
        dataset = files.load(
            "train[:90%]", global_batch_size=256, training=True, seed=3, resident_limit_mib=0
        )
        strategy = mirrored(replicas)
        iterator = open_batches(dataset, strategy, start)
        for _ in range(start, end):
            parts = strategy.experimental_local_results(dataset.on_replica(next(iterator), ()))
            yield tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *parts)

    whole = [*batches(1, 0, 12)]  # an epoch has 10.5
    for found, wanted in zip(batches(2, 5, 12), whole[5:], strict=True):
        equal(found, wanted)


DAMAGED = [
    (GOOD.rsplit("\t", 1)[0], "it has 39 fields, and click data have 40: a file without labels"),
    (GOOD + "\t5", "it has 41 fields, and click data have 40"),
    ("x", "it has 1 fields"),
    (GOOD.replace("1", "2", 1), "label is '2', neither 0 nor 1"),
    (GOOD[1:], "label is '', neither"),
    (GOOD.replace("5", "5x", 1), "I1 is '5x', not an integer"),
    (GOOD.replace("5\t0", "-\t0", 1), "I13 is '-', not an integer"),
    (GOOD.replace("5", "1.5", 1), "I1 is '1.5', not an integer"),
    (GOOD.replace("5", "9" * 19, 1), f"I1 is '{'9' * 19}', not an integer"),
    (GOOD.replace("5", "9" * 500, 1), f"I1 is '{'9' * 39}…, not an integer"),
    (GOOD.replace("0000abcd", "0000abcg", 1), "C1 is '0000abcg', not 8 hexadecimal digits"),
    (GOOD[:-1], "C26 is '0000abc', not 8 hexadecimal digits"),
    (GOOD + "é", "C26 is '0000abcdé', not 8"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_a_damaged_line_is_named_or_skipped(tmp_path, line, message):
    other = GOOD.replace("5", "6")
    (tmp_path / "train.txt").write_text("\n".join([GOOD, "", line, other, GOOD]) + "\n")
    (tmp_path / "train.txt.gz").write_bytes(
        gzip.compress((tmp_path / "train.txt").read_bytes(), mtime=0)
    )
    message = f"line 3: {message}"
    for name in ("train.txt", "train.txt.gz"):
        with pytest.raises(UsageError, match=re.escape(f"{name}, {message}")) as raised:
            load(Files(tmp_path / name), "train")
        assert "\n" not in str(raised.value) and "on_bad_record='skip'" in str(raised.value)
    (features, _) = load(Files(tmp_path / "train.txt"), "train", on_bad_record="skip").arrays
    assert features["dense"][:, 0].tolist() == [5, 6, 6, 5]


def load(files, split, **options):
    return files.load(split, global_batch_size=2, training=False, **options)


def example(**features):
    made = tf.train.Example()
    for name in FIELDS:
        value = features.get(name, 1 if name[0] in "lI" else b"0000abcd")
        feature = made.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif isinstance(value, int):
            feature.int64_list.value.append(value)
        elif isinstance(value, float):
            feature.float_list.value.append(value)
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(label=None), "it has other features than click data"),
        (example(I3=1.5), "it has other features than click data"),
        (example(C3=5), "it has other features than click data"),
        (b"none", "it has other features than click data"),
        (example(label=2), "label is '2', neither 0 nor 1"),
        (example(C3=b"abc"), "C3 is 'abc', not 8 hexadecimal digits"),
        (example(C26=b"0000abcg"), "C26 is '0000abcg', not 8 hexadecimal digits"),
    ],
    ids=["no label", "float", "integer", "no example", "label 2", "short", "letter"],
)
def test_a_damaged_record_is_named_or_skipped(tmp_path, record, message):
    with tf.io.TFRecordWriter(str(tmp_path / "train.tfrecord")) as writer:
        for one in (example(), record, example(I1=6)):
            writer.write(one)
    files = Files(tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"train.tfrecord, record 1: {message}")) as why:
        load(files, "train")
    assert "\n" not in str(why.value)
    (features, _) = load(files, "train", on_bad_record="skip").arrays
    assert features["dense"][:, 0].tolist() == [1, 6, 6]


def test_compressed_files_that_are_cut_short(tmp_path):
    text = gzip.compress(f"{GOOD}\n".encode() * 1000)
    (tmp_path / "train.txt.gz").write_bytes(text[:-20])
    with pytest.raises(UsageError, match=r"train\.txt\.gz is damaged: Compressed file ended"):
        Files(tmp_path / "train.txt.gz")
    options = tf.io.TFRecordOptions(compression_type="GZIP")
    with tf.io.TFRecordWriter(str(tmp_path / "train.tfrecord"), options) as writer:
        writer.write(example())
    with pytest.raises(UsageError, match=r"train\.tfrecord is compressed \(GZIP\).* write it with"):
        load(Files(tmp_path / "train.tfrecord"), "train")


def test_a_file_that_becomes_shorter(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(f"{GOOD}\n" * 9)
    examples = ClickLines([path])
    path.write_text(f"{GOOD}\n" * 4)
    with pytest.raises(Exception, match=r"train\.txt, line 6: the file has become shorter"):
        examples.read(np.array([2, 5]))


def test_the_last_of_several_days_is_the_test(tmp_path):
    for day in (0, 2, 10):
        drawn.write(tmp_path / f"day_{day}", day * 50, day * 50 + 40)
    files = Files(tmp_path)
    assert files.splits() == ("train", "test", None)
    train, test = (load(files, split) for split in ("train", "test"))
    assert (train.num_examples, test.num_examples) == (80, 40)
    equal(test.arrays, slow((tmp_path / "day_10").read_text().splitlines()))
    assert files.table()[-1].split() == ["all", "80", "40"]
    assert train.info.num_outputs == 1 and train.info.num_classes is None


def test_a_tenth_is_held_out_without_a_part_for_it(written):
    files = Files(written[0] / "train.txt")
    assert files.splits() == ("train[:90%]", "train[90%:]", None)
    both = [load(files, split).arrays[0]["ids"] for split in files.splits()[:2]]
    assert [len(part) for part in both] == [2700, 300]
    rows = np.concatenate(both)
    equal(np.sort(rows, axis=0), np.sort(slow(written[1])[0]["ids"], axis=0))


def test_which_files_are_click_data(tmp_path):
    def folder(name, *files):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text("")
        return str(tmp_path / name)

    def names(dataset):
        return [file.removeprefix(dataset).lstrip("/") for file in click_files(dataset)]

    assert click_files("train.txt") == ["train.txt"] and click_files("day_3.gz") == ["day_3.gz"]
    assert names(folder("kaggle", "train.txt", "test.txt")) == ["test.txt", "train.txt"]
    assert names(folder("days", "day_10", "day_9.gz", "notes")) == ["day_9.gz", "day_10"]
    assert not names(images := folder("images", "cat/0.png", "train.txt")) and not has_table(images)
    assert not names(table := folder("table", "train.csv", "readme.txt")) and has_table(table)
    for name in ("photos", "wine.csv", "text.txt/", "mnist", "my.txt:load", "./missing"):
        assert not click_files(name)
    records = folder("records", "train.tfrecord")
    with tf.io.TFRecordWriter(f"{records}/train.tfrecord") as writer:
        writer.write(example())
    assert names(records) == ["train.tfrecord"] and not has_table(records)
    table = tf.train.Example()
    for name in ("C1", "label"):
        table.features.feature[name].int64_list.value.append(1)
    with tf.io.TFRecordWriter(f"{records}/train.tfrecord") as writer:
        writer.write(table.SerializeToString())
    assert not names(records) and has_table(records)


# Drawn ------------------------------------------------------------------------------------------


def test_drawn_examples_depend_on_the_seed_and_their_number_alone(tmp_path):
    drawn.write(tmp_path / "a.txt", 0, 9000)
    for name, begin, end in (("b.txt", 0, 8200), ("c.txt", 8200, 9000)):
        drawn.write(tmp_path / name, begin, end)
    whole, *parts = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    assert whole.read_bytes() == b"".join(part.read_bytes() for part in parts)
    drawn.write(tmp_path / "d.txt", 0, 100, seed=1)
    assert whole.read_bytes()[:5000] != (tmp_path / "d.txt").read_bytes()[:5000]
    for name in ("e.txt.gz", "f.txt.gz"):
        drawn.write(tmp_path / name, 0, 100)
    assert (tmp_path / "e.txt.gz").read_bytes() == (tmp_path / "f.txt.gz").read_bytes()


def test_drawn_examples_are_as_those_of_the_challenge():
    """The click rate, the values of a category, and their frequencies by a power law."""
    (one, *_) = parts = [*drawn.draw(0, 40_000)]
    labels = np.concatenate([part.labels for part in parts])
    assert abs(labels.mean() - 0.256) < 0.01
    for column, rows in enumerate(drawn.KAGGLE_ROWS):
        values, counts = np.unique(
            np.concatenate([part.hashes[:, column] for part in parts]), return_counts=True
        )
        assert len(values) <= rows and (rows > 100 or len(values) == rows)
        counts = np.sort(counts)[::-1]
        assert rows < 100 or 5 < counts[0] / counts[9] < 25  # 10 ** 1.1 is 12.6
    assert 0.1 < one.no_hash.mean() < 0.3 and one.numbers[:, 1].min() == -3


def test_the_auc_counts_pairs():
    labels = np.array([True, False, True, False, False])
    scores = np.array([0.9, 0.8, 0.3, 0.2, 0.1])
    pairs = [(p > n) for p in scores[labels] for n in scores[~labels]]
    assert drawn.auc(labels, scores) == pytest.approx(np.mean(pairs))
    assert math.isnan(drawn.auc(np.array([True]), np.array([0.5])))
