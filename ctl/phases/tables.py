"""Embedding tables of which a step reads and writes only the rows that its batch looks up.

The gradient of a lookup stays a `tf.IndexedSlices`, the numbers of the rows and a gradient for
each, from the tape to the update. A dense gradient has the size of the table, and with it grows the
time of the backward pass, the all-reduce and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.base.tf_internals import copy_here
from ctl.base.units import size_text
from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases.optimizers import is_decayed, is_plain
from ctl.reduce import densify, sum_rows

# Of a smaller table, a dense gradient costs less than to find the rows (benchmarks/README.md).
LEAST_BYTES = 4 << 20

# Phases that take or return gradients, which a user's may expect to be dense.
_OF_GRADIENTS = (
    *("forward_backward", "loss_and_gradients", "backward", "reduce", "sum_gradients"),
    *("finite", "clip", "apply"),
)


class Tables:
    """The embedding tables of a step whose gradients are rows. Their layers read only the rows that
    are looked up. Logs how each table of at least `LEAST_BYTES` is trained.

    Args:
        step: a `ctl.TrainStep` whose updater is made. By its ``sparse_rows``, tables of at least
            `LEAST_BYTES` are trained by rows where that is possible (``"auto"``), all are
            (``"on"``), or none is (``"off"``).

    Raises:
        UsageError: ``sparse_rows`` is ``"on"``, and a table cannot be trained by rows.
    """

    def __init__(self, step: Any):
        self._by_id: dict[int, tf.Variable] = {}
        for layer in _embeddings(step):
            table = layer._embeddings
            size = table.value.shape.num_elements() * table.value.dtype.size
            small = size < LEAST_BYTES and step.sparse_rows == "auto"
            if step.sparse_rows == "off" or small:
                continue
            reason = _why_dense(step, layer)
            if reason and step.sparse_rows == "on":
                raise UsageError(
                    f"layer {layer.name} cannot be trained by rows, because {reason}: use "
                    "--sparse_rows=auto (sparse_rows= in Python)"
                )
            if id(table.value) not in self._by_id:
                how = f"dense, because {reason}" if reason else "by rows"
                logging.info("embedding %s, %s: %s", table.path, size_text(size), how)
            if not reason:
                vars(layer)["call"] = _Lookup(layer)
                self._by_id[id(table.value)] = table.value

    def __contains__(self, variable: tf.Variable) -> bool:
        return id(variable) in self._by_id

    def gradient(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable
    ) -> tf.Tensor | tf.IndexedSlices:
        """Returns ``gradient`` as rows if ``variable`` is such a table, else as a dense tensor. Of
        a table that is not only looked up, a gradient has all rows."""
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


def _embeddings(step: Any) -> list[keras.layers.Embedding]:
    """The layers whose tables ``step`` trains. Removes what `Tables` of an earlier step did."""
    trained = {id(variable) for variable in step.updater.trainable_variables}
    layers = replicas.layers_of(step.tracked.layer)
    found = [x for x in layers if isinstance(x, keras.layers.Embedding) and x.built]
    for layer in found:
        if isinstance(vars(layer).get("call"), _Lookup):
            del vars(layer)["call"]
    return [layer for layer in found if id(layer._embeddings) in trained]


def _why_dense(step: Any, layer: keras.layers.Embedding) -> str | None:
    """Why the table of ``layer`` is trained as a whole; None if it can be trained by rows."""
    table = layer._embeddings
    if type(layer) is not keras.layers.Embedding or "call" in vars(layer):
        return f"{layer.name} has a call() of its own"
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
    for method in _OF_GRADIENTS:
        if step.overrides(method):
            return f"{type(step).__name__}.{method}() may expect a dense gradient"
    optimizer = step.updater.group_of(table).optimizer
    name = type(optimizer).__name__
    if not is_plain(optimizer):
        return f"{name} is not an optimizer of Keras"
    if is_decayed(optimizer, table):
        return "weight_decay decays all rows"
    if name == "Adagrad" or (name == "SGD" and not optimizer.momentum):
        return None
    return f"{name} moves rows that have no gradient"


class _Lookup:
    """The ``call`` of an Embedding that reads the rows of its ids, and not the table."""

    def __init__(self, layer: keras.layers.Embedding):
        self._layer, self._call = layer, layer.call

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(inputs, tf.Tensor | tf.RaggedTensor):  # symbols of Keras, sparse tensors
            return self._call(inputs, *args, **options)
        return tf.ragged.map_flat_values(self._rows, inputs)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        layer = self._layer
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # as Keras
        rows = copy_here(layer._embeddings.value).sparse_read(ids)
        return tf.cast(rows, layer.compute_dtype)
