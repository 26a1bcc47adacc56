"""Turns TensorFlow's errors while it reads data into one line for the user."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError


@contextlib.contextmanager
def explained(dataset: Any) -> Iterator[None]:
    """Turns errors of TensorFlow that are raised inside into a `UsageError` of one line.

    These are the errors for files that are damaged or missing and for memory that is exhausted.
    """
    unreadable = tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError
    try:
        yield
    except unreadable as error:
        raise UsageError(
            f"{dataset.description}: its files are damaged: {_reason(error)}; prepare it again"
        ) from error
    except tf.errors.ResourceExhaustedError as error:
        raise UsageError(
            f"out of memory: {_reason(error)}; try a smaller --global_batch_size, more "
            "--accumulate_steps or, if it is the data that are too large, a --resident_limit_mib"
        ) from error


def _reason(error: tf.errors.OpError) -> str:
    """The first line of the message that describes neither the graph nor its source code."""
    lines = re.sub(r"\{\{.*?\}\} ?", "", error.message).splitlines()
    about_graph = re.compile(r"\s|$|Graph execution error|Detected at|\(\d+\) |\d+ root error")
    return next((line for line in lines if not about_graph.match(line)), type(error).__name__)[:200]
