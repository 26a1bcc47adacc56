"""Logs norms of the gradient, the weights and the update, see `logged`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from ctl.apply import global_norm

if TYPE_CHECKING:
    from ctl.step import TrainStep


@contextlib.contextmanager
def logged(step: TrainStep, gradients: list[tf.Tensor | None]) -> Iterator[None]:
    """With ``step.log_norms``, logs three scalars about the update that is made inside; else adds
    nothing to the graph. A skipped update logs none. Each is the mean over the steps of a record:

    * ``gradient_norm``: the global norm of the reduced ``gradients``, before clipping
    * ``weight_norm``: that of the trained weights, before the update
    * ``update_ratio``: that of the change of the weights, divided by ``weight_norm``. About 1e-3 is
      usual; much more is unstable, much less learns slowly.
    """
    if not step.log_norms:
        yield
        return
    before = [tf.identity(variable.read_value()) for variable in step.trained]
    yield
    pairs = zip(step.trained, before, strict=True)
    moved = global_norm([variable.read_value() - value for variable, value in pairs])
    weights = global_norm(before)
    norms = {"gradient_norm": global_norm(gradients), "weight_norm": weights}
    norms["update_ratio"] = tf.math.divide_no_nan(moved, weights)
    for name, value in norms.items():
        step.logged.add(name, value, "mean", ())
