"""Runs the steps of a loop without graphs, to debug them: `print`, `breakpoint()` and NumPy work.

The step, the all-reduce and the update are the same code, and the numbers are those of the graph up
to rounding. Steps take many times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from ctl.distributed import workers
from ctl.errors import UsageError
from ctl.step import TrainStep


def check_eager(step: TrainStep) -> None:
    """Logs what is turned off.

    Raises:
        UsageError: the strategy of ``step`` cannot run without graphs.
    """
    asynchronous = isinstance(step.strategy, tf.distribute.ParameterServerStrategy)
    on_tpu = isinstance(step.strategy, tf.distribute.TPUStrategy)
    if asynchronous or on_tpu or workers.is_multi_worker(step.strategy):
        raise UsageError(
            f"eager works in one process, on CPUs and GPUs, not with {type(step.strategy).__name__}"
            ": use ctl.make_strategy(replicas=…) to debug the step"
        )
    logging.info(
        "eager: steps run one at a time, without graphs%s: slow, for debugging",
        " and without XLA" if step.jit_compile else "",
    )


def without_graphs(function: Callable) -> Callable:
    """Returns ``function``, a `tf.function`, as Python runs it. All that it calls runs so, too."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before, logger = tf.config.functions_run_eagerly(), tf.get_logger()
        tf.config.run_functions_eagerly(True)
        logger.addFilter(_is_not_of_speed)
        try:
            return function(*args)
        finally:
            logger.removeFilter(_is_not_of_speed)
            tf.config.run_functions_eagerly(before)

    return run


def _is_not_of_speed(record: Any) -> bool:
    """Leaves out a warning that TensorFlow repeats for each call of `strategy.run`."""
    return "eagerly has significant overhead" not in record.msg
