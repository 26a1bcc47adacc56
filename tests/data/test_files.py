"""Data in files of the user's: parts, splits, what the model is told, what config.json keeps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from ctl.base.names import BINARY, NUMBERS, has_table, loss_of
from ctl.data import Files, Splits, Streaming
from ctl.errors import UsageError
from ctl.flags.early import check_path

CLASSES = ("cat", "dog", "emu")


def write_images(folder, count: int, size=(4, 6), channels: int = 3) -> None:
    """``count`` images of each class; all bytes of the image n of the class c are 10 c + n."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            image = np.full([*size, channels], 10 * label + n, np.uint8)
            (folder / name / f"{n}.png").write_bytes(tf.io.encode_png(image).numpy())


def write_table(path, count: int = 40) -> None:
    """Sorted by class: ``count`` rows, half of each."""
    rows = [f"{n},{n % 3},{'ab'[2 * n // count]}" for n in range(count)]
    path.write_text("\n".join(["x,z,kind", *rows, ""]))


def load(files: Files, split: str, training: bool = True, **options):
    return files.load(split, training=training, global_batch_size=2, **options)


def test_a_folder_of_images(tmp_path):
    write_images(tmp_path, 8)
    files = Files(tmp_path)
    train = load(files, "train[:75%]")
    images, labels = train.arrays
    assert images.shape == (18, 4, 6, 3) and train.info.image_shape == (4, 6, 3)
    assert train.info.class_names == CLASSES and train.info.split == "train[:75%]"
    np.testing.assert_array_equal(images[:, 0, 0, 0] // 10, labels)
    held = load(files, "train[75%:]", training=False)
    seen = [*images[:, 0, 0, 0].tolist(), *held.arrays[0][:, 0, 0, 0].tolist()]
    assert sorted(seen) == sorted(10 * label + n for label in range(3) for n in range(8))
    assert len({*held.arrays[1].tolist()}) > 1  # the last rows would be one class
    assert files.table()[-1].split() == ["all", "18", "6"]


def test_parts_of_images_have_one_numbering(tmp_path):
    write_images(tmp_path / "train", 3)
    write_images(tmp_path / "val", 2)
    (tmp_path / "val" / "cat" / "0.png").unlink()
    (tmp_path / "val" / "cat" / "1.png").unlink()
    (tmp_path / "val" / "cat").rmdir()
    files = Files(tmp_path)
    assert files.splits() == ("train", "validation", None)
    assert load(files, "validation", training=False).arrays[1].tolist() == [1, 1, 2, 2]


def test_images_that_differ_in_size_are_resized(tmp_path, caplog):
    write_images(tmp_path, 2, channels=1)
    (tmp_path / "cat" / "0.png").write_bytes(
        tf.io.encode_png(np.zeros([5, 5, 1], np.uint8)).numpy()
    )
    assert load(Files(tmp_path), "train").info.image_shape == (64, 64, 1)
    files = Files(tmp_path, image_shape=(8, 8, 3))
    assert load(files, "train").info.image_shape == (8, 8, 3)


def test_a_cell_of_text_among_numbers_is_named(tmp_path, caplog):
    rows = [f"{n},{n % 7},{n % 2}" for n in range(30)]
    rows[4] = "4,N.N.,0"
    (tmp_path / "t.csv").write_text("\n".join(["age,rooms,label", *rows]))
    assert Files(tmp_path / "t.csv").schema["features"] == ("age",)
    wanted = "t.csv, line 6: 'rooms' is 'N.N.', where others are numbers, so it is no feature"
    assert wanted in caplog.text


def test_text_that_spells_numbers_alone_has_no_wrong_cell(tmp_path, caplog):
    lines = [json.dumps({"code": str(n), "age": n, "label": n % 2}) for n in range(20)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert Files(tmp_path / "t.jsonl").schema["features"] == ("age",)
    assert "where others are numbers" not in caplog.text


def test_colours_are_found_among_grey_images(tmp_path, caplog):
    """Also where every second one is grey."""
    for number in range(40):
        image = np.zeros([4, 4, 1 + 2 * (number % 2)], np.uint8)
        for name in ("cat", "dog"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number:02}.png").write_bytes(tf.io.encode_png(image).numpy())
    with caplog.at_level("INFO"):
        assert Files(tmp_path).schema["image_shape"] == (4, 4, 3)
    assert (
        "become 4,4,3, because 32 that were looked at have this size, and some are in colour"
        in (caplog.text)
    )


def test_a_large_folder_is_streamed(tmp_path):
    write_images(tmp_path, 4)
    stream = load(Files(tmp_path), "train[:50%]", resident_limit_mib=0)
    assert isinstance(stream, Streaming) and stream.num_examples == 6
    resident = load(Files(tmp_path), "train[:50%]")
    _, labels = stream.read(np.arange(6))
    assert labels.tolist() == resident.arrays[1].tolist()
    other = load(Files(tmp_path), "train[50%:]", resident_limit_mib=0)
    assert other.fingerprint()["content"] != stream.fingerprint()["content"]


def test_a_table(tmp_path):
    write_table(tmp_path / "t.csv")
    files = Files(tmp_path / "t.csv")
    splits = files.splits()
    assert splits == ("train[:90%]", "train[90%:]", None)
    train = load(files, splits.train)
    held = load(files, splits.evaluation, training=False)
    x = np.concatenate([train.arrays[0][:, 0], held.arrays[0][:, 0]])
    assert sorted(x) == [*range(40)] and len(held.arrays[0]) == 4
    assert {*held.arrays[1].tolist()} == {0, 1}
    info = train.info
    assert (info.image_shape, info.num_classes, info.num_outputs) == ((2,), 2, None)
    np.testing.assert_allclose(info.mean, train.arrays[0].mean(0, np.float64))  # not of the others
    np.testing.assert_allclose(info.deviation, train.arrays[0].std(0, np.float64))
    assert held.info.mean == info.mean
    again = load(Files(tmp_path / "t.csv"), splits.train)
    assert again.fingerprint() == train.fingerprint()


def test_a_column_that_does_not_vary_stays_finite(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y\n" + "3,1,x\n5,1,z\n" * 10)
    assert load(Files(tmp_path / "t.csv"), "train").info.deviation == (1.0, 1.0)


def test_a_folder_of_tables(tmp_path):
    write_table(tmp_path / "train.csv")
    write_table(tmp_path / "test.csv", 10)
    files = Files(tmp_path)
    assert files.splits() == ("train", "test", None)
    assert files.splits(select=True) == ("train[:90%]", "train[90%:]", "test")
    assert load(files, "test", training=False).num_examples == 10
    (tmp_path / "more.csv").touch()
    with pytest.raises(UsageError, match="has the tables more.csv, test.csv, train.csv: name them"):
        Files(tmp_path)


def test_numbers_need_as_many_outputs(tmp_path):
    write_table(tmp_path / "t.csv")
    table = tmp_path / "t.csv"
    one = load(Files(table, labels=["z"], loss_of=NUMBERS), "train").info
    assert (one.num_classes, one.num_outputs) == (None, 1)
    binary = load(Files(table, loss_of=BINARY), "train")
    assert (binary.info.num_classes, binary.info.num_outputs) == (None, 1)
    assert {*binary.arrays[1].tolist()} == {0, 1}


@pytest.mark.parametrize(
    ("parts", "select", "splits"),
    [
        (["train"], False, ("train[:90%]", "train[90%:]", None)),
        (["train"], True, ("train[:80%]", "train[80%:90%]", "train[90%:]")),
        (["train", "test"], False, ("train", "test", None)),
        (["train", "test"], True, ("train[:90%]", "train[90%:]", "test")),
        (["train", "validation"], False, ("train", "validation", None)),
        (["train", "validation"], True, ("train", "validation", None)),
        (["train", "test", "validation"], False, ("train", "test", None)),
        (["train", "test", "validation"], True, ("train", "validation", "test")),
    ],
)
def test_no_split_is_selected_on_and_tested(tmp_path, parts, select, splits):
    for part in parts:
        write_table(tmp_path / f"{part}.csv")
    assert Files(tmp_path).splits(select=select) == splits


def test_what_is_trained_on_is_not_evaluated_unless_both_are_given(tmp_path, caplog):
    write_table(tmp_path / "t.csv")
    files = Files(tmp_path / "t.csv")
    with pytest.raises(UsageError, match=r"4 of the 4 examples of train\[90%:\] are in train, too"):
        files.splits(Splits("train"))
    with pytest.raises(
        UsageError, match=r"4 of the 8 examples of train\[80%:\] are in train\[:90%"
    ):
        files.splits(Splits(None, "train[80%:]"))
    given = Splits("train[:50%]", "train[50%:75%]")
    assert files.splits(given) == given
    files.splits(Splits("train", "train[:10]"))
    assert "their results are too good" in caplog.text


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ("test", "has no split 'test'; it has train, and parts of one of them"),
        (
            "0.2",
            "has no split '0.2'; .* give split='train.:80%.' split='train.80%:.'$",
        ),
        ("train[", "has no split"),
        ("train+train", "has no split"),
        ("train[:1%]", r"the split train\[:1%\] of 40 examples is empty"),
    ],
)
def test_splits_that_are_not_there(tmp_path, split, says):
    write_table(tmp_path / "t.csv")
    with pytest.raises(UsageError, match=says):
        load(Files(tmp_path / "t.csv"), split)


def test_other_data_follow_the_schema(tmp_path):
    write_table(tmp_path / "t.csv")
    files = Files(tmp_path / "t.csv", features=["z"])
    train = load(files, "train[:90%]")
    schema = json.loads(json.dumps(files.schema))
    assert schema["classes"] == ["a", "b"] and schema["examples"] == {"train[:90%]": [17, 19]}
    (tmp_path / "u.csv").write_text("kind,z,x\nb,2,1\nb,1,9\n")
    info = load(Files(tmp_path / "u.csv", schema=schema), "train", training=False)
    assert info.arrays[0].tolist() == [[2], [1]] and info.arrays[1].tolist() == [1, 1]
    assert info.info.mean == train.info.mean and info.info.class_names == ("a", "b")
    (tmp_path / "u.csv").write_text("kind,z,x\nc,2,1\n")
    with pytest.raises(UsageError, match="^u.csv, line 2: 'kind' is 'c', which is no class of the"):
        Files(tmp_path / "u.csv", schema=schema)
    for name, value in (("classes", "ab"), ("mean", ["1"]), ("features", {"y": 1})):
        with pytest.raises(UsageError, match=f"^config.json: the {name} of the data cannot be "):
            Files(tmp_path / "u.csv", schema=schema | {name: value})


def test_words_and_means_are_those_of_the_training_examples(tmp_path, caplog):
    """Also of evaluation data, of other files, and of a run that is read again."""
    rows = [f"{n if n % 4 else ''},{'pqr'[n % 3]},{n % 2}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["age,kind,y", *rows, "", ""]))
    options = {"features": ["kind", "age"], "missing": "mean"}
    files = Files(tmp_path / "t.csv", **options)
    with pytest.raises(UsageError, match="t.csv: load the training data first: words and means"):
        load(files, "train[90%:]", training=False)
    train = load(files, "train[:90%]")
    held = load(files, "train[90%:]", training=False)
    chosen = np.sort(np.random.RandomState(0).permutation(40)[:36])
    ages = [int(n) for n in chosen if n % 4]
    assert files.schema["missing"] == {"kind": "", "age": sum(ages) / len(ages)}
    mean = np.float32(sum(ages) / len(ages))
    for dataset, numbers in ((train, chosen), (held, np.setdiff1d(np.arange(40), chosen))):
        expected = [[*np.eye(3)[n % 3], n if n % 4 else mean] for n in numbers]
        np.testing.assert_array_equal(dataset.arrays[0], np.float32(expected))
        assert dataset.info.image_shape == (4,) and len(dataset.info.mean) == 4
    assert held.info.mean == train.info.mean
    (line,) = (line for line in files.table() if " age " in line)
    assert f"10 as {mean:g}" in line
    schema = json.loads(json.dumps(files.schema))
    (tmp_path / "u.csv").write_text("kind,y,age\nq,1,\ns,0,5\n")
    caplog.clear()
    other = load(Files(tmp_path / "u.csv", schema=schema), "train", training=False)
    np.testing.assert_array_equal(other.arrays[0], np.float32([[0, 1, 0, mean], [0, 0, 0, 5]]))
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.endswith("they are as no word: s")
    again = Files(tmp_path / "t.csv", **options)
    assert load(again, "train[:90%]").fingerprint() == train.fingerprint()
    assert again.schema["words"] == files.schema["words"]
    wrong = [("words", {"kind": "pq"}), ("words", {"kind": [1]}), ("words", ["p"])]
    for name, value in (*wrong, ("missing", {"age": None}), ("missing", {"age": ""})):
        with pytest.raises(UsageError, match=f"^config.json: the {name} of the data cannot be "):
            Files(tmp_path / "u.csv", schema=schema | {name: value})


def test_examples_without_a_value_are_left_out(tmp_path, caplog):
    rows = [f"{n if n % 4 else ''},{n % 2}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["age,y", *rows, "", ""]))
    with pytest.raises(UsageError, match="'age' has no value, as in 10 of 40 rows: add missing="):
        Files(tmp_path / "t.csv")
    caplog.set_level("INFO")
    files = Files(tmp_path / "t.csv", missing="drop")
    assert "t.csv: 10 of 40 rows have no value in a column that is used" in caplog.text
    train = load(files, "train[:90%]")
    held = load(files, "train[90%:]", training=False)
    assert (train.num_examples, held.num_examples) == (27, 3)
    seen = np.concatenate([train.arrays[0], held.arrays[0]]).ravel().tolist()
    assert sorted(seen) == [n for n in range(40) if n % 4]
    assert sum(files.schema["examples"]["train[:90%]"]) == 27


def test_images_follow_the_schema(tmp_path):
    write_images(tmp_path / "photos", 2)
    files = Files(tmp_path / "photos")
    load(files, "train")
    (tmp_path / "new").mkdir()
    (tmp_path / "photos" / "emu").rename(tmp_path / "new" / "emu")
    new = load(Files(tmp_path / "new", schema=files.schema), "train", training=False)
    assert new.arrays[1].tolist() == [2, 2] and new.info.image_shape == (4, 6, 3)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="photos is missing"):
        Files(tmp_path / "photos")
    with pytest.raises(UsageError, match="has no images: it needs a folder for each class"):
        Files(tmp_path)
    (tmp_path / "t.txt").touch()
    with pytest.raises(UsageError, match="t.txt has no examples"):
        Files(tmp_path / "t.txt")
    (tmp_path / "t.doc").touch()
    with pytest.raises(UsageError, match="t.doc is no file that ctl reads: give a folder of imag"):
        Files(tmp_path / "t.doc")


def test_a_part_in_several_files(tmp_path):
    write_table(tmp_path / "train-00000-of-00002.csv")
    write_table(tmp_path / "train-00001-of-00002.csv", 10)
    write_table(tmp_path / "test_all.csv", 4)
    files = Files(tmp_path)
    assert load(files, "train").num_examples == 50
    assert load(files, "test", training=False).num_examples == 4


def test_rare_classes_are_repeated_in_the_training_only(tmp_path):
    rows = [f"{n},{n},{'a' if n % 5 else 'b'}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,z,kind", *rows, ""]))
    files = Files(tmp_path / "t.csv")
    train = load(files, "train[:90%]", oversample=True)
    held = load(files, "train[90%:]", training=False, oversample=True)
    first, second = np.bincount(train.arrays[1])
    assert first == second and held.num_examples == 4
    assert files.schema["examples"]["train[:90%]"] == [first, second]
    assert not {*train.arrays[0].ravel()} & {*held.arrays[0].ravel()}
    with pytest.raises(UsageError, match="t.csv has no classes: leave out oversample="):
        load(Files(tmp_path / "t.csv", labels=["x"], loss_of=NUMBERS), "train", oversample=True)


