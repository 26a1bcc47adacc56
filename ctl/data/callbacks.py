"""Python functions that threads of TensorFlow call while they read data."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ctl.data.errors import REFUSED
from ctl.errors import UsageError

# At the end of the program: when the last call is so long ago, the buffers are full.
_QUIET_SECONDS, _WAIT_SECONDS = 0.3, 5.0

_lock = threading.Lock()
_running, _last = 0, 0.0
_iterators: list[weakref.ref] = []


def call(
    function: Callable, arguments: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Returns tensors of ``specs``, in a graph: the arrays that a Python function returns for the
    values of ``arguments``.

    `tf.numpy_function` keeps the message but not the type of an error: `ctl.data.errors` knows a
    `UsageError` again.
    """

    def counted(*values: Any) -> Any:
        global _running, _last
        with _lock:
            _running += 1
        try:
            return function(*values)
        except UsageError as error:
            raise ValueError(REFUSED.format(error)) from error
        finally:
            with _lock:
                _running, _last = _running - 1, time.monotonic()

    tensors = tf.numpy_function(counted, arguments, [spec.dtype for spec in specs])
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return tensors


def own_memory(nest: Any) -> Any:
    """Copies the tensors of ``nest``, in a graph, since a Python function may have given them.

    TensorFlow 2.21 does not copy an array of `tf.numpy_function` or ``from_generator`` whose memory
    is aligned. Of a slice, as of one replica's part, it forgets whose memory that is, and may write
    a result there: into the user's array.
    """

    def copied(tensor: tf.Tensor) -> tf.Tensor:
        safe = tensor.dtype in (tf.string, tf.variant, tf.resource)
        return tensor if safe else tf.raw_ops.DeepCopy(x=tensor)

    return tf.nest.map_structure(copied, nest, expand_composites=True)


def end_before_python(iterator: Any) -> Any:
    """Returns ``iterator``, and lets it end before Python does."""
    _iterators[:] = [old for old in _iterators if old()]
    _iterators.append(weakref.ref(iterator))
    return iterator


@atexit.register
def _end() -> None:
    """Ends all reading. A thread that calls Python later is killed by it, and TensorFlow, which
    frees the iterator even later, would wait for that thread for ever."""
    for reference in _iterators:
        if iterator := reference():
            vars(iterator).clear()  # frees what it owns
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:  # iterators that others have made
        if not _running and time.monotonic() - _last > _QUIET_SECONDS:
            break
        time.sleep(0.01)
