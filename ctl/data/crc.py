"""CRC-32C of many byte strings at once, with NumPy: Python has none.

A string is a polynomial over GF(2), and its checksum the remainder by P. Some multiples of P have
few terms (Meier and Staffelbach 1989, "Fast correlation attacks on certain stream ciphers"): here
x^(8·209) = x^(8·144) + x^(8·54) + x^(8·39) + x^(8·14) + 1 modulo P. So a byte may be moved by XOR
to the five places 65, 155, 170, 195 and 209 bytes further, and the checksum stays the same. Squares
hold, too: all distances times 2, 4, 8, ... So most of a string is folded into its last 209 bytes
by XORs of long vectors, and only these are looked up in tables, which stay small: tables for all of
a string push from the processor's cache what decodes the images at the same time.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reversed
_TOP, *_LOWER = 209, 144, 54, 39, 14, 0  # bytes
_ONCE = 1 << 22  # bytes that are folded together
# The start value of all ones is the remainder of these bytes, so a string begins with them.
_START = bytes.fromhex("54641f64")


def masked(strings: Sequence[bytes]) -> np.ndarray:
    """The checksums of ``strings`` as TFRecord files have them, uint32 [n].

    ``tensorflow/core/lib/hash/crc32c.h`` defines the mask.
    """
    crc = crc32c(strings)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def crc32c(strings: Sequence[bytes]) -> np.ndarray:
    """The CRC-32C (RFC 3720, B.4) of each of ``strings``, uint32 [n]."""
    result = np.zeros(len(strings), np.uint32)
    tables = _tables()
    for size, numbers in _groups([len(_START) + len(string) for string in strings]):
        padded = bytearray(size * len(numbers))  # zeros before a string change nothing
        for end, number in enumerate(numbers, 1):
            string = _START + strings[number]
            padded[end * size - len(string) : end * size] = string
        rest = _folded(np.frombuffer(padded, np.uint8).reshape(-1, size))
        places = np.arange(_TOP - rest.shape[1], _TOP)
        result[numbers] = np.bitwise_xor.reduce(tables[places, rest], axis=1)
    return ~result


def _groups(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Strings of about one length: what to pad it to, and their numbers."""
    left = sorted(range(len(lengths)), key=lengths.__getitem__)
    while left:
        size = max(lengths[left[-1]], _TOP)
        least = min(size - size // 8, size - _TOP)  # at most an eighth is padding
        first = bisect.bisect_left(left, least, key=lengths.__getitem__)
        first = max(first, len(left) - max(1, _ONCE // size))
        yield size, left[first:]
        del left[first:]


def _folded(rows: np.ndarray) -> np.ndarray:
    """Strings of at most `_TOP` bytes with the remainders of ``rows``, uint8 [n, size]."""
    size = left = rows.shape[1]
    scale = 1 << (left // _TOP).bit_length() - 1
    while scale:
        while left > _TOP * scale:
            begin = size - left
            moved = min((_TOP - _LOWER[0]) * scale, left - _TOP * scale)
            for lower in _LOWER:
                place = begin + (_TOP - lower) * scale
                rows[:, place : place + moved] ^= rows[:, begin : begin + moved]
            left -= moved
        scale //= 2
    return rows[:, size - left :]


@functools.cache
def _tables() -> np.ndarray:
    """uint32 [209, 256]: the remainder of each byte at each place of the last 209."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, (last >> 1) ^ np.uint32(_POLYNOMIAL), last >> 1)
    tables = [last]
    while len(tables) < _TOP:
        tables.append(last[tables[-1] & 255] ^ (tables[-1] >> 8))
    return np.stack(tables[::-1]).astype(np.uint32)
