"""Fills and reads a cache of blocks: ``cache_worker DIR:SIZE SEED COUNT``. A block holds the CRC-32
of its name, again and again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import zlib

from ctl.base.block_cache import BlockCache, from_text

BLOCKS = 200


def content(number: int, size: int) -> tuple[str, bytes]:
    """The name and the bytes of a block."""
    name = hashlib.sha256(str(number).encode()).hexdigest()[:32]
    length = size - number % 3  # some are shorter
    return name, (zlib.crc32(name.encode()).to_bytes(4, "little") * (size // 4 + 1))[:length]


def in_use(cache: BlockCache) -> int:
    """Bytes on the disk, without those of locks."""
    names = [entry.path for entry in os.scandir(cache.directory) if entry.name not in ("lock",)]
    total = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # it was renamed or deleted meanwhile
            total += os.stat(name).st_blocks * 512
    return total


def run() -> None:
    cache = from_text(sys.argv[1])
    draw = random.Random(int(sys.argv[2]))
    print("ready", flush=True)
    for _ in range(int(sys.argv[3])):
        name, data = content(draw.randrange(BLOCKS), cache.block)
        begin = draw.randrange(1000)
        found = cache.get(name, begin, 1000)
        assert found in (None, data[begin : begin + 1000])
        if found is None:
            cache.put(name, data)
        assert in_use(cache) <= cache.limit
