"""Losses of each example: functions of labels and outputs that return float32 [n]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl.base.autograph import with_autograph
from ctl.base.names import KERAS_LOSSES, LOSSES, check_name
from ctl.errors import UsageError


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Softmax cross-entropy of each example, float32 [n].

    Args:
        labels: classes, integers [n] or [n, 1]; or their probabilities, float [n, classes].
        logits: float [n, classes].
        smoothing: weight in [0, 1] of the uniform distribution over the classes, which is mixed
            into the one-hot target (Szegedy et al. 2016, arXiv:1512.00567, section 7).
    """
    labels, logits = tf.convert_to_tensor(labels), tf.cast(logits, tf.float32)
    if are_probabilities(labels, logits):
        losses = tf.nn.softmax_cross_entropy_with_logits(tf.cast(labels, tf.float32), logits)
    else:  # as int32, a label of 2**32 + 1 would be class 1
        if labels.shape.rank == logits.shape.rank == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int64), logits)
    if smoothing:
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses


def are_probabilities(labels: Any, outputs: Any) -> bool:
    """Whether labels are probabilities of the outputs, float [n, classes], rather than classes."""
    return (
        isinstance(labels, tf.Tensor)
        and isinstance(outputs, tf.Tensor)
        and labels.dtype.is_floating
        and labels.shape.rank == outputs.shape.rank == 2
        and labels.shape[1] == outputs.shape[1]
    )


def binary_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Sigmoid cross-entropy of each example, float32 [n]: the mean over its logits.

    Args:
        labels: 0 or 1, or probabilities, of the shape of ``logits`` or [n].
        logits: [n, 1] or [n, ...].
    """
    labels, logits = _alike(labels, logits)
    return _mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))


def mean_squared_error(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Squared error of each example, float32 [n]: the mean over its outputs.

    Args:
        labels: of the shape of ``outputs``, or [n].
        outputs: [n, 1] or [n, ...].
    """
    labels, outputs = _alike(labels, outputs)
    return _mean(tf.math.squared_difference(labels, outputs))


# What flags and programs name, see `per_example`.
_OF_CTL = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mean_squared_error": mean_squared_error,
}
# Functions of Keras that take logits or probabilities.
_CROSS_ENTROPIES = (
    *(keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy),
    *(keras.losses.categorical_crossentropy, keras.losses.categorical_focal_crossentropy),
    keras.losses.sparse_categorical_crossentropy,
)

# What to give for a model with several outputs.
SEVERAL = (
    "give one function as loss_fn, which adds their losses with their weights: lambda labels, "
    "outputs: first(labels['a'], outputs['a']) + 0.5 * second(labels['b'], outputs['b']), one for "
    "each example; self.log in a loss() of your own logs each"
)

# What to say of a loss that `broadcasts`.
BROADCASTS = (
    "loss_fn combines [n] with [n, 1] to [n, n], so each example meets the labels of all others: a "
    "function gets labels and outputs in one rank, such as [n, 1], so write labels - outputs; a "
    "keras.losses.Loss with its own call() gets them as they are, so give labels of the shape of "
    "the outputs"
)

OF_AXES = (keras.losses.Dice, keras.losses.Tversky)
_SPARSE = ("sparse_categorical_crossentropy", "sparsecategoricalcrossentropy")


