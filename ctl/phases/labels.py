"""Refuses, before training, labels, ids and outputs that a loss or an Embedding would misread."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.data.augment import Augmented
from ctl.data.global_batches import GlobalBatches, read_again
from ctl.distributed import local_batch, replicas
from ctl.errors import UsageError
from ctl.phases import losses

CHECKED = (losses.cross_entropy, losses.binary_cross_entropy)
CROSS_ENTROPY, BINARY = (loss.__name__ for loss in CHECKED)
# The activation that each of them applies itself, and Keras's loss of what it gives.
_ACTIVATIONS = {
    CROSS_ENTROPY: ("softmax", "sparse_categorical_crossentropy"),
    BINARY: ("sigmoid", "binary_crossentropy"),
}


def check_weights_of(classes: Iterable[int], model: keras.Model) -> None:
    """Raises `UsageError` if a functional or sequential ``model`` has no output for one of
    ``classes``, which have weights in a cross entropy."""
    shape: Any = getattr(model, "output_shape", None)
    most = max(classes, default=0)
    if type(shape) is tuple and len(shape) == 2 and shape[1] and most >= max(shape[1], 2):
        raise UsageError(
            f"class_weight has the class {most}, but the model has {shape[1]} outputs: number the "
            "classes from 0"
        )


def check_outputs(loss: str, model: keras.Model) -> None:
    """Raises `UsageError` if a functional or sequential ``model`` ends in the activation that
    ``loss`` (`CROSS_ENTROPY` or `BINARY`, which take logits) applies itself, or has one output for
    a softmax."""
    shape: Any = getattr(model, "output_shape", None)
    if type(shape) is not tuple or not losses.calls_its_graph(model):
        return
    if loss == CROSS_ENTROPY:
        check_has_classes(model)
    (last, applied), (activation, of_probabilities) = losses.last_of(model), _ACTIVATIONS[loss]
    if applied is getattr(keras.activations, activation):
        raise UsageError(
            f"model {model.name} ends in a {activation} (layer {last.name}), and {loss} takes "
            "logits, to which it applies that itself: leave the activation out, or give "
            f"--loss={of_probabilities} (loss_fn= in Python, to ctl.EvalStep, too)"
        )


# What may be beyond 0 and 1 in labels that are computed.
_ROUNDING = 1e-4

# The factor of a layer that takes 0 to 255 is below this.
_OF_BYTES = 0.05


def check_has_classes(model: keras.Model) -> None:
    """Raises `UsageError` if a functional or sequential ``model`` has one output, for a cross
    entropy of classes."""
    shape: Any = getattr(model, "output_shape", None)
    if type(shape) is tuple:
        _check_several(model, shape)


def _check_several(model: keras.Model, shape: Sequence[int | None]) -> None:
    if shape[-1] == 1:
        raise UsageError(
            f"model {model.name} has 1 output, whose softmax is always 1: a cross entropy of "
            "classes would train nothing; for two classes, give --loss=binary_crossentropy, or "
            "the model 2 outputs; for numbers, --loss=mean_squared_error (loss_fn= in Python)"
        )


def check_ends(loss_fn: Any, model: keras.Model, outputs: Any) -> None:
    """As `check_outputs` and `check_has_classes`, of any model, by the ``outputs`` of its call."""
    if losses.takes_logits(loss_fn) and hasattr(outputs, "_keras_logits"):  # what Keras goes by
        raise UsageError(
            f"model {model.name} ends in a softmax or sigmoid, and the loss takes logits, to which "
            "it applies that itself: leave the activation out, or give a loss of Keras that takes "
            "probabilities, such as keras.losses.SparseCategoricalCrossentropy()"
        )
    shape = getattr(outputs, "shape", None)
    if losses.is_sparse(loss_fn) and isinstance(shape, tf.TensorShape) and shape.rank:
        if shape.rank == 1:
            raise UsageError(
                f"model {model.name} gives outputs [n], and the loss takes one for each class, [n, "
                "classes]: give the last layer an output for each"
            )
        _check_several(model, shape)


def check_softmax(model: keras.Model) -> None:
    """Raises `UsageError` if a functional or sequential ``model`` ends in a softmax of one output,
    which is always 1."""
    shape: Any = getattr(model, "output_shape", None)
    if type(shape) is not tuple or len(shape) < 2 or shape[-1] != 1:
        return
    if not losses.calls_its_graph(model):
        return
    last, applied = losses.last_of(model)
    axis = (getattr(last, "arguments", None) or {}).get("axis", getattr(last, "axis", -1))
    if applied is keras.activations.softmax and axis in (-1, len(shape) - 1):
        raise UsageError(
            f"model {model.name} ends in a softmax of 1 output (layer {last.name}), which is "
            "always 1: for two classes, give it a sigmoid and binary_crossentropy"
        )


def check_several_classes(dataset: Any) -> None:
    """Raises `UsageError` if ``dataset`` names its classes, and has only one."""
    info = getattr(dataset, "info", None)
    if info and len(info.class_names) == 1:
        raise UsageError(
            f"{info.name}: all labels are {info.class_names[0]!r}: there is nothing to learn; give "
            "examples of another class, too"
        )


def check_one_output(loss_fn: Any, metrics: Sequence[keras.metrics.Metric], model: Any) -> None:
    """Raises `UsageError` if a functional ``model`` has several outputs, and a loss of ctl or Keras
    or one of ``metrics`` would get all of them."""
    outputs = getattr(model, "output", None)
    if not isinstance(outputs, dict | list | tuple) or len(outputs) == 1:
        return
    if losses.is_of_library(loss_fn):
        raise UsageError(f"model {model.name} has {len(outputs)} outputs: {losses.SEVERAL}")
    of_one = [metric for metric in metrics if not _is_of_user(metric)]
    if of_one:
        raise UsageError(
            f"metric {of_one[0].name} takes one output, and model {model.name} has "
            f"{len(outputs)}: in a class of your own, update it in update_metrics(), with "
            "labels['a'] and outputs['a'], or call self.log in loss()"
        )


def _is_of_user(metric: keras.metrics.Metric) -> bool:
    kind = type(metric)
    wraps = kind is keras.metrics.MeanMetricWrapper  # a function, which may take all outputs
    return wraps or not kind.__module__.startswith(("keras.", "ctl."))


def check_from_logits(loss_fn: Any, model: keras.Model) -> None:
    """Raises `UsageError` if a cross entropy of Keras takes probabilities and ``model`` ends in a
    linear layer, or if it takes logits and ``model`` ends in a softmax or sigmoid.

    Args:
        loss_fn: an object or a function of `keras.losses`, also in a `functools.partial`; any other
            loss is not checked.
        model: checked only if it is functional or sequential.
    """
    takes, gives = losses.takes_logits(loss_fn), losses.gives_logits(model)
    if gives and isinstance(loss_fn, losses.OF_AXES):
        raise UsageError(
            f"loss_fn {type(loss_fn).__name__} takes probabilities, and model {model.name} ends in "
            f"logits (layer {losses.last_of(model)[0].name} has no activation): give it a sigmoid "
            "or softmax"
        )
    if takes is None or gives is None or takes == gives:
        return
    last, applied = losses.last_of(model)
    if gives:
        raise UsageError(
            f"loss_fn takes probabilities (from_logits=False), and model {model.name} ends in "
            f"logits (layer {last.name} has no activation): give from_logits=True"
        )
    raise UsageError(
        f"loss_fn takes logits (from_logits=True), and model {model.name} ends in a "
        f"{applied.__name__} (layer {last.name}): leave the activation or from_logits out"
    )


def takes_classes(loss_fn: Any) -> bool:
    """Whether ``loss_fn`` is Keras's cross entropy of classes, of which each label is one."""
    return isinstance(loss_fn, keras.losses.SparseCategoricalCrossentropy)


