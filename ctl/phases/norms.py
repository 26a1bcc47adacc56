"""Norms of lists of tensors, and norms of an update for the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from ctl.distributed import local_batch
from ctl.reduce import values_of


def global_norm(gradients: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Returns the norm of all ``gradients`` together: float32 scalar; float64 if one of them is. Of
    rows, each is there once.

    `tf.linalg.global_norm` refuses mixed types. It also squares float16 as float16, which is Inf
    from 256 on and 0 below 2e-4.
    """
    tensors = [values_of(g) for g in gradients if g is not None]
    dtype = tf.float64 if any(g.dtype == tf.float64 for g in tensors) else tf.float32
    wide = [tf.cast(g, dtype) for g in tensors]
    # The square of 2e19 is Inf in float32. Division by a power of two is exact.
    largest = tf.reduce_max([0.0, *(tf.cast(tf.reduce_max(tf.abs(g)), tf.float32) for g in wide)])
    unit = tf.cast(local_batch.power_of_two(largest), dtype)
    return unit * tf.linalg.global_norm([g / unit for g in wide])


@contextlib.contextmanager
def logged(
    variables: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor | None],
    log: Callable[[str, tf.Tensor], None],
) -> Iterator[None]:
    """Logs three scalars about the update of ``variables`` that is made inside, each the mean over
    the steps of a record. A skipped update logs none.

    * ``gradient_norm``: the global norm of the reduced ``gradients``, before clipping
    * ``weight_norm``: the global norm of the variables, before the update
    * ``update_ratio``: the global norm of their change, divided by ``weight_norm``. About 1e-3 is
      usual; much more is unstable, much less learns slowly.
    """
    before = [tf.identity(variable.read_value()) for variable in variables]
    yield
    pairs = zip(variables, before, strict=True)
    moved = global_norm([variable.read_value() - value for variable, value in pairs])
    weights = global_norm(before)
    log("gradient_norm", global_norm(gradients))
    log("weight_norm", weights)
    log("update_ratio", tf.math.divide_no_nan(moved, weights))
