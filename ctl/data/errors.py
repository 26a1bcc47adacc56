"""Turns TensorFlow's errors while it reads data into one line for the user."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl.errors import CheckpointError, UsageError

# Begins the message of the error for a label outside of the classes, and frames a line for the
# user, in errors of operations that `ctl.data.streaming` makes.
NO_CLASS = "no class of the dataset:"
REFUSED = "ctl refuses the data: {} [ctl]"

# Ends a message about a bad record.
SKIP = 'skip it: --on_bad_record=skip for files and TFDS, else Streaming(…, on_bad_record="skip")'

_REFUSED = re.compile(re.escape(REFUSED).replace(r"\{\}", "(.*?)"))
_LABEL = re.compile(rf"\[{re.escape(NO_CLASS)}\] \[(-?\d+)\] \[(\d+)\]")
# TensorFlow raises the error of exhausted memory for a full disk, too.
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
# What a pipeline puts before the message of an operation in it.
_IN_PIPELINE = re.compile(r"Error in user-defined function passed to .*? with iterator: \S+: ")
# Operations that TFDS decodes examples with.
_UNDECODABLE = re.compile(r"\b(Decode(Image|Png|Jpeg|Bmp|Gif|Raw)|Parse(Single)?Example)")


@contextlib.contextmanager
def translate_data_errors(dataset: Any, *others: Any) -> Iterator[None]:
    """Turns errors of TensorFlow that are raised inside into a `UsageError` of one line, that of a
    full disk into a `CheckpointError`.

    It names ``dataset``, unless one of ``others`` says that it has the example.

    These are the errors for files that are damaged or missing, for labels that are no classes and
    for memory that is exhausted.
    """
    unreadable = tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError
    try:
        yield
    except unreadable as error:
        raise UsageError(
            f"{dataset.description}: its files are damaged: {_reason(error)}; prepare it again"
        ) from error
    except tf.errors.InvalidArgumentError as error:
        if refused := _REFUSED.search(error.message):
            raise UsageError(refused[1]) from error
        if label := _LABEL.search(error.message):
            value, classes = label.groups()
            raise UsageError(
                f"{dataset.description}: label {value} is out of range: the dataset has "
                f"{classes} classes, so labels must be 0 to {int(classes) - 1}; prepare it again"
            ) from error
        streams = [of for of in (dataset, *others) if hasattr(of, "culprit")]
        dataset, culprit = next(
            ((of, found) for of in streams if (found := of.culprit())), (dataset, "")
        )
        if culprit or _UNDECODABLE.search(error.message):
            raise UsageError(
                f"{dataset.description}: {culprit or 'an example'} cannot be decoded: "
                f"{_reason(error)}; prepare it again"
                + (f", or {SKIP}" if culprit and not dataset.skips else "")
            ) from error
        raise
    except tf.errors.ResourceExhaustedError as error:
        if any(full in error.message for full in _FULL):
            raise CheckpointError(f"no space left: {_reason(error)}") from error
        raise UsageError(
            f"out of memory: {_reason(error)}; try a smaller --global_batch_size, more "
            "--accumulate_steps, or, if data of TFDS are too large, --resident_limit_mib=0"
        ) from error


def _reason(error: tf.errors.OpError) -> str:
    """The first line of the message that describes neither the graph, the pipeline nor their source
    code."""
    lines = _IN_PIPELINE.sub("", re.sub(r"\{\{.*?\}\} ?", "", error.message)).splitlines()
    about_graph = re.compile(r"\s|$|Graph execution error|Detected at|\(\d+\) |\d+ root error")
    return next((line for line in lines if not about_graph.match(line)), type(error).__name__)[:200]