def takes_binary(loss_fn: Any) -> bool:
    """Whether ``loss_fn`` is one of Keras's cross entropies of two classes, whose labels are from 0
    to 1."""
    return losses.is_binary(loss_fn) and loss_fn is not losses.binary_cross_entropy


def check_no_text(dataset: Any) -> None:
    """Raises `UsageError` if labels are text, for a loss of numbers."""
    spec = batch_spec(dataset)
    if local_batch.has_parts(spec) and getattr(spec[1], "dtype", None) == tf.string:
        raise UsageError(
            "the labels are text, and the loss takes numbers: give y.astype('float32') of text "
            "that spells them, or number the classes from 0"
        )


def check_features(model: keras.Model, dataset: Any) -> None:
    """Raises `UsageError` if the features of ``dataset`` have another shape than ``model`` takes,
    lack one of its inputs, or are text and it takes numbers.

    Args:
        model: checked only if it is functional or sequential.
        dataset: checked if its batches are ``(features, labels)``, with or without weights.
    """
    inputs = getattr(model, "inputs", None) if losses.calls_its_graph(model) else None
    batch = batch_spec(dataset)
    if not inputs or not local_batch.has_parts(batch):
        return
    features: Any = batch[0]
    if isinstance(features, dict):
        _check_names(features, inputs, model)
    for one, spec in _by_input(features, inputs):
        which = f"features {one.name}" if len(inputs) > 1 else "features"
        if spec.dtype == tf.string and one.dtype != "string":
            raise UsageError(
                f"the {which} are text, and the model takes {one.dtype}: give numbers, "
                "for text that spells them x.astype('float32'); for words, "
                "keras.layers.StringLookup(vocabulary=…)(x)"
            )
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None:
            _check_shape(tf.TensorShape(one.shape), spec.shape, f"model {model.name} takes {which}")


