"""Checks of a user's step: one line of error instead of wrong numbers."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.base import tf_internals
from ctl.base.models import layers_of
from ctl.base.tracebacks import Said, is_of_the_user
from ctl.distributed import local_batch, replicas
from ctl.distributed.replica_variables import ReplicaVariables
from ctl.errors import CtlError, UsageError
from ctl.phases import losses
from ctl.phases.labels import CHECKED, CROSS_ENTROPY, batch_spec, check_outputs
from ctl.phases.logged import Logged
from ctl.phases.metrics import check_given, takes_logits
from ctl.phases.penalties import codes, names
from ctl.phases.seeds import Seeds
from ctl.phases.tracked_state import TrackedState, has_state

_CONTRACTS = {
    "reduce": "(loss, count, gradients, snapshot) and return (loss, count, gradients)",
    "backward": "(tape, loss, variables=None) and return gradients times the loss scale, as "
    "TrainStep.backward does",
}


def check_arguments(evaluator: Any, checkpoints: Any, schedule: Any, **actions: Any) -> None:
    """Refuses a wrong kind of argument of `ctl.Loop`."""
    if schedule is not None and (not callable(schedule) or not _takes_one(schedule)):
        what = getattr(schedule, "__name__", None) or repr(schedule)
        raise UsageError(
            f"schedule is {what}: give a function of the step, such as "
            "ctl.schedule.Cosine(…), or the rate to the optimizer"
        )
    if evaluator is not None and not hasattr(evaluator, "run"):
        raise UsageError(
            f"evaluator is a {type(evaluator).__name__}: give "
            "ctl.Evaluator(ctl.EvalStep(model, metrics=…), dataset)"
        )
    named = isinstance(checkpoints, str | os.PathLike | None)
    if not named and not hasattr(checkpoints, "begin_run"):
        raise UsageError(
            f"checkpoints is {checkpoints!r}: give a directory, or ctl.CheckpointManager(directory)"
        )
    for name, value in actions.items():
        given = value if isinstance(value, Sequence) else ()
        if any(isinstance(one, keras.callbacks.Callback) for one in (*given, value)):
            raise UsageError(f"{name} has callbacks of Keras: give train(callbacks=[…]) these")
        if not isinstance(value, Sequence) or not all(map(callable, value)):
            raise UsageError(f"{name} must be a list of functions, not {value!r}")
    for one in actions.get("actions", ()):
        if hasattr(type(one), "memory"):
            kind = type(one).__name__
            raise UsageError(
                f"actions has {kind}, which needs evaluations: give it in eval_actions"
            )


def _takes_one(function: Any) -> bool:
    """Whether ``function`` takes the step, and no more. True if that is not known."""
    if isinstance(function, type):
        return False
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # of a function in C
        pass
    return True


def check_step_kind(step: Any, kind: type, takes: str) -> None:
    """Refuses a step that is not of ``kind``, such as a model."""
    if not isinstance(step, kind):
        raise UsageError(
            f"{takes} takes a ctl.{kind.__name__}, not a {type(step).__name__}: give "
            f"ctl.{kind.__name__}(model, …)"
        )


def check_kind(model: Any) -> None:
    """Refuses a model that is no model of Keras 3, such as a `tf.Module` or a class."""
    if not isinstance(model, keras.Layer):
        what = f"class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UsageError(
            f"model is a {what}: give an object of keras.Model (Keras 3), which makes variables of "
            "its own with self.add_weight()"
        )


def check_loss_and_metrics(loss_fn: Any, **metrics: Any) -> None:
    """Refuses a ``loss_fn`` that is no function, arguments of metrics that are not lists of Keras
    metrics, such as one name, and two metrics of one name."""
    if isinstance(loss_fn, Mapping | list | tuple):
        raise UsageError(f"loss_fn is a {type(loss_fn).__name__}: {losses.SEVERAL}")
    if isinstance(loss_fn, type) or not callable(loss_fn):
        what = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else repr(loss_fn)
        raise UsageError(
            f"loss_fn is {what}: give a function of labels and outputs that returns one loss "
            "for each example, such as ctl.losses.mean_squared_error; TrainStep(loss_fn=) takes "
            "Keras's names, too"
        )
    names: set[str] = set()
    for argument, given in metrics.items():
        if isinstance(given, Mapping):
            raise UsageError(
                f"{argument} is a dict: for metrics of several outputs, make them attributes of a "
                "class of your own, and update them in update_metrics()"
            )
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        for metric in given if listed else [given]:
            if not (listed and isinstance(metric, keras.metrics.Metric)):
                wrapped = "; of a function, give keras.metrics.MeanMetricWrapper(function, name)"
                if isinstance(metric, type):
                    wrapped = f"; make an object of the class: {metric.__name__}(…)"
                raise UsageError(
                    f"{argument} must be a list of names, such as ['accuracy'], or of "
                    f"keras.metrics.Metric objects; got {metric!r}"
                    + wrapped
                    * (listed and callable(metric))
                )
            if metric.name in names:
                raise UsageError(
                    f"two metrics are called {metric.name}, but a record can hold only one of "
                    "them: give another name=, such as weighted_accuracy"
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
                    "number for each: average it (average='macro'), or return a dict of scalars"
                )


# Attributes that `TrainStep.build` sets.
_OF_BUILD = (
    *("noinline", "single_replica", "statistics", "synchronizes", "trace_guards"),
    *("tables", "trainable_mask", "trainable_variables", "updater"),
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


def names_in(function: Any) -> set[str]:
    """Names of attributes and globals, and strings, in the code of a function, a method or a
    property, and of functions inside it."""
    function = getattr(function, "fget", None) or getattr(function, "func", None) or function
    names: set[str] = set()
    for code in codes(getattr(getattr(function, "__func__", function), "__code__", None)):
        names |= {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    return names


def _calls_preprocess(step: Any) -> bool:
    """Whether the loss of ``step``, or a method that it calls, names `preprocess` or ``super``."""
    names: set[str] = set()
    left = [step.loss]
    while left:
        for name in names_in(left.pop()) - names:
            names.add(name)
            called = getattr(type(step), name, None)
            left += [called] if inspect.isfunction(called) else []
    return not names.isdisjoint({"preprocess", "super"})


def replaces_loss(step: Any) -> bool:
    """Whether a subclass replaces `loss`, or a phase that calls it and does so no more."""
    phases = "forward", "loss_and_gradients", "forward_backward"
    own = (getattr(step, p) for p in phases if step.training and step.overrides(p))
    calls = {"super", "loss", "loss_fn", *phases}
    return step.overrides("loss") or any(calls.isdisjoint(names_in(method)) for method in own)


def warn_of_compiled(step: Any) -> None:
    """Warns if ``step`` has the default loss, and its model was compiled with another."""
    compiled = getattr(step.model, "loss", None) if getattr(step.model, "compiled", False) else None
    alike = compiled == "sparse_categorical_crossentropy" or losses.is_sparse(compiled)
    if compiled is None or alike or step.loss_fn is not losses.cross_entropy or replaces_loss(step):
        return
    logging.warning(
        "the loss of %s is cross_entropy, its default, and not that of model.compile, of which a "
        "step takes nothing: to have that, give loss_fn=model.loss",
        type(step).__name__,
    )


def warn_of_float16(step: Any) -> None:
    """Warns of a model that computes in float16, without a scale of the loss."""
    narrow = [
        one for one in layers_of(step.model) if getattr(one, "compute_dtype", "") == "float16"
    ]
    if narrow and not step.loss_scale:
        logging.warning(
            "model %s computes in float16, in which small gradients are 0: give "
            "%s(loss_scale=True), or keras.mixed_precision.set_dtype_policy('mixed_bfloat16')",
            *(step.model.name, type(step).__name__),
        )


def check_probabilities(step: Any) -> None:
    """Refuses metrics of probabilities that get logits, and the reverse, see `ctl.phases.metrics`.
    Warns of them where code of the user's own may update them with something else."""
    own = replaces_loss(step) or step.overrides("update_metrics")
    if not own:
        known = step.training or losses.gives_logits(step.model) is not None
        check_given(step.given_metrics, step.loss_fn if known else None, step.model)
    for metric in step.all_metrics() if own else step.tracked.metrics:
        logits = losses.gives_logits(step.model) and takes_logits(metric) is False
        if logits and not _names_activation(type(step)):
            logging.warning(
                "metric %s takes probabilities, and model %s ends in logits: update it with "
                "keras.ops.sigmoid(outputs), or softmax",
                *(metric.name, step.model.name),
            )