def per_example(loss_fn: Any, model: Any = None) -> Any:
    """Returns ``loss_fn`` as a function that gives the loss of each example.

    Args:
        loss_fn: a function, which is returned as it is; a loss of Keras, an object or its class, of
            which a copy without reduction is returned; or a name of `ctl.base.names`.
        model: its last layer decides whether a cross entropy by Keras's name takes logits.

    Raises:
        UsageError: the name is unknown, the last layer does not say whether it gives logits, or the
            object sums over the batch, divides by the weights or ignores a class.
    """
    if isinstance(loss_fn, str):
        return _named(loss_fn, model)
    if isinstance(loss_fn, type) and issubclass(loss_fn, keras.losses.Loss):
        with contextlib.suppress(TypeError):  # it needs arguments
            return per_example(loss_fn(), model)
    given = getattr(loss_fn, "keywords", getattr(loss_fn, "__dict__", {}))  # of a partial, or not
    if (ignored := given.get("ignore_class")) is not None and _name_of(loss_fn) in _SPARSE:
        raise UsageError(
            f"loss_fn has ignore_class={ignored}, and ctl would count what it ignores: leave it "
            "out, and give such examples weight 0, and a class that there is; of places, [n, t], "
            "override loss() of the step, and weigh them there"
        )
    if isinstance(loss_fn, OF_AXES) and loss_fn.axis is None:
        kind = type(loss_fn).__name__
        raise UsageError(
            f"loss_fn {kind} sums over the examples of a batch: give it the axes of one example, "
            f"such as {kind}(axis=(1, 2, 3)) for images"
        )
    if not isinstance(loss_fn, keras.losses.Loss) or loss_fn.reduction in (None, "none"):
        return loss_fn
    if loss_fn.reduction in ("sum", "mean_with_sample_weight"):
        remedy = "weighting='sum_of_weights'" if "weight" in loss_fn.reduction else "a larger rate"
        raise UsageError(
            f"loss_fn has reduction={loss_fn.reduction!r}, and ctl takes the mean over the "
            f"examples: leave reduction out (and give {remedy} if you need it)"
        )
    unreduced = object.__new__(type(loss_fn))  # `copy.copy` goes by get_config: Huber's lacks delta
    vars(unreduced).update(vars(loss_fn))
    unreduced.reduction = "none"
    return unreduced


def _named(name: str, model: Any) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    check_name("loss_fn", name, (*LOSSES, *KERAS_LOSSES), ", or a function (labels, outputs)")
    if name in _OF_CTL:
        return _OF_CTL[name]
    kind = KERAS_LOSSES[name]
    if kind == "MeanSquaredError":
        return mean_squared_error
    if not kind.endswith("rossentropy"):
        return getattr(keras.losses, kind)(reduction="none")
    logits = gives_logits(model)
    if logits is None:
        raise UsageError(
            f"loss_fn={name!r}: the last layer of model {getattr(model, 'name', '')} does not say "
            f"whether it gives logits or probabilities: give keras.losses.{kind}(from_logits=True) "
            "or False"
        )
    # The same numbers as Keras's, which XLA may compile and whose labels are checked.
    if logits and kind == "BinaryCrossentropy":
        return binary_cross_entropy
    if logits and kind == "SparseCategoricalCrossentropy" and len(_output_shape(model) or ()) == 2:
        return cross_entropy
    return getattr(keras.losses, kind)(from_logits=logits, reduction="none")


def takes_logits(loss_fn: Any) -> bool | None:
    """Whether a cross entropy of ctl or Keras takes logits; None for any other loss."""
    if isinstance(loss_fn, keras.losses.Loss):
        return getattr(loss_fn, "from_logits", None)
    function = getattr(loss_fn, "func", loss_fn)  # of a `functools.partial`
    if function in (cross_entropy, binary_cross_entropy):
        return True
    if function in _CROSS_ENTROPIES:
        return getattr(loss_fn, "keywords", {}).get("from_logits", False)
    return None


def is_one_hot(loss_fn: Any) -> bool:
    """Whether a cross entropy of ctl or Keras takes one-hot labels, [n, classes], for a softmax."""
    return _name_of(loss_fn).startswith("categorical")


def is_binary(loss_fn: Any) -> bool:
    """Whether a cross entropy of ctl or Keras takes labels of 0 and 1, one for each output."""
    return _name_of(loss_fn).startswith("binary")


def is_sparse(loss_fn: Any) -> bool:
    """Whether a cross entropy of ctl or Keras takes labels that are classes, [n]."""
    return _name_of(loss_fn) in ("cross_entropy", *_SPARSE)


def is_of_library(loss_fn: Any) -> bool:
    """Whether a loss, or what a `functools.partial` calls, is one of this module or of Keras."""
    return _module_of(loss_fn).startswith(("keras.", __name__))


def _module_of(loss_fn: Any) -> str:
    return str(getattr(getattr(loss_fn, "func", loss_fn), "__module__", ""))