def _check_shape(wanted: tf.TensorShape, shape: tf.TensorShape, takes: str) -> None:
    last = wanted if wanted.rank > shape.rank else shape  # Keras adds or drops a dimension of 1
    if abs(wanted.rank - shape.rank) == 1 and last[-1] == 1:
        return
    if not wanted[1:].is_compatible_with(shape[1:]):
        unbatched = shape.is_fully_defined() and wanted[1:].is_compatible_with(shape)
        raise UsageError(
            f"{takes} {_shown(wanted)}, and the data have {_shown(shape)}"
            f"{': make batches of them, with .batch(…)' if unbatched else ''}"
        )


def _shown(shape: tf.TensorShape) -> str:
    return f"[{', '.join('n' if size is None else str(size) for size in shape)}]"


def check_labels(
    loss: str,
    model: keras.Model,
    dataset: Any,
    step: int | None = None,
    probabilities: bool = False,
) -> None:
    """Raises `UsageError` if the labels of ``dataset`` do not fit ``loss``.

    Args:
        loss: `CROSS_ENTROPY` or `BINARY`.
        model: gives the number of classes, if it is functional or sequential.
        dataset: all labels are checked if they are in memory. Of a `ctl.data.Streaming` and a
            ``tf.data.Dataset``, the type and shape are checked, and the values of the first batch
            unless they are classes as integers: the loss finds one that is out of range.
        step: the batch of this step is read again, and its values are checked; None for no batch.
        probabilities: whether `CROSS_ENTROPY` takes those of the classes, too, float [n, classes].
    """
    shape: Any = getattr(model, "output_shape", None)
    if isinstance(dataset, Augmented):  # which checks by itself what it mixes
        dataset = dataset.dataset
    if loss != BINARY and (type(shape) is not tuple or len(shape) != 2):
        return
    outputs = shape[-1] if type(shape) is tuple and shape else None
    batch, where = _examples(dataset, step)
    if batch is None and step is None:
        spec = batch_spec(dataset)
        if isinstance(spec, tuple | list) and len(spec) in (2, 3):
            _check_kind(loss, spec[1], outputs, probabilities)
            if _is_float(spec[1]) or loss == BINARY:
                batch, where = read_again(dataset, 1), " in the first batch"
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        return
    if not hasattr(batch[1], "shape") or not hasattr(batch[1], "dtype"):
        return
    _check_kind(loss, batch[1], outputs, probabilities)
    values = np.asarray(batch[1])
    if loss == BINARY:
        _check_binary(values, where)
        return
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 2:
        _check_sums(values, where)
    if values.ndim == 1 and values.size and outputs:
        _check_classes(values, outputs, where)


def _examples(dataset: Any, step: int | None) -> tuple[Any, str]:
    """All examples if they are in memory, else the batch of ``step``, and where it is; or None."""
    arrays = getattr(dataset, "arrays", None)
    if arrays is not None or step is None:
        return arrays, ""
    return read_again(dataset, step), f" in the batch of step {step}"


