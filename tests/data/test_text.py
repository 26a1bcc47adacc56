"""Windows of bytes, and the sources of the standard library."""

from __future__ import annotations

import numpy as np
import pytest

from ctl.data.text import PAD, python_sources, windows
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


def test_the_sources_have_one_order_and_held_out_files():
    made = [python_sources(64, global_batch_size=8) for _ in range(2)]
    for first, second in zip(*made, strict=True):
        assert first.fingerprint() == second.fingerprint()
    train, held_out = made[0]
    assert train.num_examples > 10 * held_out.num_examples > 0
    assert (train.info.split, held_out.info.split) == ("train", "held_out")
    rows = {row.tobytes() for row in train.arrays}
    assert np.mean([row.tobytes() in rows for row in held_out.arrays]) < 0.2