@pytest.mark.parametrize("names", [("0", "1"), ("no", "yes")])
def test_a_loss_of_0_and_1_has_two_classes(tmp_path, names):
    rows = [f"{n},{n},{names[n % 5 == 0]}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,z,kind", *rows, ""]))
    files = Files(tmp_path / "t.csv", loss_of=BINARY)
    train = load(files, "train", oversample=True)
    assert train.info.class_names == names and train.arrays[1].dtype == np.float32
    assert (train.info.num_classes, train.info.num_outputs) == (None, 1)
    assert np.bincount(train.arrays[1].astype(int)).tolist() == [32, 32]
    assert files.schema["examples"]["train"] == [32, 32]
    assert files.table()[-1] == f"  the positive class, label 1, is {names[1]}"


def test_columns_with_decimal_commas_are_named(tmp_path, caplog):
    (tmp_path / "t.csv").write_text("a;b;kind\n1,5;1;x\n2,5;3;y\n")
    Files(tmp_path / "t.csv")
    assert (
        "t.csv: columns that are text, because their numbers have commas: a; write" in caplog.text
    )


@pytest.mark.parametrize(
    ("values", "labels", "said"),
    [
        (["-19", "51"], {-19.0, 51.0}, "these numbers: 1 output (classes begin at 0)"),
        (["0.5", "2"], {0.5, 2.0}, "these numbers"),
        (["0", "1", "3"], {0.0, 1.0, 3.0}, "these numbers"),
        ([*map(str, range(120))], {*map(float, range(120))}, "these numbers"),  # too many classes
        (["0", "2", "1"], {0, 1, 2}, "classes, 0 to 2: an output for each"),
        (["no", "yes"], {0, 1}, "classes, 0 to 1"),
    ],
)
def test_labels_of_a_loss_of_ones_own(tmp_path, values, labels, said):
    rows = [f"{n % 7}.5,{values[n % len(values)]}" for n in range(120)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows, ""]))
    files = Files(tmp_path / "a.csv", loss_of=loss_of("mine.py:pinball"))
    train = load(files, "train")
    assert {*train.arrays[1].tolist()} == labels
    classes = isinstance(max(labels), int)
    assert (train.info.num_classes, train.info.num_outputs) == (
        (len(labels), None) if classes else (None, 1)
    )
    assert train.arrays[1].dtype == (np.int64 if classes else np.float32)
    assert said in files.table()[-1]