def warn_of_not_finite(dataset: Any) -> None:
    """Logs a warning if examples in memory have a NaN or Inf, which some kernels hide: TensorFlow's
    relu with a bias makes 0 of a NaN, so the loss stays finite where the weights do not."""
    arrays = [np.asarray(leaf) for leaf in tf.nest.flatten(getattr(dataset, "arrays", ()))]
    with np.errstate(all="ignore"):  # a sum is faster than a look at each number
        sums = [leaf.sum() for leaf in arrays if leaf.dtype.kind == "f"]
    if not np.all(np.isfinite(sums)) and (found := not_finite(dataset, None)):
        logging.warning("%s: %s", dataset.info.name, found)


def check_weighted_classes(dataset: Any, step: int | None = None) -> None:
    """Raises `UsageError` if labels that are floats are not all 0 and 1, which ``class_weight``
    takes for classes. See `check_labels`; without ``step``, labels are checked if they are in
    memory."""
    batch, where = _examples(dataset, step)
    labels = batch[1] if isinstance(batch, tuple | list) and len(batch) in (2, 3) else None
    if not _is_float(labels):
        return
    values = np.asarray(labels).ravel()
    if (wrong := values[~np.isin(values, (0, 1))]).size:
        raise UsageError(
            f"class_weight needs labels that are classes, integers [n], or 0 and 1, and one{where} "
            f"is {wrong[0]:g}: give weights of examples instead, as the third part of a batch"
        )


def warn_of_scale(dataset: Any) -> None:
    """Logs a warning if labels in memory, the numbers of a regression, are far from 0 or vary much:
    a rate for labels of about -1 to 1 takes very many steps to them."""
    arrays = getattr(dataset.dataset if isinstance(dataset, Augmented) else dataset, "arrays", ())
    labels = arrays[1] if isinstance(arrays, tuple) and len(arrays) > 1 else None
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf" or not labels.size:
        return
    mean, deviation = float(labels.mean(dtype=float)), float(labels.std(dtype=float))
    if deviation > 10 or abs(mean) > 3 * max(deviation, 1):
        # With it, 400 steps of ``dense`` explain 0.8 to 0.99 of labels of 20 to a million.
        rate = 0.02 * math.hypot(mean, deviation) ** 0.5
        logging.warning(
            "%s: the labels have the mean %.5g and the standard deviation %.5g, and are not "
            "standardized: train on (label - %.4g) / %.4g, or, with Adam, try --learning_rate=%.1g",
            *(dataset.info.name, mean, deviation, mean, deviation or 1.0, rate),
        )


def not_finite(dataset: Any, step: int | None) -> str | None:
    """Says which examples have a NaN or Inf, in memory or in the batch of ``step``, if any have."""
    examples, where = _examples(dataset, step)
    bad: Any = False
    for leaf in tf.nest.flatten(examples):
        values = np.asarray(leaf)
        if values.dtype.kind == "f" and values.ndim:
            bad |= ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not np.any(bad):
        return None
    return f"example {np.argmax(bad)}{where} has a NaN or Inf ({np.sum(bad)} of {len(bad)} have)"


def batch_spec(dataset: Any) -> Any:
    """A nest of `tf.TensorSpec` of a batch; None if it is not known."""
    if isinstance(dataset, Augmented):
        return batch_spec(dataset.dataset)
    if (arrays := getattr(dataset, "arrays", None)) is not None:
        return tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), arrays
        )
    if hasattr(dataset, "example_spec"):
        return tf.nest.map_structure(
            lambda spec: tf.TensorSpec(tf.TensorShape([None]) + spec.shape, spec.dtype),
            dataset.example_spec,
        )
    return dataset.batches(0).element_spec if isinstance(dataset, GlobalBatches) else None


