"""The door for arrays of the user's: what a tensor can hold, in this machine's order of bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl.errors import UsageError


def native(nest: Any, what: str, strings: type | None = None) -> Any:
    """Returns a nest of arrays in this machine's order of bytes, which files of other machines may
    not have. TensorFlow takes the bytes of an array from a Python function as they are.

    Args:
        nest: of arrays, or of what `numpy.asarray` takes. An array in this order is not copied.
        what: names the data in messages.
        strings: the type to give to arrays of strings; None for the one that they have.

    Raises:
        UsageError: as `check` does.
    """
    check(nest, what)
    leaves = tf.nest.flatten(nest)
    arrays = [_native(np.asarray(leaf), strings) for leaf in leaves]
    if all(array is leaf for array, leaf in zip(arrays, leaves, strict=True)):
        return nest  # `tf.nest` is slow
    return tf.nest.pack_sequence_as(nest, arrays)


def _native(array: np.ndarray, strings: type | None) -> np.ndarray:
    wanted = strings if strings and array.dtype.kind in "SU" else array.dtype.newbyteorder("=")
    return array.astype(wanted, copy=False)


def check(nest: Any, what: str) -> None:
    """Checks the arrays of ``nest``; see `native` for the arguments. Reads no numbers.

    Raises:
        UsageError: an array has a type that no tensor has, such as records and dates, has Python
            objects other than strings, or masked values, whose mask would be lost.
    """
    for number, leaf in enumerate(tf.nest.flatten(nest)):
        if problem := _problem(leaf):
            place = next(itertools.islice(_places(nest), number, None), "")
            raise UsageError(f"{what}: the array{place and ' ' + place} has {problem}")


def _problem(leaf: Any) -> str:
    if np.ma.is_masked(leaf):
        return "masked values: fill them with numbers"
    array = np.asarray(leaf)
    if array.dtype == object:
        kinds = {type(item) for item in array.flat if not isinstance(item, str | bytes)}
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        return names and f"Python objects ({names}): make numbers or strings of them"
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        return f"the type {array.dtype}, which no tensor has: make numbers or strings of it"
    return ""


def _places(nest: Any, place: str = "") -> Iterator[str]:
    """How to get at each array of ``nest``, such as ``[0]['age']``, in the order of `tf.nest`."""
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from _places(nest[key], f"{place}[{key!r}]")
    elif isinstance(nest, tuple | list):
        for number, part in enumerate(nest):
            yield from _places(part, f"{place}[{number}]")
    else:
        yield place


def content_hash(nest: Any, rows: Any = slice(None)) -> str:
    """A sha256 of the types and the shapes of arrays, and of ``rows`` of each; of strings, of what
    they say, not of where they are in memory."""
    content = hashlib.sha256()
    for array in tf.nest.flatten(nest):
        content.update(f"{array.dtype.str}{array.shape}".encode())
        if array.dtype == object:
            content.update(repr(array[rows].tolist()).encode())
        else:
            content.update(np.ascontiguousarray(array[rows]).reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def form(array: np.ndarray) -> str:
    """The type of ``array``, in any order of bytes, and its shape: ``float32[3, 4]``."""
    kind = "string" if array.dtype.kind in "OSU" else array.dtype.name
    return f"{kind}{list(array.shape)}"
