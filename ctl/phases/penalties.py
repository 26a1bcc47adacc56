"""What layers add to the loss: regularization of weights, ``add_loss``, activity regularizers.

A penalty on weights is the same for every share of a batch. Each share may take any part of it, if
the parts sum to 1. A loss that a layer adds is a mean over the examples of one call of the model;
Keras divides activity regularizers in this way. Each share takes a part in proportion to its number
of *examples*, whatever their weights. Losses are divided by the sum of what `TrainStep.count`
returns, so each share needs its mean over the examples of the global batch before its backward
pass.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch, replicas
from ctl.errors import UsageError
from ctl.reduce import COUNT, all_reduce

_OTHERS = "keras", "tensorflow", "builtins"
# What an example counts in the mean, float32 scalar; None if every example counts 1.
_PER_EXAMPLE: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("_PER_EXAMPLE")


@contextlib.contextmanager
def counted(step: Any, batch: Any, count: Any) -> Iterator[None]:
    """Lets `total` be called inside, in replica context, for micro-batches of ``batch``.

    It costs a collective of two numbers if examples may have weights and layers may add losses that
    depend on examples. The collective comes before `forward_backward`, where a step may make
    several passes that differ by a Python value. TensorFlow traces another replica at a collective,
    which could change this value between two passes.

    Args:
        step: a built `ctl.TrainStep`.
        batch: this replica's part of the global batch.
        count: as returned by `TrainStep.count`.
    """
    owners = [step, *replicas.layers_of(step.tracked.layer)]
    if _counts_rows(step, batch) or not any(map(_may_add, owners)):
        yield
        return
    rows = local_batch.rows(batch)
    totals = [tf.cast(number, tf.float32) for number in (count, rows)]
    if not isinstance(count, int) or not isinstance(rows, int):
        totals = all_reduce(totals, options=step.options, scope=COUNT)
    token = _PER_EXAMPLE.set(totals[0] / local_batch.or_one(totals[1]))
    try:
        yield
    finally:
        _PER_EXAMPLE.reset(token)


def size(batch: Any, count: tf.Tensor) -> tf.Tensor:
    """Returns a number about as large as the sum of the losses of ``batch``, whose examples count
    ``count``."""
    if (per_example := _PER_EXAMPLE.get(None)) is None:
        return count
    rows = tf.cast(local_batch.rows(batch), tf.float32)
    return tf.maximum(tf.cast(count, tf.float32), rows * per_example)


def total(step: Any, batch: Any) -> tf.Tensor | None:
    """Returns the penalties of the last call of the model, times the weight of ``batch``: float32
    scalar; None without penalties.

    Raises:
        UsageError: examples have weights, and a layer added a loss without naming ``add_loss`` in
            its code.
    """
    of_model = {id(v.value) for v in step.model.trainable_variables}
    beyond = any(id(v) not in of_model for v in step.trainable_variables)
    layer = step.tracked.layer if beyond else step.model
    if not (penalties := layer.losses):
        return None
    _check_own(penalties)
    penalties = [tf.cast(penalty, tf.float32) for penalty in penalties]
    # Keras lists penalties on weights last.
    of_weights = sum(v.regularizer is not None for v in layer.trainable_variables)
    of_examples = penalties[: len(penalties) - of_weights]
    count = tf.cast(step.count(batch), tf.float32)
    if not of_examples or _counts_rows(step, batch):
        return tf.add_n(penalties) * count
    if (per_example := _PER_EXAMPLE.get(None)) is None:
        raise UsageError(
            "a layer adds a loss (add_loss), and the examples have weights: ctl can combine them "
            "if the code of the layer calls self.add_loss() itself; or add it in loss() of "
            f"{type(step).__name__}"
        )
    added = tf.add_n(of_examples) * per_example * tf.cast(local_batch.rows(batch), tf.float32)
    return added + tf.add_n(penalties[len(of_examples) :]) * count if of_weights else added


def _check_own(penalties: Sequence[tf.Tensor]) -> None:
    """Refuses losses that layers added on another replica.

    Keras keeps added losses in a list of the layer, which all replicas share. If replicas exchange
    tensors in the forward pass, TensorFlow traces one replica up to there, then the next. Each then
    finds losses of other replicas in the list.

    Raises:
        UsageError: another replica has read a loss before.
    """
    me = threading.get_ident()  # TensorFlow traces each replica in a separate thread
    for penalty in penalties:
        if not tf.is_symbolic_tensor(penalty):
            continue
        if getattr(penalty, "_ctl_thread", me) != me:
            raise UsageError(
                "layers of the model add losses (add_loss, activity_regularizer), and replicas "
                "exchange tensors in the forward pass, so Keras gives each the losses of others: "
                "add them in loss() of the step, or use one replica"
            )
        penalty._ctl_thread = me


def _counts_rows(step: Any, batch: Any) -> bool:
    """Whether each example counts 1."""
    return not step.overrides("count") and local_batch.weights_of(batch) is None


def _may_add(owner: Any) -> bool:
    """Whether a layer, or a step, may add a loss that depends on the examples."""
    if getattr(owner, "activity_regularizer", None) is not None:
        return True
    kinds = [k for k in type(owner).__mro__ if k.__module__.partition(".")[0] not in _OTHERS]
    values = [value for kind in kinds for value in vars(kind).values()] + [*vars(owner).values()]
    functions = [inspect.unwrap(value) for value in values if callable(value)]
    return any(names(getattr(function, "__code__", None), "add_loss") for function in functions)


def names(code: Any, name: str) -> bool:
    """Whether the code of a function, or of a function inside it, has the ``name``."""
    return any(name in one.co_names for one in codes(code))


def codes(code: Any) -> Iterator[types.CodeType]:
    """The ``code`` of a function and of functions inside it; nothing if it is no code."""
    if isinstance(code, types.CodeType):
        yield code
        for inner in code.co_consts:
            yield from codes(inner)