def _names_activation(kind: type) -> bool:
    """Whether a method of the user's in the class ``kind`` names sigmoid or softmax."""
    of_user = (base for base in kind.__mro__ if not base.__module__.startswith("ctl."))
    functions = [f for base in of_user for f in vars(base).values() if callable(f)]
    words = {name for function in functions for name in names_in(function)}
    return any("sigmoid" in word or "softmax" in word for word in words)


# Methods by which other tools train; of a keras.Model, the first two.
_OF_OTHERS = (
    *("train_step", "compute_loss", "test_step"),
    *("training_step", "validation_step", "configure_optimizers"),
)


def check_overrides(step: Any) -> None:
    """Refuses a step that was built before, overrides with other arguments, and methods that have
    an effect in other tools only. Of a model, these are named by a warning."""
    if step.strategy is not None:
        raise UsageError("this step is built already: make a new one for another loop")
    check_attributes(step)
    kind = type(step).__name__
    if others := [name for name in _OF_OTHERS if hasattr(type(step), name)]:
        raise UsageError(
            f"{kind} has {others[0]}(), which ctl does not call: override loss(), which returns "
            "the loss of each example"
        )
    of_model = {name: getattr(type(step.model), name, None) for name in _OF_OTHERS[:2]}
    for name, method in of_model.items():
        if method not in (None, getattr(keras.Model, name)) and not replaces_loss(step):
            logging.warning(
                "model %s has its own %s(), which ctl does not call: if it is more than the loss "
                "of outputs and labels, override loss() of the step",
                *(step.model.name, name),
            )
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
    if not isinstance(gradients, Sequence):
        raise UsageError(
            f"{kind}.backward() returned {type(gradients).__name__}: it must return a list with "
            "the gradient of each trainable variable, None where there is none"
        )
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


