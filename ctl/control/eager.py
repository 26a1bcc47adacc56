"""Runs the steps of a loop without graphs, to debug them: `print`, `breakpoint()` and NumPy work.

The step, the all-reduce and the update are the same code, and the numbers are those of the graph up
to rounding. Steps take many times as long. What makes a NaN or Inf is seen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.tf_internals import seeing_operations
from ctl.base.tracebacks import is_of_the_user
from ctl.distributed import workers
from ctl.errors import UsageError
from ctl.step import TrainStep

_MOST_SHOWN = 3  # operations
# They hand on what others have made.
_READS = ("ReadVariableOp", "ResourceGather", "IteratorGetNext")


def can_be_eager(strategy: tf.distribute.Strategy) -> bool:
    """Whether ``strategy`` can run steps without graphs."""
    others = tf.distribute.ParameterServerStrategy | tf.distribute.TPUStrategy
    return not (isinstance(strategy, others) or workers.is_multi_worker(strategy))


def check_eager(step: TrainStep) -> None:
    """Logs what is turned off.

    Raises:
        UsageError: the strategy of ``step`` cannot run without graphs.
    """
    if not can_be_eager(step.strategy):
        raise UsageError(
            f"eager works in one process, on CPUs and GPUs, not with {type(step.strategy).__name__}"
            ": use ctl.make_strategy(replicas=…) to debug the step"
        )
    logging.info(
        "eager: steps run one at a time, without graphs%s: slow, for debugging",
        " and without XLA" if step.jit_compile else "",
    )


class Origins:
    """The operations that made NaN or Inf of finite numbers, in the last call that had some."""

    def __init__(self) -> None:
        self._calls = 0
        self._found: dict[str, int] = {}  # what is said of an operation, and the last call of it

    def begin(self) -> None:
        """Begins a call."""
        self._calls += 1

    def see(self, kind: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Looks at an operation that has run."""
        made = _not_finite(outputs)
        if made and kind not in _READS and not _not_finite(inputs):
            self._found[f"{kind} made {made} {_place(sys._getframe(1))}"] = self._calls

    def __str__(self) -> str:
        last = max(self._found.values(), default=0)
        found = [said for said, call in self._found.items() if call == last]
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        return "; ".join(found[:_MOST_SHOWN]) + more


def _not_finite(tensors: Sequence[Any]) -> str:
    """What ``tensors`` have of NaN and Inf, for messages; "" for neither."""
    for tensor in tensors:
        if hasattr(tensor, "numpy") and (tensor.dtype.is_floating or tensor.dtype.is_complex):
            values = tensor.numpy()
            if not np.isfinite(values).all():
                return "NaN" if np.isnan(values).any() else "Inf"
    return ""


def _place(frame: Any) -> str:
    """Says in which layer and in which line of the user's an operation has run."""
    layer, line, phase = "", "", ""
    while frame and (name := frame.f_code.co_filename) != __file__:
        owner = frame.f_locals.get("self")
        if not layer and isinstance(owner, keras.Layer) and not isinstance(owner, keras.Model):
            layer = f"in the layer {owner.name}"
        if is_of_the_user(name):
            name = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
            line = f"in {name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
            break
        if name.endswith("eager/backprop.py"):
            phase = "in the backward pass"
        elif name.endswith("ctl/phases/apply.py"):
            phase = "in the update"
        frame = frame.f_back
    return ", ".join(part for part in (phase, layer, line) if part) or "in the step"


def without_graphs(function: Callable, origins: Origins | None = None) -> Callable:
    """Returns ``function``, a `tf.function`, as Python runs it. All that it calls runs so, too.
    ``origins`` sees its operations."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before, logger = tf.config.functions_run_eagerly(), tf.get_logger()
        tf.config.run_functions_eagerly(True)
        logger.addFilter(_is_not_of_speed)
        try:
            if origins is None:
                return function(*args)
            origins.begin()
            with seeing_operations(origins.see):
                return function(*args)
        finally:
            logger.removeFilter(_is_not_of_speed)
            tf.config.run_functions_eagerly(before)

    return run


def _is_not_of_speed(record: Any) -> bool:
    """Leaves out a warning that TensorFlow repeats for each call of `strategy.run`."""
    return "eagerly has significant overhead" not in record.msg
