"""Tables in files: what is read, which columns are used, and what is refused with its place."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import pickle
import sys

import numpy as np
import pytest
import tensorflow as tf

from ctl.base.names import BINARY, CLASSES, DROP, MEAN, NUMBERS, UNKNOWN
from ctl.data import tables
from ctl.data.tables import Choice, Table
from ctl.errors import UsageError
from ctl.flags.record_schema import parse_record_schema


def arrays(table: Table, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    tables.check(table, choice)
    return tables.features(table, choice), tables.labels(table, choice)


def table(tmp_path, text: str, name: str = "t.csv") -> Table:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tables.read(tmp_path / name)["train"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", 'a,b,"c, d"\n1,x,2.5\n\n-3e2,"y\ny",\n'),
        ("t.tsv", "\ufeffa\tb\tc, d\n1\tx\t2.5\n-300\ty\ny\tNA\n".replace("y\ny", '"y\ny"')),
        ("T.CSV", "a;b;c, d\r\n1;x;2.5\r\n-300;'y'; nan \r\n"),
    ],
)
def test_columns_are_numbers_or_text(tmp_path, name, text):
    found = table(tmp_path, text, name)
    assert list(found.columns) == ["a", "b", "c, d"] and len(found) == 2
    np.testing.assert_array_equal(found.columns["a"], [1, -300])
    assert found.columns["b"][0] == "x" and found.columns["b"].dtype == object
    np.testing.assert_array_equal(found.columns["c, d"], [2.5, np.nan])


def test_lines_are_those_of_an_editor(tmp_path):
    found = table(tmp_path, 'a,b\n1,x\n\n2,"y\ny"\n3,z\n')
    assert [found.where(row) for row in range(3)] == [f"t.csv, line {n}" for n in (2, 5, 6)]


def test_a_first_line_with_numbers_is_an_example(tmp_path):
    found = table(tmp_path, "5.1,3.5,setosa\n6,7,virginica\n")
    assert list(found.columns) == ["column0", "column1", "column2"] and len(found) == 2


def test_text_that_comes_late_makes_all_of_its_column_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 2)
    found = table(tmp_path, "a,b\n01,1\n02,2\n03,3\nx4,4\n")
    assert found.columns["a"].tolist() == ["01", "02", "03", "x4"]
    np.testing.assert_array_equal(found.columns["b"], [1, 2, 3, 4])


def test_compressed_csv(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,x\n"))
    assert tables.read(tmp_path / "t.csv.gz")["train"].columns["a"] == [1]
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,x\n" * 99)[:-9])
    with pytest.raises(UsageError, match=r"^t.csv.gz is damaged: "):
        tables.read(tmp_path / "t.csv.gz")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "^t.csv has no rows$"),
        ("a,b\n", "^t.csv has no rows$"),
        ("a,b\n1,2\n1,2,3\n", "^t.csv, line 3 has 3 cells, and line 1 has 2: "),
        ("a,a\n1,2\n", "^t.csv, line 1: the column 'a' is there twice: "),
        ('a,b\n1,"2\n', "^t.csv, line 2: it cannot be read as CSV: "),
    ],
)
def test_what_is_no_csv_is_named(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        arrays(found := table(tmp_path, text), tables.choose(found))


def test_other_encodings_are_named(tmp_path):
    (tmp_path / "t.csv").write_bytes("a,b\n1,é\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"^t.csv is not UTF-8 \(byte 0xe9\): save it as UTF-8$"):
        tables.read(tmp_path / "t.csv")


def test_arrays_of_numpy_have_parts(tmp_path):
    images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
    labels = np.array([0, 1, 1, 0])
    path = tmp_path / "t.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    parts = tables.read(path)
    assert {part: len(found) for part, found in parts.items()} == {"train": 4, "test": 1}
    choice = tables.choose(parts["train"])
    assert choice == Choice(("x",), ("y",), ("0", "1"))
    features, found = arrays(parts["train"], choice)
    np.testing.assert_array_equal(features, images[..., np.newaxis])  # with a channel
    np.testing.assert_array_equal(found, labels)
    np.savez(path, a=labels.astype(">f4"), b=np.array(["x", "y", "x", "é"]), data=images)
    found = tables.read(path)["train"]
    assert found.columns["b"].tolist() == ["x", "y", "x", "é"]
    assert tables.choose(found, labels=["b"]).features == ("data",)


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("code in a file was run",)


def test_arrays_of_numpy_hold_no_code(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, a=np.array([Harmful()], object), y=[0])
    with pytest.raises(UsageError, match=r"^t.npz cannot be read as .npz: it has Python objects$"):
        tables.read(path)
    for content in (pickle.dumps(Harmful()), b"", b"PK\x03\x04", path.read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"^t.npz cannot be read as .npz: "):
            tables.read(path)
    np.savez(path, a=np.zeros(3), y=np.zeros(2))
    with pytest.raises(UsageError, match=r"the arrays of train differ in length: a \[3\], y \[2\]"):
        tables.read(path)


def rows(*columns: str) -> Table:
    """A table of 4 rows: a and b are numbers, s is text, k whole numbers, z the last."""
    every = {
        "a": np.array([1.0, 2.5, 3, 4]),
        "b": np.array([0.0, 0, 1, 1]),
        "k": np.array([3.0, 7, 3, 20]),
        "s": np.array(["no", "yes", "no", "yes"], object),
        "label": np.array([1.0, 0, 1, 0]),
        "n": np.array([1.0, np.nan, 2, np.inf]),
        "e": np.array(["x", "", "x", "y"], object),
    }
    return Table("t.csv", {name: every[name] for name in columns}, np.arange(2, 6))


@pytest.mark.parametrize(
    ("columns", "options", "chosen"),
    [
        ("a b s", {}, (("a", "b"), ("s",), ("no", "yes"))),  # the last
        ("a label b s", {}, (("a", "b"), ("label",), ("0", "1"))),  # by its name
        ("a s k", {}, (("a",), ("k",), ("3", "7", "20"))),  # in the order of numbers
        ("a b k", {"labels": ["b"]}, (("a", "k"), ("b",), ("0", "1"))),
        ("b k", {"features": ["k"]}, (("k",), ("b",), ("0", "1"))),
        ("label b k", {"features": ["k"]}, (("k",), ("label",), ("0", "1"))),
        ("a s k", {"loss_of": NUMBERS}, (("a",), ("k",), ())),
        ("s b a", {"loss_of": NUMBERS}, (("b",), ("a",), ())),
        ("s a b", {"loss_of": BINARY}, (("a",), ("b",), ())),
        ("a b s", {"loss_of": BINARY}, (("a", "b"), ("s",), ("no", "yes"))),
        ("a b k", {"loss_of": NUMBERS, "labels": ["a", "k"]}, (("b",), ("a", "k"), ())),
    ],
)
def test_which_columns_are_used(columns, options, chosen):
    assert tables.choose(rows(*columns.split()), **options) == (*chosen, {}, {})


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ("a s", {"features": ["aa"]}, "^--features: t.csv has no column 'aa'; it has a, s$"),
        ("a s", {"labels": ["x\033"]}, r"^--labels: t.csv has no column 'x\\x1b'; it has a, s$"),
        ("s label", {}, "no column of numbers but label: features must be numbers"),
        ("s", {"labels": ["s"]}, "t.csv has no column of numbers: features .* a language model"),
        ("a", {"features": ["a"]}, "no column for labels"),
        (
            "a b k",
            {"features": ["k"]},
            "last column, 'k', is in --features: name .*; there are a, b",
        ),
        ("a b", {"features": ["a"], "labels": ["a"]}, "'a' is in --features and in --labels"),
        ("b a", {}, "^t.csv, line 3: 'a' is 2.5, which is no class: .*--loss=mean_squared_error"),
        ("a s", {"loss_of": NUMBERS}, "'s' is text, and the loss takes numbers"),
        (
            "a e",
            {},
            "^t.csv, line 3: the label 'e' .the last column, since --labels names none. has no",
        ),
        (
            "a n",
            {},
            "^t.csv, line 3: the label 'n' .* has no value.*: name another column with --lab",
        ),
        (
            "n a",
            {"labels": ["n"]},
            "^t.csv, line 3: the label 'n' has no value, as in 1 of 4 rows: fill",
        ),
        ("a b k", {"labels": ["b", "k"]}, "b, k are several labels"),
        ("a k", {"loss_of": BINARY, "labels": ["s"]}, "no column 's'"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns, options, says):
    with pytest.raises(UsageError, match=says):
        tables.choose(rows(*columns.split()), **options)


PASSENGERS = """sex,age,fare,name,port,survived
male,22,7.25,Owen,S,0
female,38.5,,Cumings,C,1
female,,7.75,Heikkinen,,1
male,35,53,Allen,Q,0
male,,8.25,Moran,S,0
"""


def test_words_and_means(tmp_path):
    """The numbers of the module `csv` and of plain arithmetic."""
    found = table(tmp_path, PASSENGERS)
    names = ["port", "age", "sex", "fare"]
    choice = tables.choose(found, names, ["survived"], missing=MEAN)
    assert choice.words == {"port": ("C", "Q", "S"), "sex": ("female", "male")}
    assert choice.missing == {"port": "", "age": 95.5 / 3, "sex": "", "fare": 76.25 / 4}
    expected = []
    for row in csv.DictReader(PASSENGERS.splitlines()):
        age, fare = (float(row[name] or choice.missing[name]) for name in ("age", "fare"))
        ports = [float(row["port"] == port) for port in "CQS"]
        expected.append([*ports, age, float(row["sex"] == "female"), float(row["sex"] == "male")])
        expected[-1].append(fare)
    features, labels = arrays(found, choice)
    assert features.dtype == np.float32 and labels.tolist() == [0, 1, 1, 0, 0]
    np.testing.assert_array_equal(features, np.float32(expected))
    described = [row[:3] + row[-1:] for row in tables.described(found, choice)]
    assert ["sex", "one-hot", "text, 2 values", "0"] in described
    assert ["age", "feature", "number", "2 as 31.8333"] in described
    assert ["port", "one-hot", "text, 3 values", "1 as no word"] in described


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_other_tables_have_the_same_words_and_means(tmp_path, end):
    names = ["sex", "age", "fare", "port", "survived"]
    rows = []
    for row in csv.DictReader(PASSENGERS.splitlines()):
        numbers = {name: float(row[name]) if row[name] else None for name in names[1:3]}
        texts = {name: row[name] or None for name in ("sex", "port")}
        rows.append({**numbers, **texts, "survived": int(row["survived"])})
    path = tmp_path / f"t.{end}"
    if end == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found, same = tables.read(path)["train"], table(tmp_path, PASSENGERS)
    choices = [tables.choose(t, names[:-1], names[-1:], missing=MEAN) for t in (found, same)]
    assert choices[0] == choices[1]
    for ours, theirs in zip(arrays(found, choices[0]), arrays(same, choices[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_means_are_those_of_the_training_examples(tmp_path):
    found = table(tmp_path, PASSENGERS)
    choice = tables.choose(found, ["sex", "age"], ["survived"], missing=MEAN)
    train = found.take(np.array([1, 2]))
    fitted = tables.fitted(train, choice, MEAN)
    assert fitted.words == {"sex": ("female",)} and fitted.missing == {"sex": "", "age": 38.5}
    assert tables.features(found, fitted)[:, 1].tolist() == [22, 38.5, 38.5, 35, 38.5]
    with pytest.raises(UsageError, match="'age' has no value in any training .*: --features=sex$"):
        tables.fitted(found.take(np.array([2, 4])), choice, MEAN)


def test_rows_without_a_value_are_left_out(tmp_path):
    found = tables.joined(
        "both", [table(tmp_path, PASSENGERS), table(tmp_path, PASSENGERS, "u.csv")]
    )
    kept = tables.complete(found, ["age", "fare"])
    assert kept.columns["name"].tolist() == ["Owen", "Allen"] * 2
    assert [kept.where(row) for row in range(4)] == [
        *("t.csv, line 2", "t.csv, line 5", "u.csv, line 2", "u.csv, line 5")
    ]
    choice = tables.choose(found, ["age"], ["port"], missing=DROP)
    assert choice.classes == ("C", "Q", "S") and not choice.missing
    with pytest.raises(UsageError, match="no row has a value in each of fare, port: name fewer"):
        tables.complete(found.take(np.array([1, 2])), ["fare", "port"])


def test_missing_values_are_named_with_the_flags_that_work(tmp_path):
    found = table(tmp_path, PASSENGERS)
    choice = tables.choose(found, ["sex", "age", "port", "fare"], ["survived"])
    with pytest.raises(UsageError) as raised:
        tables.check(found, choice)
    assert str(raised.value) == (
        "t.csv, line 4: 'age' has no value, as in 2 of 5 rows (and port in 1, fare in 1): add "
        "--missing=mean, which takes the mean of the training examples, or --missing=drop, which "
        "leaves these rows out, or leave them out: --features=sex"
    )
    with pytest.raises(UsageError, match="fare in 1.: add --missing=drop, which leaves these rows"):
        tables.check(found, choice, False)  # the model has no means, and needs its columns
    with pytest.raises(UsageError, match="'port' has no value, .*: fill them, or add --missing=dr"):
        tables.choose(found, ["sex"], ["port"])
    vectors = Table("t.npz", {"v": np.array([[1, np.nan]]), "y": np.array([1.0])})
    with pytest.raises(UsageError, match="1 of 1 rows: add --missing=drop, which leaves these"):
        tables.check(vectors, Choice(("v",), ("y",)))  # no mean of arrays


def test_text_of_many_values_is_no_word(tmp_path):
    lines = [f"{n},{n % 3},person {n},{'ab'[n % 2]},{n % 2}" for n in range(60)]
    found = table(tmp_path, "\n".join(["id,x,the name,kind,y", *lines, ""]))
    with pytest.raises(UsageError) as raised:
        tables.choose(found, ["x", "the name", "kind"], ["y"])
    assert str(raised.value) == (
        "t.csv, line 2: 'the name' is 'person 0', one of 60 texts in 60 rows, too many for words: "
        "leave out the name: --features=x,kind"
    )
    chosen = tables.choose(found, None, ["y"])
    assert chosen.features == ("id", "x") and not chosen.words
    assert tables.words_hint(found, chosen) == (
        "text is left out; to use the words of kind as features, give them: --features=id,x,kind"
    )
    text = Table("t.csv", {"kind": found.columns["kind"], "y": found.columns["y"]}, found.lines)
    with pytest.raises(UsageError, match="or words that you name: --features=kind; for a language"):
        tables.choose(text)
    assert tables.choose(text, ["kind"]).words == {"kind": ("a", "b")}


def test_words_that_the_training_does_not_have_are_no_word(tmp_path, caplog):
    choice = Choice(("a", "b"), ("y",), ("0", "1"), {"a": ("x", "y"), "b": ("1", "2")})
    features, _ = arrays(table(tmp_path, "a,b,y\nx,1,0\nz,3,1\ny,2,0\n"), choice)
    assert features.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    said = "are words that the training examples do not have; they are as no word:"
    assert [record.getMessage() for record in caplog.records] == [
        *(f"t.csv: 1 of 3 values of a {said} z", f"t.csv: 1 of 3 values of b {said} 3")
    ]


def test_too_many_classes_and_too_few():
    many = Table("t.csv", {"a": np.zeros(100), "id": np.arange(100.0)}, np.arange(100))
    with pytest.raises(UsageError, match="'id' has 100 values in 100 rows, too many for classes"):
        tables.choose(many)
    for loss_of in (CLASSES, NUMBERS):
        with pytest.raises(UsageError, match="^t.csv: the label 'a' is '0' in all rows, so there"):
            tables.choose(many, labels=["a"], loss_of=loss_of)
    one = Table("t.csv", {"a": np.arange(3.0), "b": np.array(["x"] * 3, object)}, np.arange(3))
    with pytest.raises(UsageError, match="'b' .the last column, since .* none. is 'x' in all rows"):
        tables.choose(one)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_an_index_of_pandas_is_no_feature(name):
    columns = {name: np.arange(4.0), "a": np.arange(4.0), "y": np.array([0.0, 1, 0, 1])}
    found = Table("t.csv", columns, np.arange(4))
    assert tables.choose(found).features == ("a",)
    joined = dataclasses.replace(
        found, columns={n: np.tile(c, 2) for n, c in columns.items()}, files=[found, found]
    )
    assert tables.choose(joined).features == ("a",)
    assert tables.choose(found, features=[name]).features == (name,)
    assert tables.described(found, tables.choose(found))[1][:2] == [name, "index"]
    twice = dataclasses.replace(found, columns=columns | {name: np.zeros(4)})
    assert tables.choose(twice).features == (name, "a")  # it counts something


def test_features_and_labels():
    found = rows("a", "b", "s", "k")
    features, labels = arrays(found, Choice(("b", "a"), ("s",), ("no", "yes")))
    np.testing.assert_array_equal(features, np.float32([[0, 1], [0, 2.5], [1, 3], [1, 4]]))
    np.testing.assert_array_equal(labels, [0, 1, 0, 1])
    assert features.dtype == np.float32 and labels.dtype == np.int64
    _, labels = arrays(found, Choice(("a",), ("k",), ("3", "7", "20")))
    np.testing.assert_array_equal(labels, [0, 1, 0, 2])
    _, labels = arrays(found, Choice(("b",), ("a", "k")))
    np.testing.assert_array_equal(labels, np.float32([[1, 3], [2.5, 7], [3, 3], [4, 20]]))


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            Choice(("n",), ("b",)),
            "^t.csv, line 3: 'n' has no value, as in 1 of 4 rows: add --missing",
        ),
        (Choice(("b", "n", "k"), ("b",)), "these rows out, or leave it out: --features=b,k$"),
        (Choice(("s",), ("b",)), "^t.csv, line 2: 's' is 'no', and features must be numbers"),
        (Choice(("x",), ("b",)), "no column 'x', which the training data have; it has n, b, s, k"),
        (Choice(("b",), ("k",), ("3", "7")), "^t.csv, line 5: 'k' is '20', which is no class of"),
        (Choice(("b",), ("s",), ("no",)), "^t.csv, line 3: 's' is 'yes', which is no class of the"),
    ],
)
def test_values_that_do_not_fit_are_named(choice, says):
    with pytest.raises(UsageError, match=says):
        arrays(rows("n", "b", "s", "k"), choice)


def test_a_column_without_any_value_is_left_out():
    empty = Table("t.csv", {"a": np.full(3, np.nan), "b": np.arange(3.0)}, np.arange(2, 5))
    with pytest.raises(UsageError, match="^t.csv: a has no value in any row: leave it out.*=b$"):
        tables.check(empty, Choice(("a", "b"), ()))


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e39])
def test_what_no_float32_holds_is_named(value):
    found = Table("t.csv", {"a": np.array([1, value]), "b": np.arange(2.0)}, np.arange(2, 4))
    with pytest.raises(
        UsageError, match="^t.csv, line 3: 'a' is (infinite|too large for float32)$"
    ):
        arrays(found, tables.choose(found))


def test_messages_are_short():
    found = Table("t.csv", {f"{'long' * 30}{n}\n": np.zeros(2) for n in range(100)})
    with pytest.raises(UsageError) as raised:
        tables.choose(found, features=["x" * 1000])
    assert len(str(raised.value)) < 2500 and "\n" not in str(raised.value)


def test_what_is_found_is_described():
    found = rows("n", "s", "k")
    assert tables.described(found, Choice(("n",), ("s",), ("no", "yes"))) == [
        ["column", "used as", "type", "minimum", "maximum", "missing"],
        ["n", "feature", "integer", "1", "2", "1"],
        ["s", "label", "text, 2 values", "", "", "0"],
        ["k", "-", "integer", "3", "20", "0"],
    ]


def test_every_loss_has_a_kind():
    from ctl.base import names

    kinds = {loss: names.loss_of(loss) for loss in (*names.LOSSES, "mine:loss")}
    assert kinds == {
        "cross_entropy": CLASSES,
        "binary_cross_entropy": BINARY,
        "mean_squared_error": NUMBERS,
        "mine:loss": UNKNOWN,
    }


@pytest.mark.parametrize("cell", ["1_0", "1\0", "0x1", "1,0", "١x"])
def test_what_python_alone_takes_for_a_number_is_text(tmp_path, cell):
    assert table(tmp_path, f'a,b\n"{cell}",1\n').columns["a"].tolist() == [cell]


def test_true_and_false_are_1_and_0(tmp_path):
    found = table(tmp_path, "a,b,c\nTrue,yes,true\nfalse,no,2\n ,no,3\n")
    np.testing.assert_array_equal(found.columns["a"], [1, 0, np.nan])
    assert found.columns["b"].tolist() == ["yes", "no", "no"]
    assert found.columns["c"].tolist() == ["true", "2", "3"]  # all or none


def test_numbers_with_commas_are_named(tmp_path):
    found = table(tmp_path, "a;b;c;d;n\n1,72;1.234,5;x,y;1,2,3;1\n-2;NA;1,2;1,5;2\n")
    hint = "columns that are text, because their numbers have commas: a, b; write them with a dec"
    assert tables.comma_hint(found).startswith(f"; {hint}")
    with pytest.raises(UsageError, match=f"the loss takes numbers: .*--loss; {hint}"):
        tables.choose(found, labels=["a"], loss_of=NUMBERS)
    with pytest.raises(UsageError, match=f"no column of numbers but n: .*; {hint}"):
        tables.choose(found)
    assert not tables.comma_hint(table(tmp_path, "a,b\n1.72,x\n2,y\n"))
    found = table(tmp_path, "a;b;c;n\n1,234,567;1,234;1,234;1\n999.5;NA;0,123;1\n")
    assert tables.comma_hint(found, "").split("columns that are ")[1:] == [
        "text, because their numbers have commas: a, b; write them without commas, as 1234567; ",
        "text, because their numbers have commas: c; write them with a decimal point, as 1.72",
    ]


def test_lines_of_json(tmp_path):
    lines = ['{"a": 1, "b": "x", "v": [1, 2]}', "", '{"b": null, "a": null, "v": [3, 4.5]}']
    found = table(tmp_path, "\n".join([*lines, '{"a": true, "b": 3, "v": [5, 6]}']), "t.jsonl")
    np.testing.assert_array_equal(found.columns["a"], [1, np.nan, 1])
    assert found.columns["b"].tolist() == ["x", "", "3"]
    np.testing.assert_array_equal(found.columns["v"], [[1, 2], [3, 4.5], [5, 6]])
    assert found.where(1) == "t.jsonl, line 3"
    (tmp_path / "u.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert len(tables.read(tmp_path / "u.jsonl.gz")["train"]) == 2
    found = table(tmp_path, '{"v": [1], "w": {"x": 1}}\n{"v": [1, 2], "w": 2}\n', "t.jsonl")
    assert found.columns["v"].tolist() == ["[1]", "[1, 2]"]  # of different lengths: text
    assert found.columns["w"].tolist() == ['{"x": 1}', "2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}\n{"a": 1\n', "^t.jsonl, line 2: it is not JSON: "),
        ("[1, 2]\n", "^t.jsonl, line 1 is no object, such as {'label': 1}"),
        ("[" * 100_000, "^t.jsonl, line 1: it is not JSON: "),
        ("\n\n", "^t.jsonl has no rows$"),
    ],
)
def test_what_is_no_line_of_json_is_named(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        table(tmp_path, text, "t.jsonl")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    columns = {
        "a": pyarrow.array([1, None, 3], pyarrow.int32()),
        "b": pyarrow.array(["x", None, "y"]).dictionary_encode(),
        "v": pyarrow.array([[1, 2], [3, 4], [5, 6]]),
        "t": pyarrow.array([0, 1, 2], pyarrow.timestamp("s")),
        "f": pyarrow.array([True, False, True]),
        "__index_level_0__": pyarrow.array([7, 8, 9]),
    }
    parquet.write_table(pyarrow.table(columns), path)
    found = tables.read(path)["train"]
    assert list(found.columns) == ["a", "b", "v", "t", "f"]
    np.testing.assert_array_equal(found.columns["a"], [1, np.nan, 3])
    assert found.columns["b"].tolist() == ["x", "", "y"]
    np.testing.assert_array_equal(found.columns["v"], [[1, 2], [3, 4], [5, 6]])
    assert found.columns["t"].dtype == object
    np.testing.assert_array_equal(found.columns["f"], [1, 0, 1])
    for content in (b"", path.read_bytes()[:-20]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"^t.parquet cannot be read as Parquet: "):
            tables.read(path)


def test_parquet_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").touch()
    with pytest.raises(UsageError, match=r"^t.parquet: Parquet needs .* 'ctl\[parquet\]'"):
        tables.read(tmp_path / "t.parquet")


def test_several_files_are_one_table(tmp_path):
    one, two = table(tmp_path, "a,b\n1,x\n2,y\n"), table(tmp_path, "b,a\nz,3\n", "u.csv")
    both = tables.joined("both", [one, two])
    np.testing.assert_array_equal(both.columns["a"], [1, 2, 3])
    assert [both.where(row) for row in range(3)] == [
        *("t.csv, line 2", "t.csv, line 3", "u.csv, line 2")
    ]
    for text in ("a,b\nx,y\n", "a\n1\n", "a,b,c\n1,x,2\n"):
        with pytest.raises(UsageError, match="^t.csv and v.csv differ in the column '[abc]': "):
            tables.joined("both", [one, table(tmp_path, text, "v.csv")])


def example(**features) -> bytes:
    """A serialized `tf.train.Example`."""
    made = {}
    for name, values in features.items():
        values = values if isinstance(values, list) else [values]
        kind = {int: "int64", float: "float", bytes: "bytes"}[type(values[0])]
        of_kind = getattr(tf.train, f"{kind.title()}List")(value=values)
        made[name] = tf.train.Feature(**{f"{kind}_list": of_kind})
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


@pytest.mark.parametrize("kind", ["", "GZIP", "ZLIB"])
def test_records_of_examples(tmp_path, kind):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    image = tf.io.encode_png(pixels).numpy()
    path = tmp_path / ("t.tfrecord.gz" if kind else "t.tfrecord")
    with tf.io.TFRecordWriter(str(path), kind) as writer:
        writer.write(example(image=image, label=3, name=b"x", vector=[1.5, 2.0]))
        writer.write(example(image=image, label=5, vector=[3.5, 4.0]))
    found = tables.read(path)["train"]
    assert list(found.columns) == ["image", "label", "name", "vector"]
    np.testing.assert_array_equal(found.columns["image"], [pixels, pixels])
    np.testing.assert_array_equal(found.columns["label"], [3, 5])
    assert found.columns["name"].tolist() == ["x", ""] and found.where(1) == f"{path.name}, row 1"
    np.testing.assert_array_equal(found.columns["vector"], [[1.5, 2], [3.5, 4]])
    features, labels = arrays(found, tables.choose(found, features=["image"]))
    assert features.dtype == np.uint8 and labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "^t.tfrecord has no rows$"),
        ([b"\xff"], "^t.tfrecord, record 0: it is no tf.train.Example$"),
        ([example(a=1), example(a=b"\xff\xfe")], "^t.tfrecord, record 1: it has bytes that are"),
        ([example(a=[1, 2]), example(a=[1])], "^t.tfrecord: 'a' has values of several sizes"),
        ([example(a=[b"x", b"y"])], "^t.tfrecord: 'a' has values of several sizes or of text"),
    ],
)
def test_records_that_are_no_examples_are_named(tmp_path, records, says):
    with tf.io.TFRecordWriter(str(tmp_path / "t.tfrecord")) as writer:
        for record in records:
            writer.write(record)
    with pytest.raises(UsageError, match=says):
        tables.read(tmp_path / "t.tfrecord")


def write(path, *records: bytes) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def test_records_of_a_schema(tmp_path):
    pixels = np.arange(4, dtype=np.uint8).reshape(2, 2)
    other = np.array([[0.5, -1]], "<f4")
    image = tf.io.encode_png(pixels[..., np.newaxis]).numpy()
    features = {"pixels": pixels.tobytes(), "other": other.tobytes(), "image": image, "text": b"a"}
    features |= {"label": 1, "real": 0.25, "many": [1, 2, 3, 300], "left": b"\xff"}
    write(tmp_path / "t.tfrecord", example(**features), example(**features | {"label": 2}))
    schema = (
        "text:string,pixels:uint8[2,2],other:float32[1,2],image:image,many:int32[4],real:float32"
    )
    found = tables.read(tmp_path / "t.tfrecord", parse_record_schema(f"{schema},label:int64"))
    columns = found["train"].columns
    assert list(columns) == ["text", "pixels", "other", "image", "many", "real", "label"]
    np.testing.assert_array_equal(columns["pixels"], [pixels, pixels])
    assert columns["pixels"].dtype == np.uint8 and columns["many"].dtype == np.int32
    np.testing.assert_array_equal(columns["other"][0], other)
    np.testing.assert_array_equal(columns["image"][1, ..., 0], pixels)
    np.testing.assert_array_equal(columns["many"][1], [1, 2, 3, 300])
    assert columns["text"].tolist() == ["a", "a"] and columns["real"].tolist() == [0.25, 0.25]
    rows, labels = arrays(found["train"], tables.choose(found["train"], features=["pixels"]))
    assert rows.shape == (2, 2, 2, 1) and labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("c:int64", "it has no 'c'; it has a, b"),
        ("a:float32", "'a' has 2 integers, and the schema says float32"),
        ("a:int64[3]", r"'a' has 2 integers, and the schema says int64\[3\]"),
        ("a:uint8[2]", "'a' has 300, which no uint8 holds"),
        ("a:string", "'a' has 2 integers, and the schema says string"),
        ("b:uint8[2]", r"'b' has 3 bytes, and the schema says uint8\[2\], 2 bytes"),
        ("b:string", "'b' is no text in UTF-8"),
        ("b:image", "'b' is no image"),
    ],
)
def test_records_that_do_not_fit_the_schema(tmp_path, schema, says):
    write(tmp_path / "t.tfrecord", example(a=[1, 300], b=b"\xff12"))
    with pytest.raises(UsageError, match=f"^t.tfrecord, record 0: {says}$"):
        tables.read(tmp_path / "t.tfrecord", parse_record_schema(schema))


def test_a_schema_to_paste(tmp_path):
    """What a message prints is taken."""
    path = tmp_path / "t.tfrecord"
    write(path, *(example(a=b"\xff\xfe" + bytes([n]), b=[1.5, 2.5], label=n) for n in range(2)))
    with pytest.raises(UsageError) as raised:
        tables.read(path)
    said, schema = str(raised.value).split(": give the types, as --record_schema=")
    assert said.endswith(
        "record 0 has a of 1 byte strings (3 bytes), b of 2 floats, label of 1 integers"
    )
    assert schema == "a:uint8[3],b:float32[2],label:int64"
    found = tables.read(path, parse_record_schema(schema))["train"]
    assert found.columns["a"].tolist() == [[255, 254, 0], [255, 254, 1]]
    write(path, example(a=[1, 2], b=1), example(a=[1], b=2))
    with pytest.raises(UsageError, match=r"'a' has values of several .*=a:int64\[2\],b:int64$"):
        tables.read(path)


def test_damaged_records_are_named(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "t.tfrecord")) as writer:
        writer.write(example(a=1))
        writer.write(example(a=2))
    content = (tmp_path / "t.tfrecord").read_bytes()
    for damaged in (content[:-3], content[:-9] + b"x" + content[-8:]):
        (tmp_path / "t.tfrecord").write_bytes(damaged)
        with pytest.raises(UsageError, match="^t.tfrecord, record 1 is damaged: "):
            tables.read(tmp_path / "t.tfrecord")


def test_columns_between_bars_and_spaces(tmp_path):
    rows = [f"{n}|{n % 3}|{n % 2}" for n in range(9)]
    (tmp_path / "bars.csv").write_text("\n".join(["a|b|label", *rows]))
    assert tables.read(tmp_path / "bars.csv")["train"].columns.keys() == {"a", "b", "label"}
    (tmp_path / "spaces.csv").write_text("\n".join(["a b label", *rows]).replace("|", "  "))
    with pytest.raises(UsageError, match="^spaces.csv has spaces between its columns: separate"):
        tables.choose(tables.read(tmp_path / "spaces.csv")["train"])
