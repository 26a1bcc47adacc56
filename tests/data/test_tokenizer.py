"""Tokenizers in files: text to tokens and back, and files that are none."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from tokenizer_files import sentencepiece_model, tokenizer_json

from ctl.data import Tokenizer
from ctl.data.text import PAD, pack
from ctl.errors import UsageError

MAKE = {"t.model": sentencepiece_model, "t.json": tokenizer_json}
TEXTS = ["the cat sat", "a dog ran to the mat", ""]


@pytest.mark.parametrize("name", MAKE)
def test_text_to_tokens_and_back(tmp_path, name):
    tokenizer = Tokenizer(MAKE[name](tmp_path / name))
    tokens = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(of_text) for of_text in tokens] == TEXTS
    assert {of_text.dtype for of_text in tokens} == {np.dtype(np.int32)}
    assert [len(of_text) for of_text in tokens] == [len(tokenizer.encode([t])[0]) for t in TEXTS]
    seen = np.concatenate(tokens)
    assert seen.min() > PAD and seen.max() < tokenizer.vocabulary_size
    for one, other in zip(tokens, tokenizer.encode([t.encode() for t in TEXTS]), strict=True):
        np.testing.assert_array_equal(one, other)
    rows = pack(tokens, 20)
    assert sorted(map(tokenizer.decode, rows))[-1].startswith("the cat sat") or len(rows) < 2


def test_the_first_and_the_last_id_are_tokens(tmp_path):
    tokenizer = Tokenizer(sentencepiece_model(tmp_path / "t.model"))
    assert tokenizer.encode(["€"])[0].tolist()[-1] == 1  # <unk> has the id 0
    tokenizer = Tokenizer(tokenizer_json(tmp_path / "t.json"))
    library = pytest.importorskip("tokenizers")
    ids = library.Tokenizer.from_file(str(tmp_path / "t.json")).get_vocab().values()
    assert tokenizer.vocabulary_size == max(ids) + 2


def test_texts_that_are_none(tmp_path):
    tokenizer = Tokenizer(sentencepiece_model(tmp_path / "t.model"))
    with pytest.raises(UsageError, match=r"^text 1 is not UTF-8 \(byte 0xe9\)$"):
        tokenizer.encode(["a", "é".encode("latin-1")])
    with pytest.raises(UsageError, match="^texts is one str: give a list of texts$"):
        tokenizer.encode("the cat")


def test_files_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="t.txt is neither a .model of SentencePiece nor a .json"):
        Tokenizer("t.txt")
    with pytest.raises(UsageError, match=r"^there is no file \S*t.model of a tokenizer$"):
        Tokenizer(tmp_path / "t.model")
    for name, make in MAKE.items():
        make(tmp_path / name).write_bytes(b'{"version": "1.0"}')
        with pytest.raises(UsageError, match=f"{name} is no tokenizer of (sentencep|tokenizers)"):
            Tokenizer(tmp_path / name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, extra in (("t.model", "sentencepiece"), ("t.json", "tokenizers")):
        (tmp_path / name).touch()
        with pytest.raises(UsageError, match=rf"pip install 'ctl\[{extra}\]'$"):
            Tokenizer(tmp_path / name)
