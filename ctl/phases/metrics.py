"""Metrics by the names that Keras has for them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.base.autograph import with_autograph
from ctl.errors import UsageError
from ctl.phases import losses

ACCURACY = ("accuracy", "acc")  # for which Keras looks at the shapes


class Accuracy(keras.metrics.MeanMetricWrapper):
    """The accuracy that Keras takes for the shapes: binary if there is one output, sparse if the
    labels are classes, [n] or [n, 1], else categorical. With ``binary``, for several labels of 0
    and 1, it is binary for any number of outputs: Keras compares the largest one. With ``logits``,
    the threshold of a binary one is 0, not 1/2."""

    def __init__(self, name: str = "accuracy", *, logits: bool = False, binary: bool = False):
        matches = functools.partial(_matches, threshold=0.0 if logits else 0.5, binary=binary)
        super().__init__(matches, name=name)


def _matches(labels: Any, outputs: Any, threshold: float, binary: bool) -> Any:
    labels, outputs = map(keras.ops.convert_to_tensor, (labels, outputs))
    if outputs.shape[-1] == 1 or binary:
        return keras.metrics.binary_accuracy(labels, outputs, threshold)
    if len(labels.shape) < len(outputs.shape) or labels.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return keras.metrics.categorical_accuracy(labels, outputs)


class F1Score(keras.metrics.F1Score):
    """The F1 score that Keras has, a scalar, for any outputs: the mean over the classes, of which
    the largest output is one; or of one output or, with ``binary``, of several labels of 0 and 1,
    at the probability 1/2, which is 0 in ``logits``."""

    def __init__(self, name: str = "f1_score", *, logits: bool = False, binary: bool = False):
        super().__init__(average="macro", threshold=0.5, name=name)
        self._least, self._is_binary = 0.0 if logits else 0.5, binary

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:
        labels, outputs = map(keras.ops.convert_to_tensor, (labels, outputs))
        classes = outputs.shape[-1]
        if classes == 1 or self._is_binary:
            predicted = keras.ops.cast(outputs > self._least, self.dtype)
            labels = keras.ops.reshape(labels, keras.ops.shape(outputs))
        else:
            predicted = keras.ops.one_hot(keras.ops.argmax(outputs, -1), classes, dtype=self.dtype)
            if len(labels.shape) < len(outputs.shape) or labels.shape[-1] == 1:
                of_class = keras.ops.cast(keras.ops.reshape(labels, [-1]), "int32")
                labels = keras.ops.one_hot(of_class, classes, dtype=self.dtype)
        super().update_state(labels, predicted, sample_weight)


_F1 = ("f1", "f1_score", "F1Score")

# What others call metrics, and Keras's names.
_OF_OTHERS = {
    "rmse": "RootMeanSquaredError",
    "r2": "R2Score",
    "auroc": "AUC",
    "roc_auc": "AUC",
    "iou": "MeanIoU",
}


def from_names(metrics: Any, logits: bool | None, loss_fn: Any, others: Any = ()) -> Any:
    """Returns a list of metrics in which those that are names are made. Call it inside
    ``strategy.scope()``. None is an empty list, and what else is no list or tuple is returned as it
    is. For the others, see `from_name`. As in ``fit``, accuracy is called weighted_accuracy if
    ``others`` have one, too."""
    if metrics is None:
        return []
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        return metrics
    made = [from_name(one, logits, loss_fn) if isinstance(one, str) else one for one in metrics]
    taken = [getattr(one, "name", "") for one in others] if isinstance(others, Sequence) else []
    for given, metric in zip(metrics, made, strict=True):
        if isinstance(given, str) and metric.name in taken:
            metric.name = f"weighted_{metric.name}"
    return made


def from_name(name: str, logits: bool | None = None, loss_fn: Any = None) -> keras.metrics.Metric:
    """Makes a metric, which is called ``name``: one that `keras.metrics.get` knows, an `Accuracy`
    or an `F1Score`. ``logits`` says whether ``loss_fn`` is a cross entropy of logits; then the
    metrics take them, too. If its labels are one-hot, it applies a softmax, and some of the metrics
    a sigmoid.

    Raises:
        UsageError: Keras has no such metric, or it needs arguments or probabilities.
    """
    if name in ACCURACY:
        return Accuracy(name, logits=bool(logits), binary=losses.is_binary(loss_fn))
    if name in _F1:
        return F1Score(name, logits=bool(logits), binary=losses.is_binary(loss_fn))
    try:
        found = keras.metrics.get(name)
    except TypeError as error:
        raise UsageError(
            f"metric {name} needs arguments: give an object of keras.metrics "
            "(--metrics=package.module:function, which makes it)"
        ) from error
    except ValueError:  # some functions have no name there
        found = getattr(keras.metrics, name, None)
    if found is None:
        close = difflib.get_close_matches(name, [*ACCURACY, *dir(keras.metrics)], n=1)
        meant = _OF_OTHERS.get(name.lower()) or (close and close[0])
        hint = f": did you mean {meant!r}?" if meant else ""
        raise UsageError(f"Keras has no metric {name!r}{hint}")
    if not isinstance(found, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(found, name=name)
    kind = type(found)
    arguments = _of_logits(kind) if logits else {}
    of_sigmoid = (
        arguments and losses.is_one_hot(loss_fn) and not kind.__name__.endswith("Crossentropy")
    )
    if of_sigmoid or (logits and isinstance(found, keras.metrics.FBetaScore)):
        raise UsageError(
            f"metric {name} of Keras takes probabilities, and the loss has logits: give an object "
            "that applies sigmoid or softmax (--metrics=package.module:function, which makes it)"
        )
    # Keras would number the second of some classes: auc_1.
    return kind(name=name, **arguments)


def _of_logits(kind: type[keras.metrics.Metric]) -> dict[str, Any]:
    """What makes a metric for probabilities one for logits."""
    if issubclass(kind, keras.metrics.AUC) or kind.__name__.endswith("Crossentropy"):
        return {"from_logits": True}
    if issubclass(kind, _COUNTS):
        return {"thresholds": 0.0}  # of the probability 1/2
    return {"threshold": 0.0} if issubclass(kind, _THRESHOLD) else {}


def takes_logits(metric: keras.metrics.Metric) -> bool | None:
    """Whether ``metric``, of a class of Keras, takes logits (True) or probabilities (False): by its
    ``from_logits`` or, if it has a threshold by default, one of 1/2. None for all others, such as
    those whose thresholds were given, which may be meant for any outputs."""
    kind = type(metric)
    if (
        not _is_of_keras(metric) or kind is keras.metrics.MeanMetricWrapper
    ):  # whose config warns of a lambda
        return None
    config = metric.get_config()
    if "from_logits" in config:
        return True if config["from_logits"] else None if "thresholds" in config else False
    if issubclass(kind, _OF_PROBABILITIES):
        return False
    if issubclass(kind, _COUNTS):
        return False if config["thresholds"] is None and config.get("top_k") is None else None
    return False if config.get("threshold") == 0.5 else None


def check_given(metrics: Sequence[keras.metrics.Metric], loss_fn: Any, model: Any) -> None:
    """Raises `UsageError` if one of ``metrics`` takes probabilities and gets logits, or takes
    logits and gets probabilities: its number would be wrong, in silence.

    Args:
        metrics: of any classes; see `takes_logits` for which of them are checked.
        loss_fn: decides by ``from_logits`` what ``model`` gives, unless its last layer does. None
            for a loss that does not say so.
        model: any model; what it gives need not be known.
    """
    gives, takes = losses.gives_logits(model), losses.takes_logits(loss_fn)
    shape: Any = getattr(model, "output_shape", None)
    for metric in metrics:
        kind, wanted = type(metric).__name__, takes_logits(metric)
        if losses.is_sparse(loss_fn):
            _check_takes_classes(metric)
            if isinstance(metric, _OF_ONE_HOT):
                raise UsageError(
                    f"metric {metric.name} takes one-hot labels, and the loss takes classes: give "
                    f"{'Sparse' + kind} (or accuracy)"
                )
        if type(metric) is keras.metrics.Accuracy and _is_cross_entropy(loss_fn):
            raise UsageError(
                f"metric {metric.name} is the share of outputs that are equal to their labels, and "
                f"those of model {model.name} are no classes: give 'accuracy'"
            )
        of_largest = kind in ("F1Score", "FBetaScore") and metric.get_config()["threshold"] is None
        if of_largest and type(shape) is tuple and shape[1:] == (1,):
            raise UsageError(
                f"metric {metric.name} has no threshold, so it takes the largest output for true, "
                f"and model {model.name} has 1 output: give {kind}(threshold=0.5)"
            )
        if wanted and gives is False:
            raise UsageError(
                f"metric {metric.name} takes logits (from_logits=True), and model {model.name} "
                f"ends in a {losses.last_of(model)[1].__name__}: make it without from_logits"
            )
        if wanted is False and takes and gives is not False and _has_shape(metric, loss_fn):
            raise UsageError(
                f"metric {metric.name} takes probabilities, and model {model.name} gives logits, "
                f"as the loss takes them: {_for_logits(metric, loss_fn)}"
            )


# Metrics that give a number for labels that are classes, which means nothing.
_OF_ONE_HOT = (keras.metrics.CategoricalAccuracy, keras.metrics.TopKCategoricalAccuracy)


def _is_cross_entropy(loss_fn: Any) -> bool:
    return any(of(loss_fn) for of in (losses.is_sparse, losses.is_one_hot, losses.is_binary))


def _has_shape(metric: keras.metrics.Metric, loss_fn: Any) -> bool:
    """Whether ``metric`` takes labels of the kind of ``loss_fn``. Others have an error that says
    so, see `update_metric`."""
    return losses.is_sparse(loss_fn) == isinstance(
        metric, keras.metrics.SparseCategoricalCrossentropy
    )


def _for_logits(metric: keras.metrics.Metric, loss_fn: Any) -> str:
    """What to do about ``metric``, which takes probabilities."""
    kind, one_hot = type(metric), losses.is_one_hot(loss_fn)
    if kind.__name__.endswith("Crossentropy"):
        return "make it with from_logits=True"
    for argument, value in ({} if one_hot else _of_logits(kind)).items():
        return f"make it with {argument}={value!r}"
    applied = "softmax" if one_hot else "sigmoid"
    return (
        f"give a subclass of {kind.__name__} whose update_state(labels, outputs, "
        "sample_weight=None) calls super().update_state(labels, "
        f"keras.ops.{applied}(outputs), sample_weight)"
    )


def makes_variables_late(metric: keras.metrics.Metric) -> bool:
    """Whether ``metric`` makes variables in its first update: it has none before, or, as R2Score
    of Keras, only some, and says that it is not built."""
    return not metric.variables or not getattr(metric, "_built", True)


def _is_of_keras(metric: keras.metrics.Metric) -> bool:
    """Whether the class of ``metric`` is none of the user's, which may take anything."""
    return type(metric).__module__.startswith("keras.")