def check_ids(model: keras.Model, dataset: Any, step: int | None = None) -> None:
    """Raises `UsageError` if a feature that is the input of an Embedding of a functional or
    sequential ``model`` has an id outside of it. See `check_labels`; without ``step``, features are
    checked if they are in memory."""
    batch, where = _examples(dataset, step)
    inputs = getattr(model, "inputs", None) if losses.calls_its_graph(model) else None
    if not isinstance(batch, tuple | list) or not inputs:
        return
    for one, ids in _by_input(batch[0], inputs):
        for layer in _layers_that_take(one, model):
            is_scaled = ids.dtype == np.uint8 and tf.as_dtype(one.dtype).is_floating
            if is_scaled or not _is_embedding(layer):  # see `check_scaled`
                continue
            feature = f"feature {one.name} of " if len(inputs) > 1 else ""
            with contextlib.suppress(AttributeError, ValueError):  # NumPy has no such array
                _check_rows(np.asarray(ids), layer, feature, where)


def _check_names(features: Mapping[str, Any], inputs: Sequence[Any], model: keras.Model) -> None:
    """Raises `UsageError` if ``features`` lack one of several ``inputs`` of ``model``, or of those
    that it has as a dict."""
    if type(model) is keras.Sequential:
        raise UsageError(
            f"model {model.name} is a keras.Sequential, which takes one array, and the features of "
            f"the data are a dict of {', '.join(features)}: give the array"
        )
    taken = getattr(model, "input", None)  # a subclass of Sequential may have none
    if isinstance(taken, dict):
        names = [*taken]
    elif len(inputs) > 1:
        names = [one.name for one in inputs]
    else:
        return
    missing = [name for name in names if name not in features]
    if missing and all(re.fullmatch(r"keras_tensor(_\d+)?", name) for name in names):  # Keras's
        raise UsageError(
            f"the inputs of model {model.name} have no names, and the features of the data are "
            f"{', '.join(features)}: name them, as in keras.Input(…, name={[*features][0]!r}), or "
            "give a tuple of features, in the order of the inputs"
        )
    if missing:
        raise UsageError(
            f"model {model.name} has the input {missing[0]}, and the features of the data are "
            f"{', '.join(features)}: call them as the inputs, {', '.join(names)}"
        )


