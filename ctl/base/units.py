"""Units of bytes."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size_text(size: int | None, unknown: str = "unknown") -> str:
    """Bytes for people, in the largest unit that fits: 12 B, 153.3 KiB, 2.5 MiB."""
    if size is None:
        return unknown
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
