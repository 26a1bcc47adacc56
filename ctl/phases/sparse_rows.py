"""Embedding tables of which a step reads and writes only the rows that its batch looks up.

The gradient of a lookup stays a `tf.IndexedSlices`, the numbers of the rows and a gradient for
each, from the tape to the update. A dense gradient is as large as the table: so are the time of the
backward pass, the all-reduce and the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.differences import names_of
from ctl.base.tf_internals import copy_here
from ctl.base.units import size_text
from ctl.distributed import replicas, workers
from ctl.errors import UsageError
from ctl.phases.deferred import Deferred, Rule, rule_of
from ctl.reduce import densify, sum_rows

# Of a smaller table, a dense gradient costs less than to find the rows (benchmarks/README.md).
LEAST_BYTES = 4 << 20

# Phases that take or return gradients, which a user's may expect to be dense.
_OF_GRADIENTS = (
    *("__call__", "forward_backward", "loss_and_gradients", "backward", "reduce", "sum_gradients"),
    *("finite", "clip", "apply"),
)


class Tables:
    """The embedding tables of a step whose gradients are rows. Their layers read only the rows that
    are looked up. Logs how each table of at least `LEAST_BYTES` is trained.

    Args:
        step: a `ctl.TrainStep` whose updater is made. By its ``sparse_rows``, tables of at least
            `LEAST_BYTES` are trained by rows if their optimizer moves no other row (``"auto"``),
            all are (``"on"``), or none is (``"off"``).

    Attributes:
        deferred: tables of which rows without a gradient move, by the id of their Keras variable.

    Raises:
        UsageError: ``sparse_rows`` is ``"on"``, and a table cannot be trained by rows.
    """

    def __init__(self, step: Any):
        self.deferred: dict[int, Deferred] = {}
        self._room = 0  # steps for which all histories have room, at least
        self._by_id: dict[int, tf.Variable] = {}
        self._over_workers = workers.is_multi_worker(step.strategy)
        by_way: dict[str, list[keras.Variable]] = {}
        for table, layers in _tables_of(step):
            small = _bytes_of(table) < LEAST_BYTES and step.sparse_rows == "auto"
            if step.sparse_rows == "off" or small:
                continue
            optimizer = step.updater.group_of(table).optimizer
            rule = _why_dense(step, table, layers) or rule_of(optimizer, table)
            if isinstance(rule, Rule) and step.sparse_rows == "auto":
                rule = (
                    f"{type(optimizer).__name__} moves rows that have no gradient, which "
                    "sparse_rows=on defers (--sparse_rows=on)"
                )
            if isinstance(rule, str) and step.sparse_rows == "on":
                raise UsageError(
                    f"layer {layers[0].name} cannot be trained by rows, because {rule}: leave "
                    "sparse_rows=on (--sparse_rows=on) out, so that its gradient is dense"
                )
            way = f"dense, because {rule}" if isinstance(rule, str) else "by rows"
            by_way.setdefault(way, []).append(table)
            if isinstance(rule, str):
                continue
            self._by_id[id(table.value)] = table.value
            if rule:
                with step.strategy.scope():
                    deferred = Deferred(table, optimizer, rule, step.strategy)
                self.deferred[id(table)] = table._deferred = deferred
                table.__class__ = _DeferredVariable
            for layer in layers:
                vars(layer)["call"] = _Lookup(layer)
        for way, tables in by_way.items():
            names, size = names_of([t.path for t in tables]), sum(map(_bytes_of, tables))
            logging.info("embeddings %s, %s: %s", names, size_text(size), way)

    def reserve(self, most: int) -> int:
        """Returns how many steps the next call may run, ``most`` at most. Call it before each call:
        where a history is full, it brings all rows of a table up to date.

        Raises:
            UsageError: a step that was built later has taken a table over.
        """
        for deferred in self.deferred.values():
            table: Any = deferred.table
            if not isinstance(table, _DeferredVariable) or table._deferred is not deferred:
                raise UsageError(
                    f"{table.path} belongs to a step that was made later: make a new step and loop "
                    "for this model, or leave sparse_rows=on out"
                )
        if self._by_id and self._over_workers:  # they gather another number of rows in each step
            most = 1  # and a collective of TensorFlow keeps the shape of its first run in a call
        if not self.deferred:
            return most
        if self._room < 1:
            self._room = min(deferred.make_room() for deferred in self.deferred.values())
        most = min(most, self._room)
        self._room -= most
        return most

    def restored(self) -> None:
        """The variables of ``deferred`` have other values now."""
        self._room = 0

    def check(self, jit_compile: bool | None) -> None:
        """Raises `UsageError` if something was changed since the step was built with which a table
        cannot be trained by rows."""
        for deferred in self.deferred.values():
            deferred.check()
        if jit_compile and self._by_id:
            raise UsageError(
                "embedding tables are trained by rows, which XLA cannot compile: give jit_compile "
                "before the first step, or sparse_rows=off (--sparse_rows=off)"
            )

    def __contains__(self, variable: tf.Variable) -> bool:
        return id(variable) in self._by_id

    def gradients(self, gradients: Sequence[Any], variables: Sequence[tf.Variable]) -> list[Any]:
        """Returns each gradient as rows if it is that of such a table, else as a dense tensor. Of a
        table that is not only looked up, a gradient has all rows. None stays None."""
        pairs = zip(gradients, variables, strict=True)
        return [None if g is None else self._gradient(g, v) for g, v in pairs]

    def _gradient(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable
    ) -> tf.Tensor | tf.IndexedSlices:
        if variable not in self:
            return densify(gradient)
        if isinstance(gradient, tf.Tensor):
            return tf.IndexedSlices(gradient, tf.range(variable.shape[0], dtype=tf.int64))
        return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, tf.int64))

    def shape(self, variable: tf.Variable) -> tf.TensorShape:
        """The shape of the gradient of ``variable``; of rows, of their values."""
        return tf.TensorShape([None, *variable.shape[1:]]) if variable in self else variable.shape

    def zeros(self, variable: tf.Variable, dtype: tf.DType) -> tf.Tensor | tf.IndexedSlices:
        """A gradient of zeros: of such a table, one without rows."""
        if variable not in self:
            return tf.zeros(variable.shape, dtype)
        return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], dtype), tf.zeros([0], tf.int64))

    def add(self, total: Any, gradient: Any) -> Any:
        """Returns ``total``, from `zeros`, and ``gradient`` together, in the type of ``total``."""
        if not isinstance(total, tf.IndexedSlices):
            return total + tf.cast(gradient, total.dtype)
        values = tf.concat([total.values, tf.cast(gradient.values, total.dtype)], 0)
        return tf.IndexedSlices(values, tf.concat([total.indices, gradient.indices], 0))

    def sum_rows(
        self, gradients: Sequence[Any], variables: Sequence[tf.Variable], options: Any
    ) -> list[Any]:
        """Returns ``gradients`` of ``variables``, with the rows summed over all replicas."""
        pairs = zip(gradients, variables, strict=True)
        tables = {i: v for i, (g, v) in enumerate(pairs) if isinstance(g, tf.IndexedSlices)}
        sums = sum_rows([gradients[i] for i in tables], [*tables.values()], options=options)
        of_table = dict(zip(tables, sums, strict=True))
        return [of_table.get(i, gradient) for i, gradient in enumerate(gradients)]


def _bytes_of(table: keras.Variable) -> int:
    return table.value.shape.num_elements() * table.value.dtype.size


def _tables_of(step: Any) -> list[tuple[keras.Variable, list[keras.layers.Embedding]]]:
    """The tables that ``step`` trains, with their layers, without what an earlier step did."""
    trained = {id(variable) for variable in step.updater.trainable_variables}
    found: dict[int, list[keras.layers.Embedding]] = {}
    for layer in replicas.layers_of(step.tracked.layer):
        if isinstance(layer, keras.layers.Embedding) and layer.built:
            _release(layer)
            if id(layer._embeddings) in trained:
                found.setdefault(id(layer._embeddings), []).append(layer)
    return [(layers[0]._embeddings, layers) for layers in found.values()]


def _release(layer: keras.layers.Embedding) -> None:
    """Makes a layer, and its table, again what Keras made them."""
    if isinstance(vars(layer).get("call"), _Lookup):
        del vars(layer)["call"]
    if isinstance(table := layer._embeddings, _DeferredVariable):
        table._deferred.bring_up_to_date()
        table.__class__ = keras.Variable


def _why_dense(
    step: Any, table: keras.Variable, layers: Sequence[keras.layers.Embedding]
) -> str | None:
    """Why ``table`` is trained as a whole, whatever its optimizer; None if by rows."""
    for layer in layers:
        if type(layer) is not keras.layers.Embedding or "call" in vars(layer):
            return f"{layer.name} is a {type(layer).__name__}, whose call() may differ"
        if layer.lora_enabled or layer.quantization_mode:
            return f"{layer.name} has LoRA or is quantized"
    if table.regularizer is not None or table.constraint is not None:
        return "its regularizer or constraint takes all rows"
    if step.jit_compile:
        return "jit_compile is on"
    if step.ema_decay is not None:
        return "ema_decay averages all rows"
    if step.log_norms:
        return "log_norms takes the norms of all rows"
    if replicas.has_one_copy(step.strategy):
        return "the strategy keeps one copy of each variable"
    if isinstance(step.strategy, tf.distribute.TPUStrategy):
        return "the device is a TPU"
    for method in _OF_GRADIENTS:
        if step.overrides(method):
            return f"{type(step).__name__}.{method}() may expect a dense gradient"
    return None


class _Lookup:
    """The ``call`` of an Embedding that reads the rows of its ids, and not the table."""

    def __init__(self, layer: keras.layers.Embedding):
        self._layer, self._call = layer, layer.call

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """While inside, the layer and its table are as Keras made them, with all rows up to date.
        Call it outside of a graph."""
        table, raw = self._layer._embeddings, None
        if isinstance(table, _DeferredVariable):
            raw = table.value.read_value()
            table.value.assign(table._deferred.value())
            table.__class__ = keras.Variable
        del vars(self._layer)["call"]
        try:
            yield
        finally:
            vars(self._layer)["call"] = self
            if raw is not None:
                table.__class__ = _DeferredVariable
                table.value.assign(raw)

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        plain = isinstance(inputs, tf.Tensor | tf.RaggedTensor)  # no symbols, no sparse tensors
        if not plain or _in_stateless_scope():
            return self._call(inputs, *args, **options)
        return tf.ragged.map_flat_values(self._rows, inputs)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        layer, variable = self._layer, self._layer._embeddings
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # as Keras
        table = copy_here(variable._value)  # whose `value` is cast where Keras casts by itself
        if not isinstance(variable, _DeferredVariable):
            return tf.cast(table.sparse_read(ids), layer.compute_dtype)
        numbers, places = tf.unique(tf.reshape(ids, [-1]))
        rows = _with_value(table.sparse_read(numbers), variable._deferred.read(numbers)[0])
        rows = tf.gather(rows, places)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), table.shape[1:]], 0))
        rows = tf.ensure_shape(rows, [*ids.shape, *table.shape[1:]])
        return tf.cast(rows, layer.compute_dtype)


def _in_stateless_scope() -> bool:
    """Whether variables have other values here, as in `keras.Model.stateless_call`."""
    with keras.StatelessScope() as scope:
        return scope.original_scope is not None


@tf.custom_gradient
def _with_value(rows: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Returns ``value``, and gives its gradient to ``rows``."""
    return value, lambda upstream: (upstream, None)


class _DeferredVariable(keras.Variable):
    """A table, all of whose rows are up to date for whoever reads it as a whole. Its ``value`` is
    the `tf.Variable`, whose rows are not."""

    _deferred: Deferred

    def numpy(self) -> np.ndarray:
        return self._deferred.value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        if _in_stateless_scope():
            return super().__tf_tensor__(dtype, name)
        value = _with_value(tf.convert_to_tensor(self._value), self._deferred.value())
        return tf.cast(value, dtype or self.dtype, name=name)

    def _direct_assign(self, value: Any) -> None:
        self._deferred.bring_up_to_date()
        super()._direct_assign(value)
