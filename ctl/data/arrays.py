"""The door for arrays of the user's: what a tensor can hold, in this machine's order of bytes."""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Iterator, Sequence
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
    if array.dtype.kind == "T":  # NumPy's StringDType
        wanted: Any = object
    elif strings and array.dtype.kind in "SU":
        wanted = strings
    else:
        wanted = array.dtype.newbyteorder("=")
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
    try:
        array = np.asarray(leaf)
    except ValueError:
        return "rows of different lengths"
    if array.dtype.kind == "T":
        array = array.astype(object)  # what is missing is no string
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


def arrays_of(value: Any, place: str = "") -> Any:
    """Arrays of the leaves of tuples and dicts. Lists are leaves, unlike in `tf.nest`.

    Raises:
        ValueError: a leaf is no array of numbers or strings. The message names its ``place``.
    """
    if isinstance(value, dict):
        return {key: arrays_of(part, f"{place}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(arrays_of(part, f"{place}[{number}]") for number, part in enumerate(value))
    problem = ""
    try:
        array = as_array(value)
        if array.dtype == object:
            problem = _problem(array)
        elif array.dtype.kind in "SU" and not isinstance(value, np.ndarray):
            parts = np.asarray(value, object).flat
            if not all(isinstance(part, str | bytes) for part in parts):
                problem = "numbers beside strings"  # of which NumPy makes strings
    except ValueError:
        problem = "lists of different lengths"
    if problem:
        raise ValueError(f"{place or 'it'} has {problem}")
    return array


def as_array(leaf: Any) -> np.ndarray:
    """The array of a number, a string of any length, an array or a list of these.

    Raises:
        ValueError: the parts of a list differ in length.
    """
    if isinstance(leaf, str | bytes):
        array = np.empty((), object)
        array[()] = leaf.encode() if isinstance(leaf, str) else leaf
        return array
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    return array.astype(object) if array.dtype.kind == "T" else array


def common(examples: Sequence[Any]) -> Any:
    """A nest of arrays of the form that most of ``examples`` have, in types that hold the numbers
    of these examples. Integers and floats are one form."""
    outlines = [
        tuple((place, _kind(array), array.shape) for place, array in _leaves(example))
        for example in examples
    ]
    ((most, _),) = collections.Counter(outlines).most_common(1)
    chosen = [one for one, outline in zip(examples, outlines, strict=True) if outline == most]
    columns = zip(*(tf.nest.flatten(one) for one in chosen), strict=True)
    wide = [c[0].astype(np.result_type(*(array.dtype for array in c))) for c in columns]
    return tf.nest.pack_sequence_as(chosen[0], wide)


def fitted(example: Any, like: Any, *, cast: bool = False) -> Any:
    """``example``, a nest of arrays, if it has the form of ``like``.

    Args:
        example: to look at.
        like: another example.
        cast: gives numbers the types of ``like`` where this changes no value.

    Raises:
        ValueError: it has another form. The message names the place.
    """
    own, wanted = dict(_leaves(example)), dict(_leaves(like))
    for less, more, what in ((own, wanted, "is missing"), (wanted, own, "is in no other example")):
        if lacking := sorted(more.keys() - less.keys()):
            raise ValueError(f"{lacking[0] or 'a value'} {what}")
    arrays = []
    for place, array in own.items():
        if (found := form(array)) != (needed := form(wanted[place])):
            exact = _exact(array, wanted[place]) if cast else None
            if exact is None:
                value = f" ({array.item()!r:.40})" if array.size == 1 else ""
                raise ValueError(f"{place or 'it'} is {found}{value}, but {needed} in others")
            array = exact
        arrays.append(array)
    return tf.nest.pack_sequence_as(example, arrays)


def _exact(array: np.ndarray, like: np.ndarray) -> np.ndarray | None:
    """Numbers in the type of ``like``; None if a value or the shape would be another."""
    if array.shape != like.shape or _kind(array) != "number" or _kind(like) != "number":
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        result = array.astype(like.dtype)
        return result if np.array_equal(result.astype(array.dtype), array) else None


def _leaves(nest: Any) -> Iterator[tuple[str, np.ndarray]]:
    return zip(_places(nest), tf.nest.flatten(nest), strict=True)


def _kind(array: np.ndarray) -> str:
    kind = array.dtype.kind
    return "number" if kind in "iuf" else "string" if kind in "OSU" else array.dtype.name


def form(array: np.ndarray) -> str:
    """The type of ``array``, in any order of bytes, and its shape: ``float32[3, 4]``."""
    kind = "string" if array.dtype.kind in "OSU" else array.dtype.name
    return f"{kind}{list(array.shape)}"
