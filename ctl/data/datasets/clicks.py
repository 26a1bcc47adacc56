"""Writes click data of Criteo's form (`ctl.data.clicks`) that are drawn at random.

    clicks.write("/tmp/clicks/train.txt", 0, 100_000)

The 26 categories have as many values as those of the data of the Kaggle challenge, and their
frequencies follow a power law. A logistic model of some of the fields, which is drawn, too, decides
on the clicks, so there is something to learn.
"""

from __future__ import annotations

import contextlib
import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ctl.base.names import CLICK_CATEGORIES as CATEGORIES
from ctl.base.names import CLICK_NUMBERS as NUMBERS
from ctl.base.names import suffix
from ctl.data.clicks import FIELDS

# The values of each category there.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CLICK_RATE = 0.256  # of the data of the challenge
_AT_ONCE = 1 << 13  # lines of one generator of random numbers
_EXPONENT = 1.1  # the value of rank r is as frequent as r ** -1.1
# A field lacks this share of its values: the first of each four none, and so on.
_MISSING = (0.0, 0.03, 0.2, 0.45)
_LEARNABLE = 1 << 10  # only categories with at most so many values have an effect
_CALIBRATED = 1 << 14  # lines from which the click rate is set
_MIXED = np.uint32(0x9E3779B1)  # odd: 2**32 / the golden ratio


class Drawn(NamedTuple):
    """Examples: integers and hashes, int64 [n, 13] and uint32 [n, 26], and where they are missing;
    the labels, bool [n], and the probability of each to be 1."""

    numbers: np.ndarray
    no_number: np.ndarray
    hashes: np.ndarray
    no_hash: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