def _name_of(loss_fn: Any) -> str:
    """That of a loss of ctl or Keras; the user's may mean anything by theirs."""
    if not is_of_library(loss_fn):
        return ""
    function = getattr(loss_fn, "func", loss_fn)  # of a `functools.partial`
    return getattr(function, "__name__", type(function).__name__).lower()


def gives_logits(model: Any) -> bool | None:
    """Whether the last layer of ``model`` is linear; False if it is a softmax or sigmoid. None for
    any other layer, and unless the model is sequential, or functional with one output."""
    of_one = isinstance(model, keras.Sequential) or type(_output_shape(model)) is tuple
    if not of_one or not calls_its_graph(model):
        return None
    last, applied = last_of(model)
    if applied in (keras.activations.softmax, keras.activations.sigmoid):
        return False
    linear = applied is keras.activations.linear and not isinstance(last, keras.layers.Activation)
    return True if linear else None


def _output_shape(model: Any) -> Any:
    """None where it is not known."""
    return getattr(model, "output_shape", None)


def calls_its_graph(model: Any) -> bool:
    """Whether a ``model`` is functional or sequential, and does what its layers do: a subclass may
    do more in ``call``."""
    call = getattr(type(model).call, "__qualname__", "")
    return bool(model.layers) and call in ("Functional.call", "Sequential.call")


def last_of(model: Any) -> tuple[Any, Any]:
    """The last operation of a functional or sequential model, and its activation or None."""
    last = getattr(model, "operations", model.layers)[-1]  # `layers` leaves out `keras.ops`
    if isinstance(last, keras.Sequential) or hasattr(last, "operations"):
        return last_of(last)
    name = type(last).__name__
    if name in ("Softmax", "Sigmoid") and type(last).__module__.startswith("keras."):
        return last, getattr(keras.activations, name.lower())  # also of `keras.ops`
    applied = getattr(last, "activation", None)
    if isinstance(last, keras.layers.Lambda):
        applied = last.function
    for name in ("softmax", "sigmoid"):
        if applied in (getattr(tf.nn, name), getattr(keras.ops, name)):
            return last, getattr(keras.activations, name)
    return last, applied


def of_each(loss: keras.losses.Loss, labels: Any, outputs: Any) -> tf.Tensor:
    """Returns the losses of an object of `per_example`, [n]: their mean over other axes, as Keras
    takes it. One of Keras gets both in one rank, as a function does.

    Raises:
        UsageError: a loss of Keras would broadcast the labels; or ``outputs`` have a mask, whose
            mean is one over the valid places of the whole batch.
    """
    mask = _mask_of(outputs)
    known = all(isinstance(t, tf.Tensor) and t.shape.rank is not None for t in (labels, outputs))
    if known and type(loss).__module__.startswith("keras.") and type(loss) not in _UNLIKE:
        if isinstance(loss, OF_AXES) and outputs.shape.rank - labels.shape.rank == 1:
            labels = labels[..., tf.newaxis]  # their axes are those of the outputs
        labels, outputs = in_one_rank(labels, outputs)
        if labels.shape.rank == outputs.shape.rank == 1:  # Keras takes the mean over the last axis
            labels, outputs = labels[:, tf.newaxis], outputs[:, tf.newaxis]
        classes = isinstance(loss, keras.losses.CategoricalCrossentropy)
        _check_alike(labels, outputs, " (sparse_categorical_crossentropy takes classes)" * classes)
    losses = with_autograph(loss)(labels, outputs)
    if losses.shape.rank is None or losses.shape.rank < 2:
        return losses
    if mask is not None:
        raise UsageError(_MASKED)
    return _mean(losses)


_MASKED = (
    "the outputs of the model have a mask, so the mean over the places of an example is not "
    "Keras's: override loss() of the step, and weigh the places there"
)


def _mask_of(outputs: Any) -> Any:
    """That of the places of ``outputs``; a layer that pools may leave one of its inputs."""
    mask = getattr(outputs, "_keras_mask", None)
    if mask is None or mask.shape.rank is None or outputs.shape.rank is None:
        return mask
    return mask if mask.shape.is_compatible_with(outputs.shape[: mask.shape.rank]) else None


