"""Units of bytes and of seconds, for people."""

from __future__ import annotations

import math

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size_text(size: int | None, unknown: str = "unknown") -> str:
    """Bytes for people, in the largest unit that fits: 12 B, 153.3 KiB, 2.5 MiB."""
    if size is None:
        return unknown
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Seconds for people: 12.3 s, 2:05 (minutes), 1:02:03 (hours)."""
    seconds = 0.0 if abs(seconds) < 0.05 else seconds  # no -0.0
    if not seconds >= 60 or not math.isfinite(seconds):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
