"""Rows of bytes or other tokens, and the text that every machine has: the sources of Python.

A `PAD` begins each text of a row, and fills the rest of the row. A token belongs to the text of the
last `PAD` before it, so the rows say by themselves which tokens a model may see: `ctl.recipes.gpt`
counts the marks. What follows a token is to be predicted, unless it is a `PAD`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.arrays import check
from ctl.data.dataset import DatasetInfo, NotResident, distribution_options
from ctl.data.in_memory import InMemory
from ctl.data.mixture import Interleave
from ctl.errors import UsageError

PAD = 0  # before the first token of a text, and after the last one of a row
SHAPES = 4  # of batches of `Buckets`: XLA compiles a step once for each


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
    _check(texts, length, bytes | bytearray)
    rows = []
    for text in filter(None, texts):
        padded = np.zeros(-len(text) % length + len(text) + 1, np.uint8)  # `PAD`
        padded[1 : len(text) + 1] = np.frombuffer(text, np.uint8)
        rows.append(np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length])
    return np.concatenate(rows)


def pad(texts: Sequence[bytes | np.ndarray], length: int) -> np.ndarray:
    """One text in each row, after a `PAD`. Texts longer than ``length`` are cut into several.

    Args:
        texts: bytes, or integers [n], without `PAD`. They may be of several types that fit in one.
        length: tokens to predict in a row.

    Returns:
        [rows, length + 1], of the type that has all the types of the texts; uint8 for bytes.

    Raises:
        UsageError: there is no text, or one has a `PAD`; or no type of integers has them all.
    """
    return _rows([[piece] for piece in _pieces(texts, length)], length)


def pack(texts: Sequence[bytes | np.ndarray], length: int) -> np.ndarray:
    """As `pad`, but with as many texts in a row as fit, the longest first, each into the row with
    the least room that has enough (best-fit decreasing; Johnson 1973)."""
    rows: list[list[np.ndarray]] = []
    with_room: dict[int, list[int]] = {}  # numbers of rows by the places left
    rooms: list[int] = []  # the keys, in order
    for piece in sorted(_pieces(texts, length), key=len, reverse=True):
        place = bisect.bisect_left(rooms, len(piece) + 1)
        room, row = length + 1, len(rows)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            rows.append([])
        rows[row].append(piece)
        if (room := room - len(piece) - 1) > 1:  # a text needs two places
            if room not in with_room:
                bisect.insort(rooms, room)
            with_room.setdefault(room, []).append(row)
    return _rows(rows, length)


def _pieces(texts: Sequence[bytes | np.ndarray], length: int) -> list[np.ndarray]:
    _check(texts, length)
    tokens = []
    for number, text in enumerate(texts):
        try:
            one = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else np.asanyarray(text)
        except ValueError as error:
            raise UsageError(f"text {number} has lists of different lengths") from error
        if one.ndim != 1:
            raise UsageError(f"text {number} has the shape {list(one.shape)}: give integers [n]")
        tokens.append(one)
    for number, of_text in enumerate(tokens):
        if np.ma.is_masked(of_text) or of_text.dtype.hasobject:
            check(of_text, f"text {number}")
    kinds = {t.dtype for t in tokens if len(t)}  # an empty list has floats
    integers = all(kind.kind in "iu" for kind in kinds)
    if not integers or (common := np.result_type(*kinds)).kind == "f":
        raise UsageError(
            f"tokens must be integers of one type, not {', '.join(sorted(map(str, kinds)))}"
        )
    tokens = [t.astype(common, copy=False) for t in tokens]
    return [t[at : at + length] for t in tokens for at in range(0, len(t), length)]


def _rows(rows: Sequence[Sequence[np.ndarray]], length: int) -> np.ndarray:
    filled = np.full([len(rows), length + 1], PAD, rows[0][0].dtype)
    for row, pieces in zip(filled, rows, strict=True):
        end = 0
        for piece in pieces:
            row[end + 1 : end + 1 + len(piece)] = piece
            end += len(piece) + 1
    return filled


def _check(texts: Sequence[bytes | np.ndarray], length: int, kinds: Any = object) -> None:
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise UsageError(f"the length of a row must be a whole number from 1, not {length!r}")
    if isinstance(texts, str | bytes | bytearray):
        raise UsageError(f"texts is one {type(texts).__name__}: give a list of texts")
    for number, text in enumerate(texts):
        if isinstance(text, str) or not hasattr(text, "__len__") or not isinstance(text, kinds):
            raise UsageError(
                f"text {number} is a {type(text).__name__}: give bytes, as text.encode() makes"
                + (", or integers [n]" if kinds is object else "")
            )
    if not any(len(text) for text in texts):
        raise UsageError("there is no text to train on")
    if any(PAD in text for text in texts):
        what = "byte" if isinstance(texts[0], bytes) else "token"
        raise UsageError(
            f"a text contains the {what} {PAD}, which is reserved for padding: remove it"
        )


class Buckets(NotResident):
    """Texts of like length in each batch, so that there is little padding, in few shapes.

    A text is in the shortest row that has room for it. Each length has an order of its own, see
    `InMemory`; their batches take turns by the number of texts, see `ctl.data.mixture.Interleave`.
    The batches of an evaluation come by length; the last one of each may be smaller.
    """

    def __init__(
        self,
        texts: Sequence[bytes | np.ndarray],
        length: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        training: bool = True,
        info: DatasetInfo | None = None,
    ):
        """Makes at most `SHAPES` buckets, of lengths up to ``length`` with the least padding.

        Args:
            texts, length: see `pad`.
            global_batch_size, seed, training, info: see `InMemory`.

        Raises:
            UsageError: as `pad` and `InMemory` do.
        """
        pieces = _pieces(texts, length)
        sizes = np.array([len(piece) for piece in pieces])
        self.lengths = _lengths(sizes, global_batch_size if training else 1)
        of = np.searchsorted(self.lengths, sizes)
        self._parts = [
            InMemory(
                pad([piece for piece, one in zip(pieces, of, strict=True) if one == bucket], size),
                global_batch_size=global_batch_size,
                seed=seed,
                training=training,
            )
            for bucket, size in enumerate(self.lengths)
        ]
        self.training = training
        self.global_batch_size = global_batch_size
        # An evaluation has a smaller batch for each length: it ends where the batches end.
        self.num_examples: int | None = len(pieces) if training else None
        self.info = info or DatasetInfo("texts")
        rounding = -(-len(pieces) // 500_000)  # the table of an `Interleave` must not be too long
        counts = [part.num_examples for part in self._parts]
        self._interleave = Interleave([max(1, count // rounding) for count in counts])
        self.description = (
            f"{self.info.name}, {len(pieces)} texts, in batches of {self.lengths} tokens"
        )

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """See `ctl.data.Dataset.batches`. An element is [n, one of the lengths + 1]."""
        if self.training:
            counts = self._interleave.counts(start_step)
            parts = [_gathered(p, n) for p, n in zip(self._parts, counts, strict=True)]
            batches = self._interleave.merge(start_step, parts)
        else:
            first, *others = (_gathered(part, 0) for part in self._parts)
            for other in others:
                first = first.concatenate(other)
            batches = first.skip(start_step)
        return batches.prefetch(2).with_options(distribution_options())

    def fingerprint(self) -> dict[str, Any]:
        """See `ctl.data.Dataset.fingerprint`."""
        return {"buckets": [part.fingerprint() for part in self._parts]}


def _lengths(sizes: np.ndarray, least: int) -> list[int]:
    """At most `SHAPES` lengths with the fewest places in all, for ``least`` texts each if there are
    as many. ``sizes`` [n] are those of the texts."""
    candidates = np.unique(np.quantile(np.unique(sizes), np.arange(33) / 32, method="higher"))
    up_to = np.searchsorted(np.sort(sizes), candidates, side="right")
    best, lengths = math.inf, [int(candidates[-1])]
    for few in range(SHAPES):
        for chosen in itertools.combinations(range(len(candidates) - 1), few):
            of = [*chosen, len(candidates) - 1]
            texts = np.diff(up_to[of], prepend=0)
            places = texts @ (candidates[of] + 1)
            if places < best and texts.min() >= least:
                best, lengths = places, candidates[of].astype(int).tolist()
    return lengths


def _gathered(part: InMemory, start_step: int) -> tf.data.Dataset:
    """The batches of ``part`` from ``start_step`` on, as rows [n, length + 1]."""
    rows = tf.constant(part.arrays)
    return part.batches(start_step).map(lambda indices: tf.gather(rows, indices))


def paragraphs(texts: Sequence[bytes]) -> list[bytes]:
    """The parts of ``texts`` between empty lines."""
    return [part for text in texts for part in text.split(b"\n\n") if part.strip()]


def python_sources(
    length: int, *, global_batch_size: int, seed: int = 0, rows: str = "windows"
) -> tuple[InMemory | Buckets, InMemory | Buckets]:
    """The modules at the top of Python's standard library. Every 20th module is held out, to
    evaluate on. Another version of Python has others, so a run does not resume there.

    Args:
        length: see `windows`.
        global_batch_size: rows of a batch.
        seed: of the order.
        rows: ``"windows"`` of modules; or each of their `paragraphs` is a text, and they are
            ``"packed"``, ``"padded"`` or in ``"buckets"``.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))

    def data(split: str, chosen: Sequence[Path]) -> InMemory | Buckets:
        texts = [file.read_bytes() for file in chosen]
        options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "seed": seed,
            "training": split == "train",
            "info": DatasetInfo("stdlib", split=split),
        }
        if rows != "windows":
            texts = paragraphs(texts)
        if rows == "buckets":
            return Buckets(texts, length, **options)
        cut = {"windows": windows, "packed": pack, "padded": pad}[rows]
        return InMemory(cut(texts, length), **options)

    train = [file for number, file in enumerate(files) if number % 20]
    return data("train", train), data("held_out", files[::20])
