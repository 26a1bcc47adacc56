"""CRC-32C of many byte strings at once, with NumPy: Python has none.

A checksum is linear: that of a string is the XOR of what each part contributes. Tables give the
part of every 16-bit word, as in Kounavis and Berry 2008, "Novel table lookup-based algorithms for
high-performance CRC generation"; sums of neighbours are then joined in pairs. Takes about 1 ns per
byte, without Python's global lock for most of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reversed
_WORD = 16  # bytes that one set of tables sums
_LEVELS = 5
_CHUNK = _WORD << _LEVELS
_ROWS = 1 << 14  # words of 16 bytes at a time, so that they stay in the cache


def masked(strings: Sequence[bytes]) -> np.ndarray:
    """The checksums of ``strings`` as TFRecord files have them, uint32 [n].

    ``tensorflow/core/lib/hash/crc32c.h`` defines the mask.
    """
    crc = crc32c(strings)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def crc32c(strings: Sequence[bytes]) -> np.ndarray:
    """The CRC-32C (RFC 3720, B.4) of each of ``strings``, uint32 [n]."""
    lengths = np.array([len(string) for string in strings], np.int64)
    chunks = -(-lengths // _CHUNK)
    ends = np.cumsum(chunks) * _CHUNK
    # Zeros before a string change nothing; the start value of all ones is that of inverted bytes.
    padded = bytearray(int(chunks.sum()) * _CHUNK)
    for string, end in zip(strings, ends.tolist(), strict=True):
        padded[end - len(string) : end] = string
    data = np.frombuffer(padded, np.uint8)
    short = np.flatnonzero(lengths < 4)
    inverted = np.delete(ends - lengths, short)
    for byte in range(4):
        data[inverted + byte] ^= 255
    words = data.view("<u2").reshape(-1, _WORD // 2)
    parts = [_sums(words[begin : begin + _ROWS]) for begin in range(0, len(words), _ROWS)]
    sums = np.concatenate([np.zeros(0, np.uint32), *parts])
    result = np.zeros(len(lengths), np.uint32)
    first = np.cumsum(chunks) - chunks
    for number in range(int(chunks.max(initial=0))):
        longer = np.flatnonzero(chunks > number)
        result[longer] = _after(result[longer], _CHUNK) ^ sums[first[longer] + number]
    result[short] = [_of_short(strings[row]) for row in short.tolist()]
    return ~result


def _of_short(string: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in string:
        value = int(_byte_table()[(value ^ byte) & 255]) ^ (value >> 8)
    return value


def _sums(words: np.ndarray) -> np.ndarray:
    """The checksum of each chunk of ``words``, uint16 [rows, 8], without the start value."""
    sums = np.zeros(len(words), np.uint32)
    for table, column in zip(_tables(), words.T, strict=True):
        sums ^= np.take(table, column)
    for level in range(_LEVELS):
        sums = _after(sums[::2], _WORD << level) ^ sums[1::2]
    return sums


def _after(sums: np.ndarray, zeros: int) -> np.ndarray:
    """The checksums of strings with ``sums`` and then so many bytes of zeros."""
    low, high = _shift(zeros)
    return np.take(low, sums & np.uint32(0xFFFF)) ^ np.take(high, sums >> np.uint32(16))


@functools.cache
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


def _after_zero(sums: np.ndarray) -> np.ndarray:
    return _byte_table()[sums & np.uint32(255)] ^ (sums >> np.uint32(8))


@functools.cache
def _tables() -> np.ndarray:
    """uint32 [8, 65536]: the checksum of each 16-bit word with the words after it zero."""
    words = np.arange(1 << 16, dtype=np.uint32)
    tables = [_after_zero(_after_zero(words))]
    while len(tables) < _WORD // 2:
        tables.append(_after_zero(_after_zero(tables[-1])))
    return np.stack(tables[::-1])


@functools.cache
def _shift(zeros: int) -> np.ndarray:
    """uint32 [2, 65536]: `_after`, for the lower and the upper half of a checksum."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(zeros):
        columns = _after_zero(columns)
    tables = np.zeros([2, 1], np.uint32)
    for bit in range(16):
        tables = np.concatenate([tables, tables ^ columns.reshape(2, 16)[:, bit, None]], axis=1)
    return tables
