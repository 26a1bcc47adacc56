from __future__ import annotations

import numpy as np

from ctl.data.crc import crc32c


def reference(string: bytes) -> int:
    """Bit by bit, RFC 3720."""
    value = 0xFFFFFFFF
    for byte in string:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_checksums_of_all_lengths_at_once():
    random = np.random.default_rng(0)
    strings = [random.bytes(n) for n in (0, 1, 3, 4, 5, 16, 511, 512, 513, 1024, 3000, 2)]
    strings += [b"123456789", b"\0" * 600, b"\xff" * 32]
    assert crc32c(strings).tolist() == [reference(string) for string in strings]
    assert crc32c([b"123456789"])[0] == 0xE3069283
    assert crc32c([]).tolist() == []
