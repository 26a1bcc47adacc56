"""Metrics by the names that Keras has for them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Any

import keras

from ctl.base.autograph import with_autograph
from ctl.errors import UsageError

ACCURACY = ("accuracy", "acc")  # for which Keras looks at the shapes


class Accuracy(keras.metrics.MeanMetricWrapper):
    """The accuracy that Keras takes for the shapes: binary if there is one output, sparse if the
    labels are classes, [n] or [n, 1], else categorical. With ``logits``, the threshold of a binary
    one is 0, not 1/2."""

    def __init__(self, name: str = "accuracy", *, logits: bool = False):
        threshold = 0.0 if logits else 0.5
        super().__init__(functools.partial(_matches, threshold=threshold), name=name)


def _matches(labels: Any, outputs: Any, threshold: float) -> Any:
    labels, outputs = map(keras.ops.convert_to_tensor, (labels, outputs))
    if outputs.shape[-1] == 1:
        return keras.metrics.binary_accuracy(labels, outputs, threshold)
    if len(labels.shape) < len(outputs.shape) or labels.shape[-1] == 1:
        return keras.metrics.sparse_categorical_accuracy(labels, outputs)
    return keras.metrics.categorical_accuracy(labels, outputs)


def from_names(metrics: Any, logits: bool | None) -> Any:
    """Returns a list of metrics in which those that are names are made. Call it inside
    ``strategy.scope()``. What is no list or tuple is returned as it is. For ``logits``, see
    `from_name`."""
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        return metrics
    return [from_name(one, logits) if isinstance(one, str) else one for one in metrics]


def from_name(name: str, logits: bool | None = None) -> keras.metrics.Metric:
    """Makes a metric, which is called ``name``: one that `keras.metrics.get` knows, or of
    `ACCURACY`. ``logits`` says whether the loss is a cross entropy of logits; then the metrics take
    them, too.

    Raises:
        UsageError: Keras has no such metric, or it needs arguments or probabilities.
    """
    if name in ACCURACY:
        return Accuracy(name, logits=bool(logits))
    try:
        found = keras.metrics.get(name)
    except TypeError as error:
        raise UsageError(
            f"metric {name} needs arguments: give an object of keras.metrics "
            "(--metrics=package.module:function, which makes it)"
        ) from error
    except ValueError:
        found = None
    if found is None:
        close = difflib.get_close_matches(name, [*ACCURACY, *dir(keras.metrics)], n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"Keras has no metric {name!r}{hint}")
    if not isinstance(found, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(found, name=name)
    kind = type(found)
    if logits and isinstance(found, keras.metrics.FBetaScore):
        raise UsageError(
            f"metric {name} of Keras takes probabilities, and the loss has logits: give an object "
            "that applies sigmoid or softmax (--metrics=package.module:function, which makes it)"
        )
    # Keras would number the second of some classes: auc_1.
    return kind(name=name, **(_of_logits(kind) if logits else {}))


def _of_logits(kind: type[keras.metrics.Metric]) -> dict[str, Any]:
    """What makes a metric for probabilities one for logits."""
    if issubclass(kind, keras.metrics.AUC) or kind.__name__.endswith("Crossentropy"):
        return {"from_logits": True}
    if issubclass(kind, _COUNTS):
        return {"thresholds": 0.0}  # of the probability 1/2
    return {"threshold": 0.0} if issubclass(kind, _THRESHOLD) else {}


def makes_variables_late(metric: keras.metrics.Metric) -> bool:
    """Whether ``metric`` makes variables in its first update: it has none before, or, as R2Score
    of Keras, only some, and says that it is not built."""
    return not metric.variables or not getattr(metric, "_built", True)


def update_metric(metric: keras.metrics.Metric, labels: Any, outputs: Any, weights: Any) -> None:
    """Updates ``metric``. Raises `UsageError` if it is one of Keras that takes other shapes."""
    try:
        with_autograph(metric.update_state)(labels, outputs, sample_weight=weights)
    except ValueError as error:
        if not type(metric).__module__.startswith("keras."):
            raise
        two = list(outputs.shape[1:]) == [2] and labels.shape.rank == 1
        raise UsageError(
            f"metric {metric.name} takes no labels of shape {list(labels.shape)} with outputs of "
            f"shape {list(outputs.shape)}: choose another, or give an object that makes them alike"
            f"{_ONE_OUTPUT if two else ''}"
        ) from error


_ONE_OUTPUT = "; for two classes, train one output with --loss=binary_cross_entropy (loss_fn=)"


_THRESHOLD = (keras.metrics.BinaryAccuracy, keras.metrics.BinaryIoU)
_COUNTS = (
    *(keras.metrics.Precision, keras.metrics.Recall),
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives),
    *(keras.metrics.FalsePositives, keras.metrics.FalseNegatives),
)
