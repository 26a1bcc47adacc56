"""Files of tokenizers, trained in a moment; a test is skipped where their package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

LINES = ["the cat sat on the mat", "a dog ran to the cat", "the mat is a cat's"] * 9


def sentencepiece_model(path: Path, size: int = 30) -> Path:
    library = pytest.importorskip("sentencepiece", reason="needs the extra `sentencepiece`")
    with open(path, "wb") as file:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=file,
            model_type="bpe",
            vocab_size=size,
            minloglevel=2,
        )
    return path


def tokenizer_json(path: Path) -> Path:
    """Pairs of bytes. It cuts, pads and marks texts, unless it is told not to."""
    library = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        LINES,
        library.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
        ),
    )
    model.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    model.enable_truncation(3)
    model.enable_padding()
    model.save(str(path))
    return path