def _check_takes_classes(metric: keras.metrics.Metric) -> None:
    """Raises `UsageError` if ``metric`` takes one-hot labels: of classes [n], it would take some
    for those of a class, or fail."""
    kind = type(metric).__name__
    if not _is_of_keras(metric):
        return
    given = "multi_label" if getattr(metric, "multi_label", False) else ""
    given = "class_id" if getattr(metric, "class_id", None) is not None else given
    if type(metric) in (keras.metrics.IoU, keras.metrics.MeanIoU) and metric.sparse_y_pred:
        raise UsageError(
            f"metric {metric.name} takes classes for outputs, and those of the model are one for "
            "each class: make it with sparse_y_pred=False"
        )
    if given or isinstance(metric, keras.metrics.OneHotIoU | keras.metrics.OneHotMeanIoU):
        raise UsageError(
            f"metric {metric.name} {f'has {given}, so it ' * bool(given)}takes labels [n, classes],"
            f" and those of the data are classes [n]: give a subclass of {kind} whose update_state "
            "calls super().update_state with keras.ops.one_hot(labels, classes) of them"
        )


def make_variables(metric: keras.metrics.Metric, labels: Any, outputs: Any) -> None:
    """Makes the variables of ``metric`` for one example. Raises `UsageError` if it is one that
    takes other shapes."""
    if labels.shape.rank == 1 and outputs.shape.rank == 2 and outputs.shape[1] != 1:
        _check_takes_classes(metric)
    try:
        with keras.StatelessScope():  # at its end, the variables are made
            metric.update_state(*as_taken(metric, labels, outputs))
    except ValueError as error:
        raise UsageError(f"metric {metric.name}: {str(error).splitlines()[0]}") from error


