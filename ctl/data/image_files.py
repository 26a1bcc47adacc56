"""Files of images: those of a folder, and what TensorFlow's decoders would get wrong."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl.base.names import IMAGES
from ctl.base.remote import AnyPath, scandir

# What this TensorFlow decodes.
ENDS = tuple(end for end in IMAGES if end != ".webp" or hasattr(tf.raw_ops, "DecodeWebP"))

_NAMED = 3  # of what is left out


def images(folder: AnyPath) -> tuple[list[str], list[str]]:
    """The names of the images of ``folder`` in order, and of all else there. What is hidden, its
    name beginning with a dot, is no image: macOS writes a ``._1.png`` beside ``1.png``."""
    found: list[str] = []
    others: list[str] = []
    for entry in scandir(folder):
        is_image = entry.name.lower().endswith(ENDS) and not entry.name.startswith(".")
        (found if is_image and not entry.is_dir() else others).append(_shown(entry))
    return sorted(found), sorted(others)


def classes(folder: AnyPath) -> tuple[set[str], list[str]]:
    """The names of the folders of ``folder`` that are not hidden, and of all else there."""
    found, others = set(), []
    for entry in scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            found.add(entry.name)
        else:
            others.append(_shown(entry))
    return found, sorted(others)


def _shown(entry: Any) -> str:
    return f"{entry.name}/" if entry.is_dir() else entry.name


def left_out(names: Sequence[str]) -> str:
    """Counts ``names``, of which folders end in a slash, by their kind, and shows some."""
    kinds = Counter(
        "folders" if name.endswith("/") else Path(name).suffix.lower() or "without an end"
        for name in names
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{counts}: {', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}"


def per_class(names: Sequence[str], counts: Sequence[int]) -> str:
    """Says how many images each class has: of at most 20, ``cat 10, dog 12``."""
    if len(names) > 20:
        return f"{sum(counts)} in {len(names)} classes, {min(counts)} to {max(counts)} in each"
    return ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))


def problem(data: bytes) -> str:
    """Why TensorFlow would decode the file ``data`` wrongly; "" if it does not.

    It takes the numbers of a palette for the colours of a BMP.
    """
    if data[:2] != b"BM" or len(data) < 54:
        return ""
    (header,) = struct.unpack_from("<I", data, 14)
    bits, compression = struct.unpack_from("<HI", data, 28)
    if header < 40:
        return "a BMP of OS/2"
    if bits <= 8 and not (bits == 8 and _is_gray(data[14 + header :])):
        return "a BMP with a palette"
    if bits not in (8, 24, 32):
        return f"a BMP of {bits} bits"
    masks = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)
    if compression and not (bits == 32 and compression == 3 and data[54:66] == masks):
        return "a compressed BMP"
    return ""


def _is_gray(palette: bytes) -> bool:
    return all(palette[4 * level : 4 * level + 3] == bytes([level] * 3) for level in range(256))


def is_rotated(data: bytes) -> bool:
    """Whether EXIF says that the JPEG ``data`` is to be rotated or mirrored to be shown."""
    at = data.find(b"Exif\0\0", 0, 1 << 16) + 6 if data[:2] == b"\xff\xd8" else 5
    if at < 6:
        return False
    order = "<" if data[at : at + 2] == b"II" else ">"
    try:
        (entries,) = struct.unpack_from(f"{order}I", data, at + 4)
        (count,) = struct.unpack_from(f"{order}H", data, at + entries)
        for entry in range(count):
            begin = at + entries + 2 + 12 * entry
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", data, begin)
            if tag == 0x112:
                return value not in (0, 1)
    except struct.error:  # cut short: the decoder says so
        pass
    return False
