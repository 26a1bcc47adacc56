"""Tokenizers in files: models of SentencePiece, and ``tokenizer.json`` of Hugging Face."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ctl.base.names import TOKENIZERS, suffix
from ctl.errors import UsageError
from ctl.flags.early import check_tokenizer

PAD = 0  # the token that is none, see `ctl.data.text`


class Tokenizer:
    """Text to tokens and back, by a file that was trained before.

    A token is an id of the file plus 1: ids begin at 0, which is `PAD` here. The marks of beginning
    and end that a file may add are left out, since a `PAD` begins each text.

    Attributes:
        path: of the file.
        vocabulary_size: one more than the largest token: the outputs of a language model.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Loads the file: a ``.model`` of SentencePiece, or a ``.json`` of ``tokenizers``.

        Raises:
            UsageError: there is no such file, it is no tokenizer, or its package is missing.
        """
        self.path = os.fspath(path)
        check_tokenizer(self.path)
        package = TOKENIZERS[suffix(self.path)]
        library: Any = importlib.import_module(package)
        try:
            if package == "sentencepiece":
                model = library.SentencePieceProcessor(model_file=self.path)
                ids = model.get_piece_size()
                self._encode, self._decode = model.encode, model.decode
            else:
                model = library.Tokenizer.from_file(self.path)
                model.no_truncation()
                model.no_padding()
                ids = max(model.get_vocab().values(), default=-1) + 1

                def encode(texts: list[str]) -> list[list[int]]:
                    return [one.ids for one in model.encode_batch(texts, add_special_tokens=False)]

                self._encode, self._decode = encode, model.decode
        except Exception as error:  # of C++ or Rust, without a class of its own
            said = " ".join(str(error).split())[:120]
            raise UsageError(f"{self.path} is no tokenizer of {package}: {said}") from error
        if not ids:
            raise UsageError(f"{self.path} has no tokens: train it first")
        self.vocabulary_size = ids + PAD + 1

    def encode(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The tokens of each text, int32 [n], for the functions of `ctl.data.text`.

        Args:
            texts: bytes are read as UTF-8.

        Raises:
            UsageError: a text is not UTF-8.
        """
        if isinstance(texts, str | bytes):
            raise UsageError(f"texts is one {type(texts).__name__}: give a list of texts")
        strings = []
        for number, text in enumerate(texts):
            try:
                strings.append(text if isinstance(text, str) else bytes(text).decode("utf-8"))
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise UsageError(f"text {number} is not UTF-8 (byte {byte:#x})") from error
        return [np.array(ids, np.int32) + PAD + 1 for ids in self._encode(strings)]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of ``tokens``, integers [n]; `PAD` is left out."""
        return self._decode([int(token) - PAD - 1 for token in tokens if token != PAD])
