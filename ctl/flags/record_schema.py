"""The flag ``--record_schema``: the features of the records of TFRecord files, and their types."""

from __future__ import annotations

import re
from typing import NamedTuple

from ctl.errors import UsageError

IMAGE, TEXT = "image", "string"
NUMBERS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_FEATURE = re.compile(r"([^:,\[\]]+):(\w+)(?:\[(\d+(?:,\d+)*)\])?(?:,|$)")


class Feature(NamedTuple):
    """The type of a feature, by its name in TensorFlow or `IMAGE`, and its shape."""

    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return self.kind + (f"[{','.join(map(str, self.shape))}]" if self.shape else "")


def parse_record_schema(text: str) -> dict[str, Feature]:
    """Parses ``"image:uint8[28,28],label:int64"``. The order is that of the columns.

    Raises:
        UsageError: a part is not ``NAME:TYPE`` or ``NAME:TYPE[SIZE,…]``, a type is unknown, or a
            name is there twice.
    """
    found: dict[str, Feature] = {}
    at = 0
    while at < len(text) or not found:
        match = _FEATURE.match(text, at)
        if not match:
            raise UsageError(
                f"--record_schema={text}: {text[at:][:40]!r} is not NAME:TYPE or "
                "NAME:TYPE[SIZE,…], e.g. image:uint8[28,28],label:int64"
            )
        name, kind, sizes = match.groups()
        if kind not in (IMAGE, TEXT, *NUMBERS) or (sizes and kind in (IMAGE, TEXT)):
            raise UsageError(
                f"--record_schema: {name} has no type {match[0][len(name) + 1 :].rstrip(',')}; the "
                f"types are {IMAGE}, {TEXT}, and {', '.join(NUMBERS)}, with a shape such as [28,28]"
            )
        if name in found:
            raise UsageError(f"--record_schema has {name} twice")
        found[name] = Feature(kind, tuple(map(int, sizes.split(","))) if sizes else ())
        at = match.end()
    return found
