"""The state that belongs to a step: its model, and layers, variables and others in attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases.uninitialized import values_of

# Attributes that every step has from its arguments, and handles itself.
_KNOWN = ("model", "optimizer", "metrics", "weighted_metrics")


class _Layer(keras.Layer):
    """A layer in which Keras finds the layers, variables and seed generators of ``parts``."""

    def __init__(self, parts: list[Any]):
        super().__init__(name="step")
        self.parts = parts
        self.built = True


class TrackedState:
    """The model of a step, and the layers, variables, metrics, optimizers and seed generators that
    are attributes of the step, or in lists and dicts that are attributes.

    Attributes:
        layer: the model and all layers, Keras variables and seed generators as one layer.
        metrics: metrics that are attributes, without ``step.given_metrics``.
        optimizers: optimizers that are attributes, without ``step.optimizer``.
        raw_variables: TensorFlow variables that are attributes, also of layers, or in a
            `tf.Module`, without per-replica variables.
        extra_variables: all variables that belong neither to the model nor to a metric: Keras
            variables, variables of seed generators, layers and optimizers, and ``raw_variables``;
            each kind in the order of the attributes.
    """

    def __init__(self, step: Any):
        attributes = [value for name, value in vars(step).items() if name not in _KNOWN]
        parts = [part for value in attributes for part in _leaves(value)]
        kinds = keras.Layer, keras.Variable, keras.random.SeedGenerator
        self.layer = _Layer(
            [step.model, *(p for p in parts if isinstance(p, kinds) and not _is_metric(p))]
        )
        self.metrics = [p for p in parts if _is_metric(p) and p not in step.given_metrics]
        self.optimizers = [p for p in parts if isinstance(p, keras.optimizers.Optimizer)]
        skip = {id(v) for v in step.per_replica_variables.variables}
        self.raw_variables = [p for p in parts if isinstance(p, tf.Variable) and id(p) not in skip]
        self.raw_variables += [v for p in parts if isinstance(p, tf.Module) for v in p.variables]
        self._in_layers = [
            (layer, v) for layer in replicas.layers_of(self.layer) for v in _raw_variables(layer)
        ]
        self.raw_variables += [v for _, v in self._in_layers]
        of_keras = values_of(v for part in (self.layer, *self.optimizers) for v in part.variables)
        models = {id(value) for value in values_of(step.model.variables)}
        self.extra_variables = list(
            {id(v): v for v in of_keras + self.raw_variables if id(v) not in models}.values()
        )
        # Keras has no public name for the variables that an optimizer was built with.
        self._trained = {id(v.value) for o in self.optimizers for v in o._trainable_variables}
        self._generators = any(isinstance(p, tf.random.Generator) for p in parts)

    def check_layers(self) -> None:
        """Raises `UsageError` for a layer with a trainable variable of TensorFlow, which Keras 3
        neither trains nor saves."""
        for layer, variable in self._in_layers:
            if variable.trainable and variable.dtype.is_floating:
                raise UsageError(
                    f"layer {layer.name} has a tf.Variable, {variable.name}, which Keras does not "
                    "train: make it with self.add_weight(), or set trainable=False"
                )

    def check(self, trained: Sequence[tf.Variable]) -> None:
        """Raises `UsageError` for a trainable variable that is neither in ``trained`` nor in an
        optimizer that is an attribute; and for a `tf.random.Generator`, which is not saved and
        draws the same numbers on all replicas."""
        if self._generators:
            raise UsageError(
                "the step has a tf.random.Generator, which ctl cannot save: use "
                "keras.random.SeedGenerator"
            )
        known = {id(v) for v in trained} | self._trained
        for variable in [*(v.value for v in self.layer.trainable_variables), *self.raw_variables]:
            if variable.trainable and variable.dtype.is_floating and id(variable) not in known:
                raise UsageError(
                    f"variable {variable.name} of the step is trainable, but no optimizer trains "
                    "it: add it to the model or to a parameter group, build an optimizer of "
                    "the step with it (self.my_optimizer.build(variables)), or set trainable=False"
                )

    @contextlib.contextmanager
    def counted_unless(self, empty: tf.Tensor | None, *others: tf.Variable) -> Iterator[None]:
        """Undoes changes of ``metrics`` and ``others`` inside if ``empty``, a bool scalar; None for
        never. A replica without examples computes with an example that must not count."""
        variables = [v.value for m in self.metrics for v in m.variables] + [*others]
        variables = [] if empty is None else variables
        before = [variable.read_value() for variable in variables]
        yield
        for variable, old in zip(variables, before, strict=True):
            variable.assign(tf.where(empty, old, variable.read_value()))


@contextlib.contextmanager
def put_back(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Gives ``variables`` their values back on exit, on each replica its own."""
    parts = [p for v in variables for p in strategy.experimental_local_results(v)]
    values = [part.read_value() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)


def has_state(value: Any) -> bool:
    """Whether ``value``, or an element of it, is state that `TrackedState` finds in a step."""
    kinds = (
        *(keras.Layer, keras.Variable, keras.random.SeedGenerator, keras.metrics.Metric),
        *(keras.optimizers.Optimizer, tf.Module, tf.Variable),
    )
    return any(isinstance(leaf, kinds) for leaf in _leaves(value))


def _is_metric(part: Any) -> bool:
    return isinstance(part, keras.metrics.Metric)


def _raw_variables(layer: keras.Layer) -> list[tf.Variable]:
    """The variables of TensorFlow in attributes of ``layer``, in the order of the attributes."""
    parts = list(_leaves(vars(layer)))
    modules = [v for part in parts if isinstance(part, tf.Module) for v in part.variables]
    return [part for part in parts if isinstance(part, tf.Variable)] + modules


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            yield from _leaves(element)
    else:
        yield value
