"""Writes variables to, and reads them from, a flat ``tf.train.Checkpoint`` (a tensor bundle).

A state is ``{"model": [...], "optimizer": [...], "counters": [...], ...}``, lists of variables.
Variable ``i`` of ``key`` is stored as ``key/i/.ATTRIBUTES/VARIABLE_VALUE``, the name that
``tf.train.Checkpoint(key=[...])`` gives it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base import durable, tf_internals
from ctl.errors import DivergedError, UsageError

State = Mapping[str, Sequence[tf.Variable]]

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

_PART = 1 << 18  # elements

# What `tf.train.Checkpoint` reads first. Without it, variables can be read by name only.
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def unwrap(state: State) -> dict[str, list[tf.Variable]]:
    """Returns ``state`` with each Keras variable replaced by its ``tf.Variable``.

    Raises:
        UsageError: a key cannot be an attribute of a ``tf.train.Checkpoint``.
    """
    for key in state:
        # `write` makes each key an attribute of a tf.train.Checkpoint.
        taken = key in ("root", "save_counter") or hasattr(tf.train.Checkpoint, key)
        if taken or not key.isidentifier():
            raise UsageError(f"{key!r} is not a valid key for the state of a checkpoint: rename it")
    return {
        key: [v.value if isinstance(v, keras.Variable) else v for v in group]
        for key, group in state.items()
    }


def specs(
    variables: Mapping[str, list[tf.Variable]],
    tensors: Mapping[str, list[tf.Tensor]] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Returns ``{key: [{"name", "shape", "dtype"}, ...]}``, as in a manifest. Shapes are those of
    ``tensors``, a `snapshot`, or of the variables, which may have None for a size that varies."""
    return {
        key: [
            {"name": _name(v), "shape": value.shape.as_list(), "dtype": v.dtype.name}
            for v, value in zip(group, (tensors or variables)[key], strict=True)
        ]
        for key, group in variables.items()
    }


def snapshot(variables: Mapping[str, list[tf.Variable]]) -> dict[str, list[tf.Tensor]]:
    """Returns the values without a copy.

    TensorFlow does not update a buffer in place while something else refers to it. The call takes
    about 10 µs a variable.
    """
    # read_value() takes twice as long, and eight times under a strategy.
    return {key: [v.value() for v in group] for key, group in variables.items()}


def same(one: Mapping[str, list[tf.Tensor]], other: Mapping[str, list[tf.Tensor]]) -> bool:
    """Whether two snapshots of the same variables have equal values. NaN equals NaN."""
    pairs = ((a, b) for key in one for a, b in zip(one[key], other[key], strict=True))
    return all(
        _share_memory(a, b) or tf.reduce_all((a == b) | ((a != a) & (b != b))) for a, b in pairs
    )


