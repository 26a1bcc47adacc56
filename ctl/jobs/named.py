"""Makes what flags name: the class of the step, the loss, the metrics, and data of the user's own.

Each is ctl's or Keras's by a plain name, or the user's by ``package.module:attribute``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl import step as steps
from ctl.base.names import check_loss_name, is_function_name
from ctl.base.remote import StorePath
from ctl.data import Dataset, GlobalBatches, Tokenizer, as_dataset
from ctl.errors import UsageError
from ctl.flags.imports import find
from ctl.phases import losses
from ctl.phases.base_step import BaseStep
from ctl.phases.metrics import from_name


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
        parameters = [] if isinstance(make, keras.Model) else [*inspect.signature(make).parameters]
        if parameters and parameters != ["vocabulary_size"]:
            takes = "(image_shape, num_classes), vocabulary_size, or nothing"
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


def loss_function(name: str, model: keras.Model | None = None) -> Callable[..., Any]:
    """The loss ``name``, see `ctl.phases.losses.per_example`, or ``package.module:function``.

    Raises:
        UsageError: the name is unknown or cannot be imported.
    """
    check_loss_name(name)
    loss = find("loss", name) if is_function_name(name) else name
    return losses.per_example(loss, model)


def make_metrics(
    names: str | None, loss: Callable[..., Any], kind: type[BaseStep]
) -> list[keras.metrics.Metric]:
    """Makes new metrics. Call it inside ``strategy.scope()``, because it creates variables.

    Args:
        names: ``NAME,NAME``, see `ctl.phases.metrics.from_name`; or ``package.module:function``,
            which returns a metric or a list of them; None for ``accuracy`` if ``loss`` is a cross
            entropy that ``kind`` does not override, else none.
        loss: of `loss_function`; decides whether metrics take logits.
        kind: the class of the step that updates the metrics.

    Raises:
        UsageError: Keras knows no such metric, or a function returns something else.
    """
    logits = losses.takes_logits(loss)
    if names is None:
        names = "accuracy" if logits is not None and kind.loss is BaseStep.loss else ""
    if not is_function_name(names):
        given = [name.strip() for name in names.split(",")]
        return [from_name(name, logits, loss) for name in given if name]
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
        make_metrics(names, losses.cross_entropy, BaseStep)


def datasets(
    name: str,
    *,
    global_batch_size: int,
    seed: int,
    data_dir: str | StorePath | None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Dataset, Dataset]:
    """Calls the function ``name`` with those of the keywords that it declares.

    Returns:
        Its two datasets, to train and to evaluate, see `ctl.data.as_dataset`.

    Raises:
        UsageError: it cannot be imported or called, does not declare a ``data_dir`` or a
            ``tokenizer`` that is given, returns something else, or trains on batches of another
            size.
    """
    function = find("dataset", name)
    offered: dict[str, Any] = {"global_batch_size": global_batch_size, "seed": seed}
    offered |= {"data_dir": data_dir, "tokenizer": tokenizer}
    signature = inspect.signature(function)
    arguments = {n: v for n, v in offered.items() if n in signature.parameters}
    for flag in ("data_dir", "tokenizer"):
        if offered[flag] and flag not in arguments:
            raise UsageError(
                f"--{flag} has no effect with --dataset={name}: give the function a parameter "
                f"{flag}, or leave the flag out"
            )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"cannot call the dataset {name!r}: {error}; it may take {', '.join(offered)}"
        ) from error
    made = function(**arguments)
    pair = isinstance(made, tuple | list) and len(made) == 2
    is_one = pair and isinstance(made[0], np.ndarray | tf.Tensor)  # arrays (x, y)
    if not pair or is_one:
        raise UsageError(
            f"the dataset {name!r} must return two datasets, (training, evaluation), such as "
            "((x, y), (x_test, y_test)); it returned "
            + ("two arrays" if is_one else type(made).__name__)
        )
    batches, arrays = isinstance(made[0], tf.data.Dataset), isinstance(made[0], tuple | dict)
    train = as_dataset(made[0], global_batch_size=global_batch_size if arrays else None)
    size = train.global_batch_size
    if size not in (None, global_batch_size):
        raise UsageError(
            f"the dataset {name!r} makes batches of {size} examples: give "
            f"--global_batch_size={size}, or make them of global_batch_size"
        )
    if batches and isinstance(train, GlobalBatches):
        size = train.pipeline.batch or global_batch_size
        if size != global_batch_size:
            logging.warning(
                "the dataset %r makes batches of %d examples, not of --global_batch_size=%d",
                *(name, size, global_batch_size),
            )
        train = as_dataset(made[0], global_batch_size=size)
    return train, as_dataset(made[1], training=False)