def test_messages_name_arguments_where_a_program_runs(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{n},{n / 7}\n" for n in range(40)))
    with pytest.raises(UsageError, match="to predict numbers, give loss_of='numbers', or"):
        Files(tmp_path / "t.csv", loss_of="classes")
    files = Files(tmp_path / "t.csv", labels="y")  # numbers stay numbers, if nothing is said
    assert load(files, "train").arrays[1][1] == np.float32(1 / 7)


def test_probabilities_are_no_classes(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "1,0\n2,0.5\n" * 4)
    files = Files(tmp_path / "t.csv", loss_of=BINARY)
    assert load(files, "train").info.class_names == ()
    with pytest.raises(UsageError, match="t.csv has no classes: leave out oversample="):
        load(files, "train", oversample=True)


def test_streamed_images_of_rare_classes_are_repeated(tmp_path):
    write_images(tmp_path, 4)
    for n in (1, 2, 3):
        (tmp_path / "emu" / f"{n}.png").unlink()
    stream = load(Files(tmp_path), "train", oversample=True, resident_limit_mib=0)
    _, labels = stream.read(np.arange(len(stream._source)))
    assert np.bincount(labels).tolist() == [4, 4, 4] and stream.num_examples == 12


def test_a_table_beside_images_is_left_out(tmp_path):
    write_images(tmp_path, 1)
    (tmp_path / "labels.csv").touch()
    assert load(Files(tmp_path), "train").info.class_names == CLASSES
    assert not has_table(str(tmp_path))
    (tmp_path / "train.csv").touch()
    assert has_table(str(tmp_path))
    (tmp_path / "only").mkdir()
    write_table(tmp_path / "only" / "mine.csv")
    with pytest.raises(UsageError, match="has the tables mine.csv: name them train and test, or"):
        Files(tmp_path / "only")


def write_records(path, numbers) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            values = {"x": [float(number)], "label": [float(number % 2)]}
            feature = {
                name: tf.train.Feature(float_list=tf.train.FloatList(value=value))
                for name, value in values.items()
            }
            features = tf.train.Features(feature=feature)
            writer.write(tf.train.Example(features=features).SerializeToString())


NAMES = {
    "free": ["a.tfrecord", "b.tfrecord", "c.tfrecord"],
    "numbered": [f"shard.tfrecord-0000{n}-of-00003" for n in range(3)],
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("pattern", ["", "*tfrecord*"])
def test_shards_with_any_name_are_one_part(tmp_path, names, pattern, caplog):
    caplog.set_level("INFO")
    for first, name in enumerate(NAMES[names]):
        write_records(tmp_path / name, range(10 * first, 10 * first + 10))
    files = Files(tmp_path / pattern)
    assert files.splits() == ("train[:90%]", "train[90%:]", None)
    assert load(files, "train").arrays[0].ravel().tolist() == [*range(30)]
    assert f"for the training: {', '.join(NAMES[names])}" in caplog.text
    assert has_table(f"{tmp_path}/{pattern}")
    if not pattern:
        (tmp_path / "d-test.tfrecord").touch()  # which part are the others?
        with pytest.raises(
            UsageError, match="d-test.tfrecord.*: name them train and test, or give"
        ):
            Files(tmp_path)


def test_a_pattern_names_some_tables(tmp_path):
    for number in range(3):
        write_table(tmp_path / f"part{number}.csv", 10)
    (tmp_path / "notes.md").touch()
    assert load(Files(tmp_path / "part[01].csv"), "train").num_examples == 20
    assert load(Files(f"file://{tmp_path}/part*.csv"), "train").num_examples == 30
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}-1.csv", 10)
    assert Files(tmp_path / "t*.csv").splits() == ("train", "test", None)
    with pytest.raises(UsageError, match="name them train and test, or give one of them"):
        Files(tmp_path / "*.csv")
    check_path(f"{tmp_path}/part*.csv")
    for pattern, says in (("*", "notes.md is no file that ctl reads"), ("x*", "no such file or")):
        with pytest.raises(UsageError, match=says):
            check_path(f"{tmp_path}/{pattern}")


def test_a_schema_of_records_is_for_every_file_of_a_folder(tmp_path):
    for part, count in (("train", 6), ("test", 2)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{part}.tfrecord")) as writer:
            for number in range(count):
                values = {"pixels": bytes([number] * 4), "kind": str(number % 2).encode()}
                feature = {
                    name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                    for name, value in values.items()
                }
                features = tf.train.Features(feature=feature)
                writer.write(tf.train.Example(features=features).SerializeToString())
    files = Files(tmp_path, record_schema="pixels:uint8[2,2,1],kind:string")
    train = files.load("train", global_batch_size=2, training=True)
    assert train.info.image_shape == (2, 2, 1) and train.info.class_names == ("0", "1")
    assert train.arrays[0].dtype == np.uint8 and train.arrays[0][:, 0, 0, 0].tolist() == [*range(6)]
    assert files.load("test", global_batch_size=2, training=False).num_examples == 2
    with pytest.raises(UsageError, match="record 0: 'kind' has 1 bytes, and the schema says int64"):
        Files(tmp_path, record_schema="pixels:uint8[2,2,1],kind:int64")


def unlabelled(path, trained: Files, **options) -> Files:
    return Files(path, schema=json.loads(json.dumps(trained.schema)), needs_labels=False, **options)


def test_tables_to_predict_for_need_no_labels(tmp_path):
    write_table(tmp_path / "table.csv")
    trained = Files(tmp_path / "table.csv")
    load(trained, "train")
    (tmp_path / "new.csv").write_text("z,x\n1,2\n3,4\n5,6\n")
    with pytest.raises(UsageError, match="'kind', .*; to predict without labels, give ctl.evaluat"):
        Files(tmp_path / "new.csv", schema=trained.schema)
    files = unlabelled(tmp_path / "new.csv", trained)
    features, labels = load(files, "train", training=False).arrays
    assert features.tolist() == [[2, 1], [4, 3], [6, 5]] and labels.dtype == np.int64
    assert not files.has_labels("train") and files.names("train") == ("row", ["0", "1", "2"])
    assert files.table()[-1].split() == ["all", "3"] and "train" in files.table()[-2].split()
    assert "a" not in [line.split()[0] for line in files.table()]  # no counts of classes

    (tmp_path / "some.jsonl").write_text('{"z": 1, "x": 2, "kind": "a"}\n{"z": 3, "x": 4}\n')
    some = unlabelled(tmp_path / "some.jsonl", trained)  # a label is missing
    assert load(some, "train", training=False).arrays[0].tolist() == [[2, 1], [4, 3]]
    assert not some.has_labels("train")
    (tmp_path / "all.jsonl").write_text('{"z": 1, "x": 2, "kind": "b"}\n' * 2)
    whole = unlabelled(tmp_path / "all.jsonl", trained)
    assert whole.has_labels("train") and load(whole, "train", False).arrays[1].tolist() == [1, 1]

    np.savez(tmp_path / "new.npz", x_test=np.array([2.0, 4]), z_test=np.array([1.0, 3]))
    arrays = unlabelled(tmp_path / "new.npz", trained)
    assert arrays.evaluation(whole=True) == "test" and not arrays.has_labels("test")
    assert load(arrays, "test", training=False).arrays[0].tolist() == [[2, 1], [4, 3]]


def test_rows_without_a_value_keep_their_numbers(tmp_path):
    write_table(tmp_path / "table.csv")
    trained = Files(tmp_path / "table.csv", missing="drop")
    load(trained, "train")
    (tmp_path / "new.csv").write_text("x,z\n1,2\n,4\n5,6\n")
    files = unlabelled(tmp_path / "new.csv", trained, missing="drop")
    assert load(files, "train", training=False).arrays[0].tolist() == [[1, 2], [5, 6]]
    assert files.names("train") == ("row", ["0", "2"])


def test_several_numbers_to_predict_have_as_many_outputs(tmp_path):
    (tmp_path / "table.csv").write_text("x,a,b\n" + "1,2,3\n4,5,6\n" * 4)
    trained = Files(tmp_path / "table.csv", labels=["a", "b"], loss_of=NUMBERS)
    load(trained, "train")
    (tmp_path / "new.csv").write_text("x\n1\n4\n")
    files = unlabelled(tmp_path / "new.csv", trained, loss_of=NUMBERS)
    data = load(files, "train", training=False)
    assert data.arrays[1].shape == (2, 2) and data.info.num_outputs == 2


def test_a_table_is_for_a_model_of_tables(tmp_path):
    write_table(tmp_path / "table.csv")
    with pytest.raises(UsageError, match="^table.csv is a table, and the model was not trained"):
        Files(tmp_path / "table.csv", needs_labels=False)


@pytest.mark.parametrize("folder", ["", "unknown"])
def test_images_to_predict_for_need_no_folders_of_classes(tmp_path, folder):
    write_images(tmp_path / "train", 3)
    trained = Files(tmp_path / "train")
    load(trained, "train")
    new = tmp_path / "new"
    (new / folder).mkdir(parents=True)
    for n in (21, 3):  # in the order of their names
        image = np.full([4, 6, 3], n, np.uint8)
        (new / folder / f"{n}.png").write_bytes(tf.io.encode_png(image).numpy())
    files = unlabelled(new, trained)
    for options in ({}, {"resident_limit_mib": 0}):
        data = load(files, "train", training=False, **options)
        assert data.info.class_names == CLASSES and data.info.num_classes == 3
    data = load(files, "train", training=False)
    assert data.arrays[0][:, 0, 0, 0].tolist() == [21, 3]
    before = f"{folder}/" if folder else ""
    assert files.names("train") == ("path", [f"{before}21.png", f"{before}3.png"])
    assert not files.has_labels("train")

    labelled = unlabelled(tmp_path / "train", trained)
    assert labelled.has_labels("train")
    assert labelled.names("train")[1][:4] == ["cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png"]
