"""Windows of bytes, and the sources of the standard library."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizer_files import sentencepiece_model

from ctl.data import Tokenizer
from ctl.data.text import (
    PAD,
    SHAPES,
    Buckets,
    files,
    pack,
    pad,
    paragraphs,
    python_sources,
    windows,
)
from ctl.errors import UsageError

TEXTS = [b"one", b"", b"four", b"a longer text", b"exactly "]


@pytest.mark.parametrize("length", [1, 4, 50])
def test_each_byte_is_to_be_predicted_once(length):
    rows = windows(TEXTS, length)
    targets = rows[:, 1:]
    assert rows.dtype == np.uint8 and rows.shape[1] == length + 1
    assert targets[targets != PAD].tobytes() == b"".join(TEXTS)
    for text in filter(None, TEXTS):  # its first byte follows the mark of a new text
        assert [PAD, text[0]] in rows[:, :2].tolist()
    pieces = [row.tobytes().strip(b"\0") for row in rows]
    assert all(any(piece in text for text in TEXTS) for piece in pieces)


@pytest.mark.parametrize(
    ("texts", "says"),
    [([], "^there is no text"), ([b""], "^there is no text"), ([b"a\0"], "byte 0")],
)
def test_texts_that_cannot_be_cut(texts, says):
    with pytest.raises(UsageError, match=says):
        windows(texts, 4)


def test_windows_of_other_tokens():
    rows = windows([np.array([70_000, 2, 3], np.int32), np.array([5], np.int32)], 2)
    assert rows.tolist() == [[PAD, 70_000, 2], [2, 3, PAD], [PAD, 5, PAD]]
    assert rows.dtype == np.int32
    with pytest.raises(UsageError, match="text 0 is a str: give bytes, .*a ctl.data.Tokenizer"):
        windows(["a"], 2)


def texts_of(rows: np.ndarray) -> list[bytes]:
    """The texts of rows, which all begin with a mark."""
    assert (rows[:, 0] == PAD).all()
    return [text for row in rows for text in row.astype(np.uint8).tobytes().split(b"\0") if text]


def many_texts(count: int = 400, longest: int = 40) -> list[bytes]:
    random = np.random.default_rng(0)
    sizes = random.integers(1, longest + 1, count)
    return [random.integers(1, 256, size, dtype=np.uint8).tobytes() for size in sizes]


@pytest.mark.parametrize("cut", [pad, pack])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_each_text_is_in_one_row(cut, length):
    texts = many_texts()
    rows = cut(texts, length)
    assert rows.dtype == np.uint8 and rows.shape[1] == length + 1
    pieces = [t[at : at + length] for t in texts for at in range(0, len(t), length)]
    assert sorted(texts_of(rows)) == sorted(pieces)
    if cut is pad:
        assert texts_of(rows) == pieces  # one in each row, in order
        assert len(rows) == len(pieces)
    elif length > 1:
        at_the_end = np.argmax(rows[:, ::-1] != PAD, axis=1).sum()
        assert at_the_end / rows.size <= 0.05
        assert len(rows) < len(pieces)
    np.testing.assert_array_equal(rows, cut(texts, length))


def test_other_tokens_than_bytes():
    for cut in (pad, pack):
        rows = cut([np.array([70_000, 2]), np.array([5])], 4)
        assert rows.dtype == np.int64
        assert sorted(rows[rows != PAD]) == [2, 5, 70_000]
        with pytest.raises(UsageError, match="a text contains the token 0"):
            cut([np.array([3, 0])], 4)


@pytest.mark.slow
def test_batches_have_few_shapes_and_each_text_once():
    texts, size = many_texts(), 8
    made = Buckets(texts, 40, global_batch_size=size, seed=3)
    batches = list(made.batches().take(60).as_numpy_iterator())
    assert made.num_examples == 400 and made.fingerprint() == made.fingerprint()
    assert 1 < len({batch.shape for batch in batches}) <= SHAPES == len(made.lengths)
    seen = [text for batch in batches[:50] for text in texts_of(batch)]
    # A batch can have texts of two epochs of its length.
    assert len(set(seen)) > 400 - SHAPES * size
    for start in (1, 17, 55):
        late = made.batches(start).take(60 - start).as_numpy_iterator()
        for ours, theirs in zip(late, batches[start:], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    places = sum(batch.size for batch in batches)
    assert places < 0.75 * len(batches) * size * 41
    ends = Buckets(texts, 40, global_batch_size=size, training=False)
    evaluated = [t for batch in ends.batches().as_numpy_iterator() for t in texts_of(batch)]
    assert sorted(evaluated) == sorted(texts)
    assert len(list(ends.batches(3))) == len(list(ends.batches())) - 3


def test_a_bucket_has_a_batch():
    few = [b"a" * n for n in (1, 9, 9, 9, 9, 9, 9, 20)]
    assert Buckets(few, 30, global_batch_size=4).lengths == [9, 20][1:]
    with pytest.raises(UsageError, match="larger than the dataset, which has 8 examples"):
        Buckets(few, 30, global_batch_size=9)


def test_paragraphs():
    assert paragraphs([b"a\nb\n\n\nc\n\n \n\nd"]) == [b"a\nb", b"\nc", b"d"]


def test_the_sources_have_one_order_and_held_out_files():
    made = [python_sources(64, global_batch_size=8) for _ in range(2)]
    for first, second in zip(*made, strict=True):
        assert first.fingerprint() == second.fingerprint()
    train, held_out = made[0]
    assert train.num_examples > 10 * held_out.num_examples > 0
    assert (train.info.split, held_out.info.split) == ("train", "held_out")
    rows = {row.tobytes() for row in train.arrays}
    assert np.mean([row.tobytes() in rows for row in held_out.arrays]) < 0.2


SMALL, LARGE = np.array([5], np.int16), np.array([70_000, 2])


@pytest.mark.parametrize("cut", [pad, pack])
def test_tokens_of_several_types(cut):
    for texts in ([SMALL, LARGE], [LARGE, SMALL], [SMALL, b"\7", LARGE.astype(">i4"), []]):
        rows = cut(texts, 4)
        assert {5, 2, 70_000} <= set(rows.ravel().tolist())
        assert rows.dtype.kind == "i" and rows.dtype.isnative
    for texts, says in (
        ([SMALL, np.array([1.5])], "tokens must be integers of one type, not float64, int16"),
        ([SMALL, np.array([1], np.uint64)], "of one type, not int16, uint64"),
        ([np.array(["a"])], "of one type, not <U1"),
        ([np.ma.array([1, 2], mask=[0, 1])], "text 0: the array has masked values"),
        ([np.array([2**70, None], object)], r"text 0: .* objects \(NoneType, int\)"),
    ):
        with pytest.raises(UsageError, match=says):
            cut(texts, 4)


def test_buckets_have_one_type():
    texts = [SMALL] * 8 + [np.arange(69_000, 69_009)] * 8
    dataset = Buckets(texts, 9, global_batch_size=4, training=False)
    seen = {int(token) for batch in dataset.batches() for token in batch.numpy().ravel()}
    assert seen == {0, 5, *range(69_000, 69_009)}


def words(dataset) -> set[bytes]:
    return {word for text in texts_of(dataset.arrays) for word in text.split()}


def test_texts_in_files(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/one.txt").write_text("one\n\nuno")
    (tmp_path / "some/two.jsonl").write_text('{"text": "two", "id": "x"}\n{"text": "drei"}\n')
    (tmp_path / "some/notes.md").write_text("left out")
    (tmp_path / ".hidden.txt").write_text("left out")
    (tmp_path / "test.csv").write_text("number,said\n1,held\n2,out\n")
    train, test = files(tmp_path, 8, global_batch_size=1, rows="padded")
    assert words(train) == {b"one", b"uno", b"two", b"drei"} and words(test) == {b"held", b"out"}
    assert train.info.vocabulary_size == 256 and test.info.split == "held_out"
    (tmp_path / "test.csv").unlink()  # then every 20th, from the first
    train, test = files(tmp_path, 8, global_batch_size=1, rows="padded")
    assert words(train) == {b"two", b"drei"} and words(test) == {b"one", b"uno"}


def test_one_text_holds_out_its_last_lines(tmp_path):
    lines = [f"line{n}" for n in range(100)]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    train, test = files(tmp_path / "t.txt", 800, global_batch_size=1)
    found = [b"".join(texts_of(part.arrays)).decode().split() for part in (train, test)]
    assert found[0] + found[1] == lines and len(found[1]) in (5, 6)


def test_texts_in_files_that_do_not_suit(tmp_path):
    with pytest.raises(UsageError, match="t.txt is missing: give another path"):
        files(tmp_path / "t.txt", 8, global_batch_size=1)
    with pytest.raises(UsageError, match="has no text to train on: give a .txt, a table with"):
        files(tmp_path, 8, global_batch_size=1)
    (tmp_path / "t.csv").write_text("a,b,c\nx,y,1\n")
    with pytest.raises(UsageError, match="^t.csv has 2 columns of text, a, b, c: call the one"):
        files(tmp_path / "t.csv", 8, global_batch_size=1)
    (tmp_path / "t.txt").write_text("a text without lines")
    with pytest.raises(UsageError, match="there is one text, of one line: give others to eval"):
        files(tmp_path / "t.txt", 8, global_batch_size=1)


def test_texts_in_tokens_of_a_tokenizer(tmp_path):
    tokenizer = Tokenizer(sentencepiece_model(tmp_path / "t.model"))
    (tmp_path / "train.txt").write_text("the cat sat on the mat")
    (tmp_path / "test.txt").write_text("a dog")
    for rows in ("windows", "packed"):
        train, test = files(tmp_path, 40, global_batch_size=1, rows=rows, tokenizer=tokenizer)
        assert tokenizer.decode(train.arrays[0]) == "the cat sat on the mat"
        assert tokenizer.decode(test.arrays[0]) == "a dog"
        assert train.info.vocabulary_size == tokenizer.vocabulary_size == 31
