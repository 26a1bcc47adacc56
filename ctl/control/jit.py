"""Decides by a rule whether XLA compiles a step, so two runs with one seed agree.

The rule uses XLA only for steps that were measured to be faster and that XLA is known to compile.
`ctl.jobs.trials` measures instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.data.dataset import Dataset
from ctl.data.in_memory import InMemory
from ctl.distributed import replicas
from ctl.phases import losses
from ctl.phases.metrics import Accuracy
from ctl.schedule import schedules
from ctl.step import TrainStep

# Weights times examples of a batch. On a CPU, XLA multiplies large matrices more slowly than
# TensorFlow: a step took 0.70 of its time with 43 million of these products, and 1.45 with 340
# million. On a GPU, the largest step that was measured had 89 million, and took 0.20
# (benchmarks/README.md).
_MOST_PRODUCTS = {"CPU": 64 << 20, "GPU": 128 << 20}
_MOST_VARIABLES = 64  # the time to compile grows with them

_LAYERS = (
    *(keras.layers.InputLayer, keras.layers.Dense, keras.layers.Activation, keras.layers.ReLU),
    *(keras.layers.Flatten, keras.layers.Reshape, keras.layers.Rescaling),
    *(keras.layers.BatchNormalization, keras.layers.LayerNormalization),
)
_LAYERS_ON_GPU = (*_LAYERS, keras.layers.Conv2D, keras.layers.MaxPooling2D)
_LOSSES = (losses.cross_entropy, losses.binary_cross_entropy, losses.mean_squared_error)
_METRICS = (
    *(keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy),
    *(keras.metrics.BinaryAccuracy, keras.metrics.Mean, Accuracy),
    *(keras.metrics.MeanSquaredError, keras.metrics.MeanAbsoluteError),
)
_NUMBERS = "uif"  # kinds of NumPy's dtypes


def decide(step: TrainStep, dataset: Dataset) -> None:
    """Sets ``jit_compile`` if it is None; logs the decision and its reason.

    A later call decides again, with changed settings, if the rule had chosen XLA.
    """
    before = step.jit_compile
    if before is not None and not (before and step.jit_by_rule):
        return
    reason = why_not(step, dataset)
    step.jit_compile = step.jit_by_rule = reason is None
    if step.jit_compile != before:
        on = f"one replica on a {_device(step)}, and small layers that XLA makes faster"
        logging.info("jit_compile: %s, by rule: %s", _shown(step), reason or on)


def keep(step: TrainStep, dataset: Dataset, compiled: bool) -> None:
    """Reuses the first run's decision, so a resume is bit-exact. Leaves out XLA where the rule
    forbids it now, for instance on several replicas after one."""
    decided_by_rule = step.jit_compile is step.jit_by_rule
    if decided_by_rule and step.jit_compile is not compiled:
        step.jit_compile = step.jit_by_rule = compiled and why_not(step, dataset) is None
        logging.info("jit_compile: %s, as when the run began", _shown(step))


def _shown(step: TrainStep) -> str:
    return "on" if step.jit_compile else "off"


def why_not(step: TrainStep, dataset: Dataset) -> str | None:
    """Returns why the rule leaves out XLA, for the log; None if XLA compiles the step."""
    for check in (_placement, _model, _settings, _code, _size):
        if reason := check(step, dataset):
            return reason
    return None


def _placement(step: TrainStep, dataset: Dataset) -> str | None:
    if not step.single_replica:
        if replicas.is_asynchronous(step.strategy):
            return "the variables are on parameter servers"
        several = step.strategy.num_replicas_in_sync > 1
        return "the strategy has several replicas" if several else "the strategy is mirrored"
    if _device(step) not in _MOST_PRODUCTS:
        return f"the device is a {_device(step)}, neither a CPU nor a GPU"
    return None


def _device(step: TrainStep) -> str:
    """The kind of device that has the weights, such as ``CPU``; several are joined."""
    kinds = {tf.DeviceSpec.from_string(v.device).device_type for v in step.trainable_variables}
    return " and a ".join(sorted(map(str, kinds)))


def _settings(step: TrainStep, dataset: Dataset) -> str | None:
    data: Any = dataset
    if type(data) is not InMemory or not data.training:
        return f"the data are {type(data).__name__}, not arrays in memory"
    if not all(a.dtype.kind in _NUMBERS for a in keras.tree.flatten(data.arrays)):
        return "the data are not all numbers"
    if step.accumulate_steps > 1:
        return "accumulate_steps is set"
    if step.jit_update is False:
        return "jit_update is off"
    if len(step.updater.groups) > 1:
        return "there are several parameter groups"
    return None


def _code(step: TrainStep, dataset: Dataset) -> str | None:
    """Refuses code from outside of ctl and Keras, which XLA may be unable to compile."""
    if type(step) is not TrainStep:
        return f"{type(step).__name__} is a step of its own"
    if changed := [name for name in vars(step) if inspect.isfunction(getattr(TrainStep, name, 0))]:
        return f"{changed[0]} of the step was replaced"
    if _unwrapped(step.loss_fn) not in _LOSSES:
        return f"the loss is {_name(step.loss_fn)}"
    if other := [metric for metric in step.given_metrics if type(metric) not in _METRICS]:
        return f"metric {other[0].name} ({type(other[0]).__name__})"
    optimizer, _, schedule = step.updater.groups[0]
    schedule = schedule or optimizer._learning_rate  # the public name is the current number
    if not _is_of_keras(schedule) and _module(schedule) != schedules.__name__:
        return f"the schedule is {_name(schedule)}"
    if not _is_of_keras(optimizer):
        return f"the optimizer is {type(optimizer).__name__}"
    return None


def _model(step: TrainStep, dataset: Dataset) -> str | None:
    known = _LAYERS_ON_GPU if _device(step) == "GPU" else _LAYERS
    for layer in replicas.layers_of(step.model):
        kind, operations = type(layer).__name__, getattr(layer, "operations", [])
        if type(layer) is not keras.Sequential and not (operations and _is_of_keras(layer)):
            if type(layer) not in known:
                return f"layer {layer.name} ({kind})"
            if layer.dtype_policy.name != "float32":
                return f"layer {layer.name} is of {layer.dtype_policy.name}"
        called = [getattr(layer, name, None) for name in _CALLED]
        if "call" in vars(layer) or not all(f is None or _is_of_keras(f) for f in called):
            return f"layer {layer.name} ({kind}) has a function of its own"
        if other := [op for op in operations if not isinstance(op, keras.Layer)]:
            return f"operation {other[0].name} ({type(other[0]).__name__})"
        if kind == "Dense" and len(layer.get_build_config()["input_shape"]) != 2:
            return f"layer {layer.name} (Dense) has inputs of rank 3 or more"
    return None


# Attributes of layers that may be functions of the user.
_CALLED = (
    *("activation", "kernel_regularizer", "bias_regularizer", "activity_regularizer"),
    *("beta_regularizer", "gamma_regularizer"),
)


def _size(step: TrainStep, dataset: Dataset) -> str | None:
    if len(step.trainable_variables) > _MOST_VARIABLES:
        return f"{len(step.trainable_variables)} variables take long to compile"
    weights = sum(v.shape.num_elements() for v in step.trainable_variables)
    if weights * dataset.global_batch_size > _MOST_PRODUCTS[_device(step)]:
        return "TensorFlow multiplies matrices of this size faster"
    return None


def _unwrapped(function: Callable) -> Callable:
    return function.func if isinstance(function, functools.partial) else function


def _is_of_keras(value: Any) -> bool:
    return _module(value).partition(".")[0] == "keras"


def _module(value: Any) -> str:
    return (value if inspect.isroutine(value) else type(value)).__module__


def _name(value: Any) -> str:
    return getattr(_unwrapped(value), "__name__", type(value).__name__)
