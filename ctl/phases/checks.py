"""Checks of a user's step: one line of error instead of wrong numbers."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.distributed import replicas
from ctl.distributed.replica_variables import ReplicaVariables
from ctl.errors import UsageError
from ctl.phases.logged import Logged
from ctl.phases.seeds import Seeds
from ctl.phases.tracked_state import TrackedState, has_state

_CONTRACTS = {
    "reduce": "(loss, count, gradients, snapshot) and return (loss, count, gradients)",
    "backward": "(tape, loss, variables=None) and return gradients times the loss scale, as "
    "TrainStep.backward does",
}


def check_arguments(evaluator: Any, checkpoints: Any, **actions: Any) -> None:
    """Refuses a wrong kind of argument of `ctl.Loop`."""
    if evaluator is not None and not hasattr(evaluator, "run"):
        raise UsageError(
            f"evaluator is a {type(evaluator).__name__}: give "
            "ctl.Evaluator(ctl.EvalStep(model, metrics=…), dataset)"
        )
    if isinstance(checkpoints, str | os.PathLike):
        where = os.fspath(checkpoints)
        raise UsageError(f"checkpoints is {where!r}: give ctl.CheckpointManager({where!r})")
    for name, value in actions.items():
        if not isinstance(value, Sequence) or not all(map(callable, value)):
            raise UsageError(f"{name} must be a list of functions, not {value!r}")


def check_loss_and_metrics(loss_fn: Any, **metrics: Any) -> None:
    """Refuses a ``loss_fn`` that is neither a function nor None, arguments of metrics that are not
    lists of Keras metrics, such as names, and two metrics of one name."""
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f"loss_fn is {loss_fn!r}: give a function of labels and outputs that returns one loss "
            "for each example, such as ctl.losses.mean_squared_error"
        )
    names: set[str] = set()
    for argument, given in metrics.items():
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        for metric in given if listed else [given]:
            if not (listed and isinstance(metric, keras.metrics.Metric)):
                raise UsageError(
                    f"{argument} must be a list of keras.metrics.Metric objects, such as "
                    f"[keras.metrics.SparseCategoricalAccuracy('accuracy')]; got {metric!r}"
                )
            if metric.name in names:
                raise UsageError(
                    f"two metrics are called {metric.name}, and a record would have one of them: "
                    "give another name=, such as weighted_accuracy"
                )
            names.add(metric.name)


def check_results(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Refuses metrics whose results are not scalars, once their variables are known."""
    for metric in metrics:
        try:
            with tf.init_scope():
                zeros = [tf.zeros(v.shape, v.dtype) for v in metric.variables]
                results = tf.nest.flatten(metric.stateless_result(zeros))
        except Exception:  # the user's, on values that never occur
            continue
        for shape in (tuple(getattr(result, "shape", ())) for result in results):
            if math.prod(shape) != 1:
                raise UsageError(
                    f"metric {metric.name} has a result of shape {shape}, and a record holds one "
                    "number for each: average it, or return a dict of scalars"
                )


# Attributes that `TrainStep.build` sets.
_OF_BUILD = (
    *("noinline", "single_replica", "statistics", "synchronizes", "trace_guards"),
    *("trainable_mask", "trainable_variables", "updater"),
)
# Objects that a step of ctl keeps in its attributes.
_KINDS: dict[str, Any] = {
    "logged": Logged,
    "options": (type(tf.distribute.experimental.CommunicationOptions()), type(None)),
    "per_replica_variables": ReplicaVariables,
    "seeds": Seeds,
    "tracked": TrackedState,
}


def check_attributes(step: Any) -> None:
    """Refuses attributes that hide those of ctl, such as ``self.seed = 3``. What is called may take
    the place of a method, if it is no layer or metric."""
    for name, value in vars(step).items():
        method = inspect.isfunction(_of_ctl(type(step), name))
        if (
            name in _OF_BUILD
            or (name == "training" and value is not type(step).training)
            or (method and (not callable(value) or has_state(value)))
            or not isinstance(value, _KINDS.get(name, object))
        ):
            kind = type(step).__name__
            raise UsageError(f"{kind} sets self.{name}, which ctl uses for itself: rename it")


def _of_ctl(kind: type, name: str) -> Any:
    """The attribute ``name`` of the class of ctl that ``kind`` inherits it from, or None."""
    classes = (base for base in kind.__mro__ if base.__module__.startswith("ctl."))
    return next((vars(base)[name] for base in classes if name in vars(base)), None)