# TensorFlow's words for what XLA cannot compile.
_NOT_OF_XLA = re.compile(r"unsupported operations when trying to compile graph \S+ on \S+: (\w+)")


@contextlib.contextmanager
def translate_trace_errors(step: Any) -> Iterator[None]:
    """Turns two errors of TensorFlow into a `UsageError`: the step makes a variable while it is
    traced, and XLA cannot compile it."""
    try:
        yield
    except tf.errors.OpError as error:
        if not (found := _NOT_OF_XLA.search(error.message)):
            raise
        if found[1].startswith("DebugNumericSummary"):
            raise UsageError(
                "XLA cannot compile what tf.debugging.enable_check_numerics adds: leave it out, "
                "and give eager=True (--eager), which names the operation that makes a NaN; or "
                "make the step with jit_update=False and jit_compile=False"
            ) from error
        raise UsageError(
            f"XLA cannot compile {found[1]}: if the update has it, as in a constraint, make the "
            "step with jit_update=False; else give jit_compile=False (--jit_compile=off)"
        ) from error
    except Exception as error:
        made = isinstance(error, ValueError) and "singleton tf.Variables" in str(error)
        if not made and type(error).__name__ != "UnliftableError":  # of a graph that does not run
            raise
        raise UsageError(
            f"{type(step).__name__} makes a variable while it is traced: make layers and variables "
            "in __init__. keras.random makes one where no seed is given: call "
            "tf.random.stateless_normal(shape, self.seed()), or give keras.random a "
            "SeedGenerator made in __init__"
        ) from error


@contextlib.contextmanager
def refuses_summaries(step: Any) -> Iterator[None]:
    """Refuses ``tf.summary`` in what is traced inside: one replica would write the value of its own
    part of the batch, once for each micro-batch, and under a name such as ``while/loss``."""
    if not tf.inside_function():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[before:]:
        if operation.type.startswith("Write") and operation.type.endswith("Summary"):
            tag = operation.name.rpartition("/")[0].rpartition("/")[2]
            raise UsageError(
                f"{type(step).__name__} calls tf.summary for {tag!r}: in a step, log a number with "
                f"self.log({tag!r}, value), which is averaged over replicas; write other summaries "
                "in an action of the loop"
            )


@contextlib.contextmanager
def naming_keys(batch: Any, **more: Any) -> Iterator[None]:
    """Adds to a `KeyError` inside the keys that there are: of dicts in ``batch``, which may be one,
    and of dicts in ``more``, by name."""
    try:
        yield
    except Exception as error:
        key = tf_internals.missing_key(error)
        parts = (
            {f"batch[{i}]": one for i, one in enumerate(batch)}
            if isinstance(batch, tuple | list)
            else {}
        )
        dicts = {"the batch": batch} | parts | more
        keys = {of: [*map(repr, one)] for of, one in dicts.items() if isinstance(one, Mapping)}
        if key and _KEYS not in key and any(key not in each for each in keys.values()):
            said = "; ".join(f"{of}: {', '.join(each)}" for of, each in keys.items())
            tf_internals.set_message(error, Said(f"{key} ({_KEYS}{said})"))
        raise


_KEYS = "there are, in "


def fits_default_evaluation(kind: type) -> bool:
    """Whether `ctl.EvalStep` evaluates what a step of the class ``kind`` trains: its `loss` uses
    ``loss_fn``, or that of a base class, as far as its code says; or it names an ``eval_step``."""
    for base in kind.__mro__:
        if base.__module__.startswith("ctl.") and not base.__module__.startswith("ctl.recipes."):
            return True
        functions = {name: f for name, f in vars(base).items() if callable(f)}
        codes = {n: getattr(inspect.unwrap(f), "__code__", None) for n, f in functions.items()}
        if "eval_step" in vars(base) or any(names(code, "loss_fn") for code in codes.values()):
            return True
        if "loss" in codes and not names(codes["loss"], "loss"):
            return False
    return True


