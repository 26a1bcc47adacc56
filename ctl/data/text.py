"""Rows of bytes or other tokens: of text in files, and of what every machine has, Python's sources.

A `PAD` begins each text of a row, and fills the rest of the row. A token belongs to the text of the
last `PAD` before it, so the rows say by themselves which tokens a model may see: `ctl.recipes.gpt`
counts the marks. What follows a token is to be predicted, unless it is a `PAD`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.base.names import TABLES, suffix
from ctl.base.remote import AnyPath, PathLike, located
from ctl.data import index, tables
from ctl.data.arrays import check
from ctl.data.dataset import DatasetInfo, NotResident, distribution_options
from ctl.data.in_memory import InMemory
from ctl.data.mixture import Interleave
from ctl.data.tokenizer import PAD as PAD
from ctl.data.tokenizer import Tokenizer
from ctl.errors import UsageError

SHAPES = 4  # of batches of `Buckets`: XLA compiles a step once for each


def windows(texts: Sequence[bytes | np.ndarray], length: int) -> np.ndarray:
    """Cuts ``texts`` into rows, in which each token follows those before it once.

    Args:
        texts: see `pad`.
        length: tokens to predict in a row.

    Returns:
        As `pad` does. The last token of a row begins the next one of its text.

    Raises:
        UsageError: as `pad` does.
    """
    rows = []
    for text in filter(len, _tokens(texts, length)):
        padded = np.zeros(-len(text) % length + len(text) + 1, text.dtype)  # `PAD`
        padded[1 : len(text) + 1] = text
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
    tokens = _tokens(texts, length)
    return [t[at : at + length] for t in tokens for at in range(0, len(t), length)]


def _tokens(texts: Sequence[bytes | np.ndarray], length: int) -> list[np.ndarray]:
    """The tokens of each text, all of one type."""
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
    return [t.astype(common, copy=False) for t in tokens]


def _rows(rows: Sequence[Sequence[np.ndarray]], length: int) -> np.ndarray:
    filled = np.full([len(rows), length + 1], PAD, rows[0][0].dtype)
    for row, pieces in zip(filled, rows, strict=True):
        end = 0
        for piece in pieces:
            row[end + 1 : end + 1 + len(piece)] = piece
            end += len(piece) + 1
    return filled


def _check(texts: Sequence[bytes | np.ndarray], length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise UsageError(f"the length of a row must be a whole number from 1, not {length!r}")
    if isinstance(texts, str | bytes | bytearray):
        raise UsageError(f"texts is one {type(texts).__name__}: give a list of texts")
    for number, text in enumerate(texts):
        if isinstance(text, str) or not hasattr(text, "__len__"):
            raise UsageError(
                f"text {number} is a {type(text).__name__}: give bytes, as text.encode() makes, or "
                "integers [n], as a ctl.data.Tokenizer makes"
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
    length: int,
    *,
    global_batch_size: int,
    seed: int = 0,
    rows: str = "windows",
    tokenizer: Tokenizer | None = None,
) -> tuple[InMemory | Buckets, InMemory | Buckets]:
    """The modules at the top of Python's standard library. Every 20th module is held out, to
    evaluate on. Another version of Python has others, so a run does not resume there.

    Args:
        length: see `windows`.
        global_batch_size: rows of a batch.
        seed: of the order.
        rows: ``"windows"`` of modules; or each of their `paragraphs` is a text, and they are
            ``"packed"``, ``"padded"`` or in ``"buckets"``.
        tokenizer: makes the tokens, which are bytes without it.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_bytes() for module in modules]
    return _datasets("stdlib", *_held_out(texts), length, rows, tokenizer, global_batch_size, seed)


def files(
    path: PathLike,
    length: int,
    *,
    global_batch_size: int,
    seed: int = 0,
    rows: str = "windows",
    tokenizer: Tokenizer | None = None,
) -> tuple[InMemory | Buckets, InMemory | Buckets]:
    """The texts of a file or of all files below a folder, to train and to evaluate on.

    A ``.txt`` is one text. A table, see `ctl.data.tables`, has one in each row: in the column
    ``text``, or the only one of text. To evaluate on are files and folders whose names begin with
    ``test``, or else ``validation``; or else every 20th text; of a single text, its last 20th.

    Args:
        path: of the file or the folder.
        length, global_batch_size, seed, rows, tokenizer: see `python_sources`.

    Raises:
        UsageError: a file is missing or damaged, there is no text to train or to evaluate on, or a
            text does not suit, see `pad` and `ctl.data.Tokenizer.encode`.
    """
    path = located(path)
    parts: dict[str, list[bytes]] = {}
    with index.readable(path):
        path.stat()
        found: list[Any] = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            inside = file.relative_to(path).parts or (file.name,)
            known = suffix(file.name) in TABLES or file.suffix == ".txt"
            if not known or not file.is_file() or any(one.startswith(".") for one in inside):
                continue
            named = tables.PARTS.get(re.split(r"[-_.]", inside[0].lower())[0], "train")
            for part, texts in _texts_of(file).items():
                parts.setdefault(part if named == "train" else named, []).extend(texts)
    train = parts.get("train", [])
    if not any(train):
        raise UsageError(
            f"{path} has no text to train on: give a .txt, a table with a column text "
            f"({', '.join(TABLES)}), or a folder of them"
        )
    held_out = parts.get("test") or parts.get("validation")
    if not held_out:
        train, held_out = _held_out(train)
    return _datasets(path.name, train, held_out, length, rows, tokenizer, global_batch_size, seed)


def _texts_of(file: AnyPath) -> dict[str, list[bytes]]:
    """The texts of a file by their part."""
    if file.suffix == ".txt":
        return {"train": [file.read_bytes()]}
    parts = {}
    for part, table in tables.read(file).items():
        names = [name for name, column in table.columns.items() if column.dtype == object]
        chosen = ["text"] if "text" in names else names
        if len(chosen) != 1:
            raise UsageError(
                f"{file.name} has {len(chosen)} columns of text, {tables.listed(table.columns)}: "
                "call the one to train on text"
            )
        parts[part] = [text.encode() for text in table.columns[chosen[0]].tolist()]
    return parts


def _held_out(texts: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The texts to train on, and every 20th, from the first; of one, the lines of its last 20th."""
    if len(texts) > 1:
        return [text for number, text in enumerate(texts) if number % 20], [*texts[::20]]
    end = texts[0].rfind(b"\n", 0, len(texts[0]) * 19 // 20) + 1
    if not end:
        raise UsageError("there is one text, of one line: give others to evaluate on, as test.txt")
    return [texts[0][:end]], [texts[0][end:]]


def _datasets(
    name: str,
    train: Sequence[bytes],
    held_out: Sequence[bytes],
    length: int,
    rows: str,
    tokenizer: Tokenizer | None,
    global_batch_size: int,
    seed: int,
) -> tuple[InMemory | Buckets, InMemory | Buckets]:
    size = tokenizer.vocabulary_size if tokenizer else 256

    def data(split: str, texts: Sequence[bytes]) -> InMemory | Buckets:
        if rows != "windows":
            texts = paragraphs(texts)
        tokens = tokenizer.encode(texts) if tokenizer else texts
        options: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "seed": seed,
            "training": split == "train",
            "info": DatasetInfo(name, split=split, vocabulary_size=size),
        }
        if rows == "buckets":
            return Buckets(tokens, length, **options)
        cut = {"windows": windows, "packed": pack, "padded": pad}[rows]
        return InMemory(cut(tokens, length), **options)

    return data("train", train), data("held_out", held_out)