def check_overrides(step: Any) -> None:
    """Refuses a step that was built before, and overrides with other arguments."""
    if step.strategy is not None:
        raise UsageError("this step is built already: make a new one for another loop")
    check_attributes(step)
    kind = type(step).__name__
    for method, at, name in (("reduce", 3, "snapshot"), ("backward", 2, "variables")):
        parameters = [*inspect.signature(getattr(step, method)).parameters]
        if parameters[at : at + 1] != [name]:
            raise UsageError(
                f"{kind}.{method}() must take {_CONTRACTS[method]}; it takes "
                f"({', '.join(parameters)})"
            )


def checked_gradients(
    step: Any, gradients: Sequence[tf.Tensor | None], variables: Sequence[tf.Variable]
) -> list[tf.Tensor | None]:
    """Returns ``gradients``, with None for variables that `Loop.train_only` leaves out.

    Raises:
        UsageError: there is not one gradient or None per variable, a gradient has another shape
            than its variable, or no variable that trains has a gradient.
    """
    kind = type(step).__name__
    if len(gradients) != len(variables):
        raise UsageError(
            f"{kind} computed {len(gradients)} gradients for {len(variables)} trainable "
            "variables: return one for each, None where there is none"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and not variable.shape.is_compatible_with(gradient.shape):
            raise UsageError(
                f"{kind} computed a gradient of shape {gradient.shape} for variable "
                f"{variable.name} of shape {variable.shape}: return them in the order of "
                "model.trainable_variables"
            )
    chosen = [
        g if trains else None for g, trains in zip(gradients, step.trainable_mask, strict=True)
    ]
    if chosen and all(gradient is None for gradient in chosen):
        raise UsageError(
            f"the loss of {kind} depends on no variable that trains, so nothing would be learned: "
            "is it computed from the outputs of self.model, without argmax, int or stop_gradient?"
        )
    return chosen


def check_clipped(step: Any, gradients: Any) -> None:
    """Refuses gradients to apply that are not one for each trainable variable."""
    wanted, kind = len(step.trainable_variables), type(step).__name__
    if not isinstance(gradients, Sequence) or len(gradients) != wanted:
        listed = isinstance(gradients, Sequence)
        got = f"{len(gradients)} gradients" if listed else type(gradients).__name__
        raise UsageError(
            f"{kind}.clip() returned {got}: it must return a list with the gradient of each of the "
            f"{wanted} trainable variables, None where there is none"
        )


def check_unsynchronized(step: Any) -> None:
    """Refuses `TrainStep.unsynchronized_variables` that cannot differ between replicas.

    Raises:
        UsageError: one is not a TensorFlow variable, ``ema_decay`` averages it, or replicas share
            one copy of every variable.
    """
    kind, unsynchronized = type(step).__name__, step.unsynchronized_variables()
    if not all(isinstance(variable, tf.Variable) for variable in unsynchronized):
        raise UsageError(
            f"{kind}.unsynchronized_variables() must return the .value of a Keras variable"
        )
    if unsynchronized and replicas.has_one_copy(step.strategy):
        raise UsageError(
            f"{kind} needs a copy of its variables on each replica, and this strategy has one: use "
            "mirrored"
        )
    averaged = {id(v.value) for v in step.updater.trainable_variables}
    if step.ema_decay is not None and any(id(v) in averaged for v in unsynchronized):
        raise UsageError(
            f"{kind} lets weights differ between replicas, so they have no one average: leave out "
            "ema_decay"
        )


def check_evaluator(step: Any, dataset: Any, evaluator: Any) -> None:
    """Refuses an evaluation that shares a metric with the training or labels classes differently.
    Warns if the two steps preprocess features differently.

    Raises:
        UsageError: the training step and the evaluation step share a metric, or a class has one
            label in ``dataset`` and another in the data of the evaluation.
    """
    trained = {id(metric) for metric in step.all_metrics()}
    for metric in evaluator.step.all_metrics():
        if id(metric) in trained:
            raise UsageError(
                f"metric {metric.name} is in the training step and in the evaluation step, which "
                "resets it: make one for each"
            )
    train_class, eval_class = type(step), type(evaluator.step)
    if train_class.preprocess is not eval_class.preprocess:
        logging.warning(
            "%s.preprocess is not %s.preprocess, so the model is evaluated on other inputs than it "
            "trains on: unless this is meant, define it in a class that both inherit, and set "
            "%s.eval_step",
            *(train_class.__name__, eval_class.__name__, train_class.__name__),
        )
    for data in evaluator.datasets:
        names, eval_names = (getattr(d.info, "class_names", ()) for d in (dataset, data))
        labels = {name: label for label, name in enumerate(names)}
        for label, name in enumerate(eval_names if len(labels) == len(names) else ()):
            if labels.get(name, label) != label:
                raise UsageError(
                    f"class {name} has label {labels[name]} in {dataset.info.name} and {label} in "
                    f"{data.info.name}, which it is evaluated on: number the classes of both in "
                    "the same way (ImageFolder takes classes=)"
                )