@contextlib.contextmanager
def naming_eval_step(step: Any, evaluator: Any) -> Iterator[None]:
    """Turns an error inside, where ``evaluator`` is traced, into a `UsageError` if it is that of
    the default evaluation of another loss."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CtlError) or not _mistakes_loss(step, evaluator):
            raise
        first = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise UsageError(f"the evaluation fails ({first[:200]}): {_advice(step)}") from error


def _mistakes_loss(step: Any, evaluator: Any) -> bool:
    return not (evaluator.step.overrides("loss") or fits_default_evaluation(type(step)))


def _warn_of_another_model(step: Any, evaluator: Any) -> None:
    trained = {id(variable) for variable in step.model.variables}
    model = evaluator.step.model
    shares = not model.variables or any(id(variable) in trained for variable in model.variables)
    if not shares and not hasattr(evaluator, "copy"):  # as that of parameter servers has
        logging.warning(
            "the evaluation is of model %s, which has no variable of the trained model %s, so its "
            "results do not change: give it the model of the training step",
            *(model.name, step.model.name),
        )


def warn_of_outputs(evaluation: Any) -> None:
    """Warns if the model of ``evaluation`` ends in what its loss applies itself. A training refuses
    such a model; the metrics of an evaluation may still be right."""
    function: Any = getattr(evaluation.loss_fn, "func", evaluation.loss_fn)
    if function not in CHECKED or replaces_loss(evaluation):
        return
    try:
        check_outputs(function.__name__, evaluation.model)
    except UsageError as error:
        logging.warning("the loss of the evaluation means nothing: %s", error)


def _warn_of_another_loss(step: Any, evaluation: Any) -> None:
    """Warns if ``evaluation`` has the loss of who gives none, and the training has another."""
    trained = step.loss_fn
    alike = losses.takes_logits(trained) and trained is not losses.binary_cross_entropy
    own = replaces_loss(step) or evaluation.overrides("loss")
    if evaluation.loss_fn is losses.cross_entropy and not alike and not own:
        try:
            check_outputs(CROSS_ENTROPY, evaluation.model)
        except UsageError:  # see `warn_of_outputs`
            return
        name = getattr(trained, "name", None) or getattr(trained, "__name__", "another function")
        logging.warning(
            "the loss of the evaluation is cross_entropy, that of the training is %s: unless this "
            "is meant, give it to both, as in EvalStep(model, loss_fn)",
            name,
        )


def _advice(step: Any) -> str:
    kind = type(step).__name__
    return (
        f"{kind}.loss() does not use loss_fn, by which ctl.EvalStep evaluates labels and outputs: "
        f"set {kind}.eval_step to a subclass of ctl.EvalStep with this loss(), or to ctl.EvalStep "
        "if that is meant"
    )


def _line_of(*methods: Any) -> str:
    """Where the first of ``methods`` that is of the user's is defined, for a message."""
    codes = (getattr(inspect.unwrap(method), "__code__", None) for method in methods)
    for code in codes:
        if code and is_of_the_user(code.co_filename):
            return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
    return ""


def check_evaluator(step: Any, dataset: Any, evaluator: Any) -> None:
    """Refuses an evaluation that shares a metric with the training or labels classes differently.
    Warns if the two steps preprocess features or compute losses differently, or if the loss of
    the evaluation may mean nothing.

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
    _warn_of_another_model(step, evaluator)
    _warn_of_another_loss(step, evaluator.step)
    if _mistakes_loss(step, evaluator):
        logging.warning(
            "the loss and metrics of the evaluation may mean nothing: %s", _advice(step)
        )
    train_class, eval_class = type(step), type(evaluator.step)
    if train_class.preprocess is not eval_class.preprocess:
        logging.warning(
            "%s.preprocess is not %s.preprocess%s, so the model is evaluated on other inputs than "
            "it trains on: unless this is meant, define it in a class that both inherit, and set "
            "%s.eval_step",
            *(train_class.__name__, eval_class.__name__),
            *(_line_of(train_class.preprocess, eval_class.preprocess), train_class.__name__),
        )
    spec = batch_spec(dataset)
    features = spec[0] if local_batch.has_parts(spec) else None
    are_images = isinstance(features, tf.TensorSpec) and features.dtype == tf.uint8
    unscaled = [
        one.overrides("loss") and not _calls_preprocess(one) for one in (step, evaluator.step)
    ]
    if are_images and unscaled[0] != unscaled[1]:
        logging.warning(
            "only one of %s.loss() and %s.loss() calls self.preprocess(), which scales 0 to 255 "
            "to 0 to 1%s: unless the other does it itself, the model is evaluated on other inputs "
            "than it trains on",
            *(train_class.__name__, eval_class.__name__),
            _line_of(train_class.loss, eval_class.loss),
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
