"""Makes what flags name: the class of the step, the loss, the metrics, and data of the user's own.

Each is ctl's or Keras's by a plain name, or the user's by ``package.module:attribute``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl import step as steps
from ctl.base.names import LOSSES, check_code_name, is_function_name
from ctl.data import Dataset, as_dataset
from ctl.errors import UsageError
from ctl.flags.imports import find
from ctl.phases import losses
from ctl.phases.base_step import BaseStep

LossFunction = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def step_class(name: str | None) -> type[steps.TrainStep]:
    """The class ``name``; `ctl.TrainStep` for None.

    Raises:
        UsageError: it cannot be imported or is not a subclass of `ctl.TrainStep`.
    """
    if name is None:
        return steps.TrainStep
    found = find("step", name)
    if not (isinstance(found, type) and issubclass(found, steps.TrainStep)):
        raise UsageError(f"--step={name} is not a subclass of ctl.TrainStep")
    return found


def check_calls(kind: type[steps.TrainStep], model: str, loss: str, metrics: str | None) -> None:
    """Raises `UsageError` if code of the user's cannot be called as ctl calls it: the class of the
    step, or the function of the model, the loss or the metrics."""
    options = dict.fromkeys(
        name
        for name, parameter in inspect.signature(steps.TrainStep.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    )
    with_model = "(model, optimizer, loss_fn, **options), and passes the options on"
    _check_call(f"the step {kind.__name__}", kind, (None, None, None), with_model, **options)
    evaluates, takes = kind.eval_step, "(model, loss_fn, metrics)"
    _check_call(f"the step {evaluates.__name__}", evaluates, (None,) * 3, takes)
    if is_function_name(model):
        make = find("model", model)
        if not isinstance(make, keras.Model) and inspect.signature(make).parameters:
            takes = "(image_shape, num_classes), or nothing"
            _check_call(f"the model {model!r}", make, (None, None), takes)
    if is_function_name(loss):
        _check_call(f"the loss {loss!r}", find("loss", loss), (None, None), "(labels, outputs)")
    if metrics and is_function_name(metrics):
        _check_call(f"the metrics {metrics!r}", find("metrics", metrics), (), "no arguments")


def _check_call(
    what: str, function: Callable[..., object], arguments: tuple, takes: str, **options: object
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise UsageError(f"cannot call {what}: {error}; it must take {takes}") from error


def loss_function(name: str) -> LossFunction:
    """The loss ``name``, one of `ctl.base.names.LOSSES` or ``package.module:function``.

    Raises:
        UsageError: the name is unknown or cannot be imported.
    """
    check_code_name("loss", name, LOSSES)
    return find("loss", name) if is_function_name(name) else _LOSSES[name]


def make_metrics(names: str | None, loss: str, kind: type[BaseStep]) -> list[keras.metrics.Metric]:
    """Makes new metrics. Call it inside ``strategy.scope()``, because it creates variables.

    Args:
        names: ``NAME,NAME`` as `keras.metrics.get` knows them, each metric with its name as given;
            or ``package.module:function``, which returns a metric or a list of them; None for
            ``accuracy`` if ``loss`` is a cross entropy that ``kind`` does not override, else none.
        loss: see `loss_function`; decides which accuracy ``accuracy`` is.
        kind: the class of the step that updates the metrics.

    Raises:
        UsageError: Keras knows no such metric, or a function returns something else.
    """
    if names is None:
        names = "accuracy" if loss in _ACCURACIES and kind.loss is BaseStep.loss else ""
    if not is_function_name(names):
        return [_metric(name.strip(), loss) for name in names.split(",") if name.strip()]
    made = find("metrics", names)()
    made = list(made) if isinstance(made, list | tuple) else [made]
    for metric in made:
        if not isinstance(metric, keras.metrics.Metric):
            raise UsageError(
                f"the metrics {names!r} must be a function that returns Keras metrics, it returned "
                f"{type(metric).__name__}"
            )
    return made


def check_metrics(names: str | None) -> None:
    """Raises `UsageError` if Keras has no metric of one of ``names``. Calls no function."""
    if names and not is_function_name(names):
        make_metrics(names, "cross_entropy", BaseStep)


def _metric(name: str, loss: str) -> keras.metrics.Metric:
    if name == "accuracy":
        return _ACCURACIES.get(loss, _ACCURACIES["cross_entropy"])()
    try:
        found = type(keras.metrics.get(name))
    except TypeError as error:
        raise UsageError(
            f"--metrics: {name} needs arguments: give package.module:function, which makes it"
        ) from error
    except ValueError:
        found = None
    if found is None or not issubclass(found, keras.metrics.Metric):
        raise UsageError(f"--metrics: Keras has no metric {name!r}")
    if loss == "binary_cross_entropy" and issubclass(found, keras.metrics.FBetaScore):
        raise UsageError(
            f"--metrics: {name} of Keras takes probabilities, and {loss} has logits: give "
            "package.module:function, which makes a metric that applies the sigmoid"
        )
    # Keras would number the second of some classes: auc_1.
    return found(name=name, **(_of_logits(found) if loss in _ACCURACIES else {}))


def _of_logits(kind: type[keras.metrics.Metric]) -> dict[str, Any]:
    """What makes a metric for probabilities one for the logits that the losses take."""
    if issubclass(kind, keras.metrics.AUC) or kind.__name__.endswith("Crossentropy"):
        return {"from_logits": True}
    if issubclass(kind, _COUNTS):
        return {"thresholds": 0.0}  # of the probability 1/2
    return {"threshold": 0.0} if issubclass(kind, _THRESHOLD) else {}


_THRESHOLD = (keras.metrics.BinaryAccuracy, keras.metrics.BinaryIoU)
_COUNTS = (
    *(keras.metrics.Precision, keras.metrics.Recall),
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives),
    *(keras.metrics.FalsePositives, keras.metrics.FalseNegatives),
)


def datasets(
    name: str, *, global_batch_size: int, seed: int, data_dir: str | None
) -> tuple[Dataset, Dataset]:
    """Calls the function ``name`` with those of the keywords that it declares.

    Returns:
        Its two datasets, to train and to evaluate: of `ctl.data`, or a ``tf.data.Dataset`` of
        global batches as a `ctl.data.GlobalBatches`.

    Raises:
        UsageError: it cannot be imported or called, does not declare a ``data_dir`` that is given,
            returns something else, or trains on batches of another size.
    """
    function = find("dataset", name)
    offered = {"global_batch_size": global_batch_size, "seed": seed, "data_dir": data_dir}
    signature = inspect.signature(function)
    arguments = {n: v for n, v in offered.items() if n in signature.parameters}
    if data_dir and "data_dir" not in arguments:
        raise UsageError(
            f"--data_dir has no effect with --dataset={name}: give the function a parameter "
            "data_dir, or leave the flag out"
        )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"cannot call the dataset {name!r}: {error}; it may take {', '.join(offered)}"
        ) from error
    made = function(**arguments)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(
            f"the dataset {name!r} must return two datasets, (training, evaluation), it returned "
            f"{type(made).__name__}"
        )
    size = as_dataset(made[0]).global_batch_size
    if size not in (None, global_batch_size):
        raise UsageError(
            f"the dataset {name!r} makes batches of {size} examples: give "
            f"--global_batch_size={size}, or make them of global_batch_size"
        )
    train = as_dataset(made[0], global_batch_size=global_batch_size)
    return train, as_dataset(made[1], training=False)


_LOSSES: dict[str, LossFunction] = {
    "cross_entropy": losses.cross_entropy,
    "binary_cross_entropy": losses.binary_cross_entropy,
    "mean_squared_error": losses.mean_squared_error,
}

# Of logits. Keras's own `accuracy` counts outputs that equal the label.
_ACCURACIES: dict[str, Callable[[], keras.metrics.Metric]] = {
    "cross_entropy": lambda: keras.metrics.SparseCategoricalAccuracy("accuracy"),
    "binary_cross_entropy": lambda: keras.metrics.BinaryAccuracy("accuracy", threshold=0.0),
}