def draw(begin: int, end: int, seed: int = 0) -> Iterator[Drawn]:
    """Yields the examples from ``begin`` up to ``end`` of the endless sequence of a ``seed``."""
    effects = np.random.default_rng([seed, 0])
    weights = effects.normal(size=NUMBERS) / math.sqrt(NUMBERS)
    salts = effects.integers(1 << 32, size=CATEGORIES, dtype=np.uint32)
    some = [_logits(_fields(seed, part), weights, salts) for part in range(_CALIBRATED // _AT_ONCE)]
    bias = _bias(np.concatenate(some))
    for part in range(begin // _AT_ONCE, -(-end // _AT_ONCE)):
        fields = _fields(seed, part)
        probabilities = _sigmoid(_logits(fields, weights, salts) + bias)
        labels = fields.uniform < probabilities
        rows = slice(max(0, begin - part * _AT_ONCE), end - part * _AT_ONCE)
        hashes = _hashes(fields.ranks)
        columns = (fields.numbers, fields.no_number, hashes, fields.no_hash, labels, probabilities)
        yield Drawn(*(column[rows] for column in columns))


class _Fields(NamedTuple):
    numbers: np.ndarray
    no_number: np.ndarray
    ranks: np.ndarray
    no_hash: np.ndarray
    uniform: np.ndarray


def _fields(seed: int, part: int) -> _Fields:
    random = np.random.default_rng([seed, 1, part])
    numbers = np.exp(1 + 1.5 * random.normal(size=(_AT_ONCE, NUMBERS))).astype(np.int64)
    numbers[:, 1] -= 3  # of the second, some are negative in the data of the challenge
    # The inverse of the integral of r ** -exponent.
    power = 1 - _EXPONENT
    tops = np.array(KAGGLE_ROWS) + 1.0
    draws = random.random((_AT_ONCE, CATEGORIES))
    ranks = (1 + draws * (tops**power - 1)) ** (1 / power)
    missing = np.resize(_MISSING, NUMBERS + CATEGORIES)
    lacks = random.random((_AT_ONCE, NUMBERS + CATEGORIES)) < missing
    return _Fields(
        numbers,
        lacks[:, :NUMBERS],
        np.minimum(ranks.astype(np.uint32) - 1, np.array(KAGGLE_ROWS, np.uint32) - 1),
        lacks[:, NUMBERS:],
        random.random(_AT_ONCE),
    )


def _logits(fields: _Fields, weights: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """The logits of the planted model without its bias, float64 [n]."""
    logs = np.log1p(np.maximum(fields.numbers, 0))
    logits = np.where(fields.no_number, 0, logs) @ weights
    for column, rows in enumerate(KAGGLE_ROWS):
        if rows <= _LEARNABLE:
            # A value of a standard normal distribution for each rank.
            effect = np.random.default_rng(int(salts[column])).normal(size=rows)
            logits += np.where(fields.no_hash[:, column], 0, effect[fields.ranks[:, column]]) / 3
    return logits


def _bias(logits: np.ndarray) -> float:
    """What makes the mean probability `CLICK_RATE`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _sigmoid(logits + middle).mean() < CLICK_RATE else (low, middle)
        )
    return low


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _hashes(ranks: np.ndarray) -> np.ndarray:
    """The hash of each rank, another for each: MurmurHash3 ends with this bijection."""
    mixed = ranks + np.arange(1, CATEGORIES + 1, dtype=np.uint32) * _MIXED
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def write(path: str | Path, begin: int, end: int, seed: int = 0) -> tuple[float, float]:
    """Writes the examples from ``begin`` up to ``end``, as TFRecord if ``path`` ends so, else as
    text, compressed if it ends with ``.gz``.

    Returns:
        The share of clicks, and the AUC of the model that decided on them: no other has a better
        one on many examples.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    labels, probabilities = [], []
    with contextlib.ExitStack() as stack:
        if suffix(path.name) == ".tfrecord":
            import tensorflow as tf

            records = stack.enter_context(tf.io.TFRecordWriter(str(path)))
        else:
            # Without a name and a time, the bytes are the same each time.
            raw = stack.enter_context(open(path, "wb"))
            zipped = path.name.endswith(".gz")
            file = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if zipped else raw
            text = stack.enter_context(file)
        for drawn in draw(begin, end, seed):
            if suffix(path.name) == ".tfrecord":
                for record in _records(drawn):
                    records.write(record)
            else:
                text.write(_lines(drawn))
            labels.append(drawn.labels)
            probabilities.append(drawn.probabilities)
    clicks = np.concatenate(labels)
    return float(clicks.mean()), auc(clicks, np.concatenate(probabilities))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The area under the ROC curve of ``labels``, bool [n], by ranks: exact where no two
    ``scores``, float [n], are equal; NaN if all labels are alike."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    ones = int(labels.sum())
    pairs = ones * (len(labels) - ones)
    return float((ranks[labels].sum() - ones * (ones + 1) / 2) / pairs) if pairs else math.nan


def _cells(drawn: Drawn) -> Iterator[Sequence[str]]:
    """The columns as text."""
    yield [str(int(label)) for label in drawn.labels]
    for values, missing in zip(drawn.numbers.T, drawn.no_number.T, strict=True):
        yield ["" if no else str(value) for value, no in zip(values, missing, strict=True)]
    for values, missing in zip(drawn.hashes.T, drawn.no_hash.T, strict=True):
        yield ["" if no else f"{value:08x}" for value, no in zip(values, missing, strict=True)]


def _lines(drawn: Drawn) -> bytes:
    rows = zip(*_cells(drawn), strict=True)
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def _records(drawn: Drawn) -> Iterator[bytes]:
    import tensorflow as tf

    for row in zip(*_cells(drawn), strict=True):
        example = tf.train.Example()
        for number, (name, cell) in enumerate(zip(FIELDS, row, strict=True)):
            if cell and number <= NUMBERS:
                example.features.feature[name].int64_list.value.append(int(cell))
            elif cell:
                example.features.feature[name].bytes_list.value.append(cell.encode())
        yield example.SerializeToString(deterministic=True)