def of_function(function: Callable[..., Any], labels: Any, outputs: Any) -> Any:
    """Returns ``function(labels, outputs)``. Both have one rank, as in ``fit``, see `in_one_rank`.

    Raises:
        UsageError: ``outputs`` have a mask, and the function, of ctl or Keras, knows nothing of it,
            or gives a loss for each place.
    """
    mask = _mask_of(outputs)
    labels, outputs = in_one_rank(labels, outputs)
    if _module_of(function).startswith("keras."):
        _check_broadcast(labels, outputs)
    losses = with_autograph(function)(labels, outputs)
    places = isinstance(losses, tf.Tensor) and losses.shape.rank not in (None, 0, 1)
    if mask is not None and (places or is_of_library(function)):
        raise UsageError(_MASKED)
    return losses


def _check_broadcast(labels: Any, outputs: Any) -> None:
    """Raises `UsageError` if one output would meet several labels."""
    shapes = [getattr(each, "shape", None) for each in (labels, outputs)]
    known = all(isinstance(shape, tf.TensorShape) and shape.rank == 2 for shape in shapes)
    if known and outputs.shape[1] == 1 and (labels.shape[1] or 1) > 1:
        _check_alike(labels, outputs)


def in_one_rank(labels: Any, outputs: Any) -> tuple[Any, Any]:
    """Returns both in one rank: if one lacks the last axis of the other, and this axis is 1, [n]
    becomes [n, 1], and others lose it."""
    if isinstance(labels, tf.Tensor) and isinstance(outputs, tf.Tensor):
        known = labels.shape.rank and outputs.shape.rank
        if known and labels.shape.rank - outputs.shape.rank == 1:
            outputs, labels = _of_one_rank(outputs, labels)
        elif known and outputs.shape.rank - labels.shape.rank == 1:
            labels, outputs = _of_one_rank(labels, outputs)
    return labels, outputs


def _of_one_rank(lower: tf.Tensor, higher: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if higher.shape[-1] != 1:
        return lower, higher
    if lower.shape.rank == 1:
        return lower[:, tf.newaxis], higher
    return lower, tf.squeeze(higher, axis=-1)


_ARITHMETIC = "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference"


def broadcasts(value: Any, *of: Any) -> bool:
    """Whether arithmetic of [n] with [n, 1], which gives [n, n], leads from the tensors ``of`` to
    ``value``, as far as a graph shows it. False in eager mode."""
    if not tf.is_symbolic_tensor(value):
        return False
    seen = {one.op for one in tf.nest.flatten(of) if tf.is_symbolic_tensor(one)}
    left = [value.op]
    while left:
        if (op := left.pop()) in seen:
            continue
        seen.add(op)
        if op.type in _ARITHMETIC and op.outputs[0].shape.rank == 2:
            low, high = sorted((one.shape for one in op.inputs), key=lambda shape: shape.rank or 0)
            size = low[0] if low.rank == 1 else 1
            if size != 1 and [*high] == [size, 1] and [*op.outputs[0].shape] == [size, size]:
                return True
        left += [one.op for one in op.inputs]
    return False


# Those whose labels need not have the shape of the outputs.
_UNLIKE = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CTC)


def _alike(labels: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns both as float32 of one shape; [n] and [n, 1] would be broadcast to [n, n]."""
    _check_alike(labels, outputs)
    if labels.shape.rank == 1 and outputs.shape.rank == 2:
        labels = labels[:, tf.newaxis]
    return tf.cast(labels, tf.float32), tf.cast(outputs, tf.float32)


def _check_alike(labels: tf.Tensor, outputs: tf.Tensor, hint: str = "") -> None:
    flat = labels.shape.rank == 1 and outputs.shape.rank == 2 and outputs.shape[1] == 1
    shape = labels.shape + [1] if flat else labels.shape
    if shape.rank != outputs.shape.rank or not shape.is_compatible_with(outputs.shape):
        raise UsageError(
            f"labels of shape {labels.shape} do not fit outputs of shape {outputs.shape}: the loss "
            f"needs one label for each output{hint}"
        )


def _mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))