def _by_input(features: Any, inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of the ``inputs`` of a model with its feature, unless that is None; empty if there are
    others of these."""
    if isinstance(features, dict) and features.keys() == {one.name for one in inputs}:
        features = [features[one.name] for one in inputs]  # as Keras does for a list of inputs
    features = keras.tree.flatten(features)
    if len(features) != len(inputs):
        return []
    return [pair for pair in zip(inputs, features, strict=True) if hasattr(pair[1], "dtype")]


def _layers_that_take(one: Any, model: keras.Model) -> Iterator[keras.Layer]:
    """The layers of ``model`` whose input is ``one``, an input of the model."""
    for layer in model.layers:
        taken = None
        with contextlib.suppress(AttributeError, ValueError):  # called never, or several times
            taken = layer.input
        if taken is one and not isinstance(layer, keras.layers.InputLayer):
            yield layer


def check_scaled(model: keras.Model, dataset: Any, warns: bool) -> None:
    """Refuses uint8 features that `ctl.phases.base_step.scale_images` would scale, if the layer
    that takes them wants them as they are. If it ``warns``: of those that are no images. For
    functional and sequential models.

    Raises:
        UsageError: the layer is an Embedding; or it scales 0 to 255, too.
    """
    spec = batch_spec(dataset)
    inputs = getattr(model, "inputs", None) if losses.calls_its_graph(model) else None
    if not local_batch.has_parts(spec):
        return
    _warn_of_images(spec, warns)
    if warns and not inputs:
        _warn_of_unknown(spec[0], model)
    for one, feature in _by_input(spec[0], inputs or ()):
        if feature.dtype != tf.uint8 or not tf.as_dtype(one.dtype).is_floating:
            continue
        for node in _first(one, model):
            _check_first(node, model, warns)
        if warns and feature.shape.rank == 2:
            logging.warning(
                "features of model %s are uint8, of shape %s: ctl divides them by 255, as images; "
                "to train on them as they are, give them as float32",
                *(model.name, feature.shape),
            )


def _warn_of_images(spec: Any, warns: bool) -> None:
    """If it ``warns``: of labels that are the images of the features, which alone are scaled."""
    features, labels = spec[:2]
    both = all(isinstance(one, tf.TensorSpec) for one in (features, labels))
    if not (warns and both and features.dtype == labels.dtype == tf.uint8):
        return
    if features.shape.rank > 2 and features.shape.is_compatible_with(labels.shape):
        logging.warning(
            "the labels are uint8 images, as the features, which ctl divides by 255: divide the "
            "labels by 255, too"
        )


def _warn_of_unknown(features: Any, model: keras.Model) -> None:
    """Warns of uint8 features of a ``model`` that does not show its graph, if a layer of it may
    want them as they are."""
    kinds = keras.layers.Embedding, keras.layers.Rescaling
    taking = [layer.name for layer in replicas.layers_of(model) if isinstance(layer, kinds)]
    found = [t for t in tf.nest.flatten(features) if t.dtype == tf.uint8]
    if found and taking:
        logging.warning(
            "features of model %s are uint8, and ctl divides them by 255, as images: if layer %s "
            "takes them as they are, give ids as int32, and images as float32",
            *(model.name, taking[0]),
        )


# Layers and operations of Keras that leave the range of images as it is, but for their edges.
_SAME_RANGE = re.compile(
    "Random|ZeroPadding|Cropping|CenterCrop|Resizing|Reshape|Flatten|Permute|Identity|Cast|Pad$|"
    "GetItem|Stack|AutoContrast|Solarization|RandAugment"
)


def _first(tensor: Any, model: Any) -> Iterator[Any]:
    """The nodes of Keras's graph, also in models within ``model``, up to those in which ``tensor``
    gets another range, as far as the graph shows them; None if it is an output of ``model``
    before."""
    if any(tensor is one for one in model.outputs):
        yield None
    for operation in getattr(model, "operations", model.layers):
        for node in operation._inbound_nodes:
            at = [n for n, one in enumerate(node.input_tensors) if one is tensor]
            if not at:
                continue
            inner: Iterable[Any] = [node]
            if isinstance(operation, keras.Sequential) or hasattr(operation, "operations"):
                taken = operation.inputs[at[0] : at[0] + 1]
                inner = [one for within in taken for one in _first(within, operation)]
            elif _SAME_RANGE.match(type(operation).__name__):
                inner = [node, None]
            for one in inner:
                yield from [one] if one else _first(node.output_tensors[0], model)


def _warn_of_range(layer: Any) -> None:
    """Warns of a layer that changes images of 0 to 255, as which it would take those of 0 to 1."""
    most = getattr(layer, "value_range", None)
    if isinstance(most, tuple | list) and max(most) > 1:
        logging.warning(
            "layer %s takes images of 0 to %g (its value_range), and ctl gives uint8 images as 0 "
            "to 1: make it with value_range=(0, 1)",
            *(layer.name, max(most)),
        )


def _check_first(node: Any, model: keras.Model, warns: bool) -> None:
    """Refuses a first layer or operation, that of ``node``, that takes uint8 features as they
    are."""
    if node is None:
        return
    layer = node.operation
    if warns:
        _warn_of_range(layer)
    if isinstance(layer, keras.layers.Embedding):
        raise UsageError(
            f"layer {layer.name} of model {model.name} takes ids, and ctl divides uint8 features "
            "by 255, as images, where the input is of floats: give keras.Input(..., "
            "dtype='int32'), or ids of int32"
        )
    if _takes_bytes(layer, node.arguments.args):
        raise UsageError(
            f"layer {layer.name} of model {model.name} scales features of 0 to 255, and so does "
            "ctl with uint8 features: leave the layer out, give float32 features, or let "
            "preprocess() of a step of your own (--step) return them as they are"
        )


def _takes_bytes(layer: Any, arguments: Sequence[Any]) -> bool:
    """Whether a layer, or an operation with ``arguments``, makes small numbers of 0 to 255."""
    by, name = arguments[1] if len(arguments) > 1 else None, type(layer).__name__
    by = float(np.max(np.abs(by))) if isinstance(by, int | float | np.ndarray | tf.Tensor) else None
    if by and name in ("Multiply", "TrueDivide", "Divide"):
        return (by if name == "Multiply" else 1 / by) < _OF_BYTES
    if by and name in ("Add", "Subtract"):
        return by > 1
    known = {keras.layers.Rescaling: "scale", keras.layers.Normalization: "mean"}
    value = next((getattr(layer, known[kind]) for kind in known if isinstance(layer, kind)), None)
    if value is None:
        return False
    largest = float(np.max(np.abs(keras.ops.convert_to_numpy(value))))
    return largest < _OF_BYTES if isinstance(layer, keras.layers.Rescaling) else largest > 1.0


def _check_rows(ids: np.ndarray, layer: keras.layers.Embedding, feature: str, where: str) -> None:
    if ids.dtype.kind not in "iu" or not ids.size:
        return
    wrong = ids.max() if ids.max() >= layer.input_dim else ids.min()
    if not 0 <= wrong < layer.input_dim:
        raise UsageError(
            f"id {wrong} in {feature}example {_first_with(wrong, ids)}{where} is outside of layer "
            f"{layer.name}, which has {layer.input_dim} rows: ids must be 0 to "
            f"{layer.input_dim - 1}"
        )


def _first_with(value: int, leaf: np.ndarray) -> int:
    return int(np.argmax((leaf == value).reshape(len(leaf), -1).any(axis=1)))


def place_of(dataset: Any, first: int, last: int, value: int) -> str:
    """Says which example has the id ``value``, of those in memory or in the batches of the steps
    ``first`` to ``last``, and in which feature; nothing if that is not certain."""
    for step in range(first, last + 1):
        batch, where = _examples(dataset, step)
        features = batch[0] if isinstance(batch, tuple | list) and batch else batch
        found = []
        for path, leaf in keras.tree.flatten_with_path(features):
            ids = np.asarray(leaf.to_tensor(value - 1) if hasattr(leaf, "to_tensor") else leaf)
            is_image = ids.dtype == np.uint8 and ids.ndim > 2
            if ids.dtype.kind in "iu" and ids.ndim and not is_image and (ids == value).any():
                feature = f"feature {'/'.join(map(str, path))} of " if path else ""
                found.append(f" in {feature}example {_first_with(value, ids)}{where}")
        if found:
            return found[0] if len(found) == 1 else ""
        if not where:  # all were in memory
            break
    return ""


@contextlib.contextmanager
def nan_for_wrong_ids(layer: keras.Layer, under_xla: bool | None) -> Iterator[None]:
    """If ``under_xla``, each Embedding in ``layer`` gives NaN inside for ids that it does not have:
    XLA checks no index, and would take the nearest row."""
    wrapped = embeddings(layer) if under_xla else []
    own = [vars(one).get("call") for one in wrapped]
    for one in wrapped:
        vars(one)["call"] = functools.partial(_looked_up, one.call, one.input_dim)
    try:
        yield
    finally:
        for one, call in zip(wrapped, own, strict=True):
            vars(one).pop("call")
            if call is not None:
                vars(one)["call"] = call


def embeddings(layer: keras.Layer) -> list[keras.layers.Embedding]:
    """The Embedding layers in ``layer`` that look up the ids that they get: a subclass may make
    others of them."""
    return [one for one in replicas.layers_of(layer) if _is_embedding(one)]


def _is_embedding(layer: Any) -> bool:
    if not isinstance(layer, keras.layers.Embedding):
        return False
    same = type(layer).call is keras.layers.Embedding.call
    return same or type(layer).__module__.startswith("keras")


def _looked_up(call: Callable, rows: int, ids: Any, *args: Any, **options: Any) -> Any:
    outputs, ids = call(ids, *args, **options), tf.convert_to_tensor(ids)
    places = ids if ids.dtype.is_floating else tf.cast(ids, tf.int64)  # XLA casts a NaN to 0
    inside = tf.expand_dims((places > -1) & (places < rows), -1)
    return tf.where(inside, outputs, tf.cast(math.nan, outputs.dtype))


def _check_kind(loss: str, labels: Any, classes: int | None, probabilities: bool) -> None:
    """Checks shape and type of ``labels``, an array or the spec of a batch."""
    if not isinstance(getattr(labels, "shape", None), tuple | tf.TensorShape):
        return
    dtype, shape = tf.as_dtype(labels.dtype), tf.TensorShape(labels.shape)
    if dtype == tf.string:
        raise UsageError(f"labels are strings, and {loss} takes numbers: number the classes from 0")
    if loss != CROSS_ENTROPY or shape.rank != 2 or shape[1] == 1 or classes is None:
        return
    if shape[1] == classes and classes > 1:
        if probabilities and dtype.is_floating:
            return
        if isinstance(labels, np.ndarray) and (labels.sum(axis=1) > 1.5).any():
            raise UsageError(
                f"labels of shape [n, {classes}] have several classes in one example, and "
                "cross_entropy takes one: give --loss=binary_crossentropy (loss_fn= in Python)"
            )
        raise UsageError(
            f"labels of shape [n, {classes}] are one-hot, and cross_entropy takes classes, "
            "integers [n]: give tf.argmax(labels, axis=-1), or the loss that trains on them"
        )
    raise UsageError(
        f"labels have shape [n, {shape[1]}], and cross_entropy takes one class for each example, "
        f"integers [n] from 0 to {classes - 1}: override loss() of the step for several"
    )


def _check_sums(labels: np.ndarray, where: str) -> None:
    """Raises `UsageError` unless each row of ``labels`` has the probabilities of classes."""
    _check_numbers(labels, where)
    if (labels >= 0).all() and np.allclose(labels.sum(axis=1), 1, atol=1e-2):
        return
    several = np.isin(labels, (0, 1)).all()
    raise UsageError(
        f"labels{where} of shape [n, {labels.shape[1]}] are no probabilities of classes, which "
        f"cross_entropy takes: for {'several classes' if several else 'numbers'}, give --loss="
        f"{'binary_crossentropy' if several else 'mean_squared_error'} (loss_fn= in Python)"
    )


def _check_numbers(labels: np.ndarray, where: str) -> None:
    missing = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(0, bool)
    if missing.any():
        raise UsageError(
            f"the label of example {_first_with(True, missing)}{where} is NaN ({missing.sum()} of "
            f"{labels.size} are): mend the data, or leave them out"
        )


def _check_classes(labels: np.ndarray, classes: int, where: str) -> None:
    _check_numbers(labels, where)
    low, high = labels.min(), labels.max()
    if labels.dtype.kind == "f" and not np.array_equal(labels, np.floor(labels)):
        raise UsageError(
            f"labels{where} are numbers from {low:g} to {high:g}, and cross_entropy takes classes, "
            f"0 to {classes - 1}: for numbers use --loss=mean_squared_error "
            "(ctl.losses.mean_squared_error)"
        )
    if labels.dtype.kind not in "iuf":
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise UsageError(
            f"label {labels[wrong[0]]} of example {wrong[0]}{where} is out of range: the model "
            f"has {classes} outputs, so labels must be 0 to {classes - 1} ({wrong.size} of "
            f"{labels.size} are not; they are {low} to {high})"
        )


def _check_binary(labels: np.ndarray, where: str) -> None:
    if labels.dtype.kind not in "iuf" or not labels.size:
        return
    _check_numbers(labels, where)
    low, high = labels.min(), labels.max()
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        distinct = np.unique(labels)
        several = labels.ndim > 1 and labels.shape[-1] > 1
        if several and len(distinct) > 2 and np.isin(distinct, (-1, 0, 1)).all():
            remedy = "override loss() of the step, and weigh the labels that are known"
        elif np.array_equal(distinct, (-1, 0, 1)):
            remedy = "make 0 and 1 of them, also in examples of weight 0"
        elif labels.dtype == np.uint8 and labels.ndim > 2 and len(distinct) > 2:
            remedy = "divide them by 255, as ctl does with uint8 features"
        elif several and len(distinct) > 2:
            remedy = "for numbers, give --loss=mean_squared_error (loss_fn= in Python)"
        elif len(distinct) <= 2:
            remedy = f"make 0 and 1 of them: labels == {high:g}"
        elif np.array_equal(distinct, np.floor(distinct)):
            remedy = (
                "number the classes from 0, and give --loss=cross_entropy and an output for each"
            )
        else:
            remedy = "for numbers, give --loss=mean_squared_error (loss_fn= in Python)"
        raise UsageError(
            f"labels{where} are {low:g} to {high:g}, and binary_cross_entropy takes 0 and 1, or "
            f"probabilities: {remedy}"
        )


def _is_float(labels: Any) -> bool:
    return hasattr(labels, "dtype") and tf.as_dtype(labels.dtype).is_floating