def _share_memory(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether both are one buffer of a CPU. Nothing was assigned to their variable in between."""
    if not one.shape.rank or "CPU" not in one.device.upper():  # a bfloat16 scalar is no array
        return False
    return np.asarray(one).ctypes.data == np.asarray(other).ctypes.data


def not_finite(tensors: Mapping[str, list[tf.Tensor]]) -> dict[tuple[str, int], tf.Tensor]:
    """Returns the tensors of a `snapshot` that have a NaN or Inf, by key and place in the list.

    The call takes 4 ms per 100 MB on one CPU core.
    """
    finite = {
        (key, i): _is_finite(tensor)
        for key, group in tensors.items()
        for i, tensor in enumerate(group)
        if tensor.dtype in _FLOATS
    }
    return {place: tensors[place[0]][place[1]] for place, good in finite.items() if not good}


def require_finite(
    tensors: Mapping[str, list[tf.Tensor]],
    constants: Mapping[tuple[str, int], tf.Tensor],
    variables: Mapping[str, list[tf.Variable]],
) -> None:
    """Checks a `snapshot` of ``variables``. ``constants`` is what was `not_finite` before.

    Raises:
        DivergedError: a value is NaN or Inf, and the tensor is not equal to that in ``constants``.
    """
    for (key, i), tensor in not_finite(tensors).items():
        constant = constants.get((key, i))
        if constant is None or not tf.reduce_all(tf.equal(tensor, constant)):
            raise DivergedError(
                f"The state has a NaN or Inf, first in {key}[{i}] {_name(variables[key][i])}, and "
                "was not saved; lower the learning rate or clip the gradients"
            )


def size(tensors: Mapping[str, list[tf.Tensor]]) -> int:
    """Returns the size of all tensors in bytes."""
    return sum(t.shape.num_elements() * t.dtype.size for group in tensors.values() for t in group)


def write(prefix: str, tensors: dict[str, list[tf.Tensor]]) -> None:
    """Writes a snapshot to files that begin with ``prefix``.

    Empties the lists of ``tensors``, so that buffers are freed as early as possible.
    """
    names = [_key(key, i) for key, group in tensors.items() for i in range(len(group))]
    values = [tensor for group in tensors.values() for tensor in group]
    if missing := tf_internals.no_object_graph():
        logging.log_first_n(logging.WARNING, "%s", 1, missing)
    else:
        lengths = {key: len(group) for key, group in tensors.items()}
        names.append(GRAPH)
        values.append(tf.constant(tf_internals.object_graph(lengths, _key)))
    for group in tensors.values():
        group.clear()
    # `tf.train.Checkpoint.write` would make variables, and takes 10 times as long for 300 of 3 KB.
    with tf.device("/cpu:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
        )


def read(prefix: str, variables: Mapping[str, list[tf.Variable]]) -> dict[str, list[tf.Tensor]]:
    """Reads one tensor for each of ``variables``, of its shape and dtype, into the host's memory.
    Of one with an attribute ``slice``, such as "300 4 0,150:-", it reads that part.

    Raises:
        durable.Damaged: one is missing, unreadable, or of another shape or dtype.
    """
    with _readable(prefix) as path:
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        values: dict[str, list[tf.Tensor]] = {key: [] for key in variables}
        for key, group in variables.items():
            if not group:  # TensorFlow refuses to read nothing
                continue
            names = [_key(key, i) for i in range(len(group))]
            for name, v in zip(names, group, strict=True):
                fits = v.shape.is_compatible_with(shapes.get(name, ()))
                if dtypes.get(name) != v.dtype or not fits:
                    raise durable.Damaged(f"{name} is not what the manifest says")
            # A worker reads those rows of a table that it holds.
            parts = [getattr(v, "slice", "") for v in group]
            with tf.device("/cpu:0"):  # a variable on the CPU takes over the buffer
                values[key] += tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=names,
                    shape_and_slices=parts,
                    dtypes=[v.dtype for v in group],
                )
        return values


def holds(
    prefix: str, specs: Mapping[str, Sequence[Any]], tensors: Mapping[str, list[tf.Tensor]]
) -> bool:
    """Whether the files, whose groups are ``specs``, hold the bits of ``tensors``, a `snapshot`.
    Raises `durable.Damaged` as `read`, also if shapes or dtypes differ."""
    if {key: len(group) for key, group in specs.items()} != {k: len(g) for k, g in tensors.items()}:
        return False
    values = read(prefix, tensors)
    pairs = ((a, b) for key in tensors for a, b in zip(tensors[key], values[key], strict=True))
    return all(_bits(one) == _bits(other) for one, other in pairs)


def _bits(tensor: tf.Tensor) -> Any:
    value = np.asarray(tensor)
    return value.tolist() if value.dtype == object else value.tobytes()  # of strings: pointers


def read_one(prefix: str, key: str, index: int) -> np.ndarray:
    """Reads the array of variable ``index`` of ``key``. Raises `durable.Damaged`: it cannot."""
    with _readable(prefix) as path:
        return np.asarray(tf.train.load_checkpoint(path).get_tensor(_key(key, index)))


@contextlib.contextmanager
def _readable(prefix: str) -> Iterator[str]:
    """``prefix`` by a path without the characters that TensorFlow takes for a pattern. What
    TensorFlow raises inside is `durable.Damaged`."""
    with contextlib.ExitStack() as stack:
        if set(prefix) & set("*?[]\\"):
            directory, name = os.path.split(prefix)
            number = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, number)
            prefix = f"/proc/self/fd/{number}/{name}"
        try:
            yield prefix
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise durable.Damaged(f"TensorFlow cannot read it: {reason}") from error


def _key(key: str, index: int) -> str:
    return f"{key}/{index}/.ATTRIBUTES/VARIABLE_VALUE"


def _name(variable: tf.Variable) -> str:
    return variable.name.removesuffix(":0")


def _is_finite(tensor: tf.Tensor) -> tf.Tensor | bool:
    """Whether all elements are finite; a tensor, maybe not ready yet, on an accelerator."""
    if "CPU" not in tensor.device or tensor.dtype not in (tf.float32, tf.float64):
        return tf.reduce_all(tf.math.is_finite(tensor))
    # NumPy reads the buffer in place, in parts that fit into a cache. A tf.function would be traced
    # for each list of shapes, which delays the first save of 300 variables by a second.
    values = np.asarray(memoryview(tensor)).reshape(-1)
    return all(np.isfinite(values[i : i + _PART]).all() for i in range(0, values.size, _PART))