def as_taken(metric: keras.metrics.Metric, labels: Any, outputs: Any) -> tuple[Any, Any]:
    """Labels and outputs, for a metric of Keras in one rank: labels that lack the last axis of the
    outputs, if that is 1, get it. Some would compare [n] with [n, 1] to [n, n]."""
    if type(metric) is keras.metrics.MeanMetricWrapper or not _is_of_keras(metric):
        return labels, outputs
    there, wanted = _ranks(labels, outputs)
    if there and wanted and wanted - there == 1 and outputs.shape[-1] == 1:
        return labels[..., tf.newaxis], outputs
    return labels, outputs


def _ranks(*tensors: Any) -> list[int | None]:
    return [getattr(getattr(each, "shape", None), "rank", None) for each in tensors]


def update_metric(metric: keras.metrics.Metric, labels: Any, outputs: Any, weights: Any) -> None:
    """Updates ``metric``. Raises `UsageError` if it is one of Keras that takes other shapes."""
    labels, outputs = as_taken(metric, labels, outputs)
    kinds = (keras.metrics.AUC, *_THRESHOLD, *_COUNTS, *_OF_PROBABILITIES)
    of_each = isinstance(metric, kinds) and _is_of_keras(metric)
    there, wanted = _ranks(labels, outputs)
    try:
        if of_each and there and wanted and there < wanted:  # which some graphs do not see
            raise ValueError("one label for each output")
        with_autograph(metric.update_state)(labels, outputs, sample_weight=weights)
    except ValueError as error:
        if not _is_of_keras(metric):
            raise
        two = of_each and list(outputs.shape[1:]) == [2] and labels.shape.rank == 1
        raise UsageError(
            f"metric {metric.name} takes no labels of shape {list(labels.shape)} with outputs of "
            f"shape {list(outputs.shape)}: {_ONE_OUTPUT if two else _OTHERS}"
        ) from error


_ONE_OUTPUT = (
    "for two classes, give --loss=binary_cross_entropy, with which models of ctl have one output "
    "(in Python, loss_fn= and a model with one output)"
)
_OTHERS = (
    "give accuracy or sparse_top_k_categorical_accuracy, which take classes, or an object that "
    "makes them alike (--metrics=package.module:function, which makes it)"
)


_THRESHOLD = (keras.metrics.BinaryAccuracy, keras.metrics.BinaryIoU)
_COUNTS = (
    *(keras.metrics.Precision, keras.metrics.Recall),
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives),
    *(keras.metrics.FalsePositives, keras.metrics.FalseNegatives),
)
_OF_PROBABILITIES = (  # with thresholds in [0, 1], or a logarithm
    *(keras.metrics.SensitivityAtSpecificity, keras.metrics.SpecificityAtSensitivity),
    *(keras.metrics.PrecisionAtRecall, keras.metrics.RecallAtPrecision),
    keras.metrics.KLDivergence,
)
