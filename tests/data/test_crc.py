from __future__ import annotations

import numpy as np

from ctl.data import crc


def reference(string: bytes) -> int:
    """Bit by bit, RFC 3720."""
    value = 0xFFFFFFFF
    for byte in string:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_checksums_of_all_lengths_at_once(monkeypatch):
    random = np.random.default_rng(0)
    lengths = [0, 1, 3, 4, 5, 16, *range(204, 212), *range(412, 420), 1024, 3000, 2, 7001, 7002]
    strings = [random.bytes(n) for n in lengths]
    strings += [b"123456789", b"\0" * 600, b"\xff" * 32, *(random.bytes(300) for _ in range(5))]
    expected = [reference(string) for string in strings]
    assert crc.crc32c(strings).tolist() == expected
    monkeypatch.setattr(crc, "_ONCE", 1000)  # several of one length are summed apart
    assert crc.crc32c(strings).tolist() == expected
    assert crc.crc32c([b"123456789"])[0] == 0xE3069283
    assert crc.crc32c([]).tolist() == []


def test_a_long_string():
    """The CRC of any string with its own CRC at its end, little-endian, is one constant."""
    long = np.random.default_rng(0).bytes(1_000_003)
    whole = int(crc.crc32c([long])[0])
    assert crc.crc32c([long + whole.to_bytes(4, "little")])[0] == 0x48674BC7
    assert crc.crc32c([long[:-1] + bytes([long[-1] ^ 1])])[0] != whole
