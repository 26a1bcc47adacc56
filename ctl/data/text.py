"""Windows of bytes, and the text that every machine has: the sources of Python's library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctl.data.dataset import DatasetInfo
from ctl.data.in_memory import InMemory
from ctl.errors import UsageError

PAD = 0  # fills the last window of a text, and is before its first byte


def windows(texts: Sequence[bytes], length: int) -> np.ndarray:
    """Cuts ``texts`` into rows, in which each byte follows those before it once.

    Args:
        texts: without the byte `PAD`.
        length: bytes to predict in a row.

    Returns:
        uint8 [rows, length + 1]. The last byte of a row begins the next one of its text.

    Raises:
        UsageError: there is no text, or one has the byte `PAD`.
    """
    if any(PAD in text for text in texts):
        raise UsageError(f"a text has the byte {PAD}, which is the padding: leave it out")
    rows = []
    for text in filter(None, texts):
        padded = np.zeros(-len(text) % length + len(text) + 1, np.uint8)  # `PAD`
        padded[1 : len(text) + 1] = np.frombuffer(text, np.uint8)
        rows.append(np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length])
    if not rows:
        raise UsageError("there is no text to train on")
    return np.concatenate(rows)


def python_sources(
    length: int, *, global_batch_size: int, seed: int = 0
) -> tuple[InMemory, InMemory]:
    """Windows of the modules at the top of Python's standard library. Every 20th module is held
    out, to evaluate on. Another version of Python has others, so a run does not resume there.

    Args:
        length: see `windows`.
        global_batch_size: rows of a batch.
        seed: of the order.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))

    def data(split: str, chosen: Sequence[Path]) -> InMemory:
        return InMemory(
            windows([file.read_bytes() for file in chosen], length),
            global_batch_size=global_batch_size,
            seed=seed,
            training=split == "train",
            info=DatasetInfo("stdlib", split=split),
        )

    train = [file for number, file in enumerate(files) if number % 20]
    return data("train", train), data("held_out", files[::20])
