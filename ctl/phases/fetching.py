"""Fetches the rows of all split tables that a functional model looks up before it runs: those of
one width and type in one exchange.

Most models look up ids that are in the batch, or that layers without weights make of it. So all ids
are known before the first layer runs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ctl.distributed import replicas
from ctl.phases.shards import look_up


class Fetched(NamedTuple):
    """Rows of a table that this replica needs.

    Attributes:
        numbers: of the rows, int64 [m], ascending.
        rows: [m, d].
    """

    numbers: tf.Tensor
    rows: tf.Tensor

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows ``ids``, int64 [k], which must be among them."""
        places = tf.searchsorted(self.numbers, ids)
        known = tf.concat([self.numbers, [-1]], 0)
        found = tf.reduce_all(tf.equal(tf.gather(known, places), ids))
        with tf.control_dependencies([tf.debugging.Assert(found, ["a row was not fetched", ids])]):
            return tf.gather(self.rows, places)


_FETCHED: contextvars.ContextVar[Mapping[int, Fetched]] = contextvars.ContextVar("_FETCHED")


def fetched(layer: keras.layers.Embedding) -> Fetched | None:
    """What was fetched of the table of ``layer`` for the model that is being called, if it was."""
    return _FETCHED.get({}).get(id(layer))


class FetchFirst:
    """The ``call`` of a functional model that fetches the rows of its split tables first.

    Args:
        model: whose ``call`` it becomes.
        lookups: the layers that look up rows, with the symbol of their ids.
    """

    def __init__(self, model: keras.Model, lookups: Sequence[tuple[keras.layers.Embedding, Any]]):
        self._model, self._call = model, model.call
        self._layers = [layer for layer, _ in lookups]
        # With a name, Keras's count of models stays as it was.
        self._ids = keras.Model(model.input, [ids for _, ids in lookups], name="ids")

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """While inside, the model is as Keras made it. Call it outside of a graph."""
        del vars(self._model)["call"]
        try:
            yield
        finally:
            vars(self._model)["call"] = self

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        token = _FETCHED.set(self._fetched(inputs))
        try:
            return self._call(inputs, *args, **options)
        finally:
            _FETCHED.reset(token)

    def _fetched(self, inputs: Any) -> dict[int, Fetched]:
        """The rows of the table of each layer, by the layer's id."""
        lookups = [vars(layer).get("call") for layer in self._layers]
        tables: list[Any] = [getattr(lookup, "split_table", None) for lookup in lookups]
        if None in tables or not all(isinstance(x, tf.Tensor) for x in tf.nest.flatten(inputs)):
            return {}
        of: dict[int, list[tf.Tensor]] = {}
        for table, lookup, ids in zip(tables, lookups, self._ids(inputs), strict=True):
            flat = tf.reshape(lookup.numbers(ids), [-1])
            of.setdefault(id(table), []).append(tf.cast(flat, tf.int64))
        numbers = {key: tf.sort(tf.unique(tf.concat(ids, 0)).y) for key, ids in of.items()}
        groups: dict[Any, list[Any]] = {}
        for table in {id(table): table for table in tables}.values():
            variable = table.variable.value
            groups.setdefault((variable.dtype, variable.shape[1]), []).append(table)
        found = {}
        for group in groups.values():
            each = look_up([table.wanted(numbers[id(table)]) for table in group])
            for table, rows in zip(group, each, strict=True):
                mine = numbers[id(table)]
                found[id(table)] = Fetched(mine, table.with_gradient(mine, rows))
        pairs = zip(self._layers, tables, strict=True)
        return {id(layer): found[id(table)] for layer, table in pairs}


def fetch_first(layer: keras.layers.Layer, split: Sequence[keras.layers.Embedding]) -> None:
    """Makes `FetchFirst` the ``call`` of each functional model in ``layer`` that looks up rows of
    several tables, or several times: of layers ``split``, whose tables are split."""
    for model in replicas.layers_of(layer):
        if "call" in vars(model):
            continue
        lookups = [(one, ids) for one in split for ids in ids_of(model, one)]
        if len(lookups) > 1:
            vars(model)["call"] = FetchFirst(model, lookups)


def ids_of(model: keras.Layer, layer: keras.layers.Embedding) -> list[Any]:
    """The symbols of the ids that ``layer`` looks up in a functional ``model``, of which they are
    all known before it runs. None if the layer is called elsewhere, too, or if ids may change
    between two calls with equal inputs."""
    if type(model).call.__qualname__ != "Functional.call":
        return []
    nodes = layer._inbound_nodes
    own = {id(node) for some in model._nodes_by_depth.values() for node in some}
    if not all(id(node) in own for node in nodes):
        return []
    found = [node.input_tensors[0] for node in nodes]
    before = keras.Model(model.input, found, name="ids").operations
    of_keras = all(type(one).__module__.startswith("keras.") for one in before)
    layers = [one for one in before if isinstance(one, keras.layers.Layer)]
    if any(one.variables or isinstance(one, keras.layers.Lambda) for one in layers):
        return []
    return found if of_keras and all("int" in ids.dtype for ids in found) else []


def unfetch(layer: keras.layers.Layer) -> None:
    """Gives ``layer`` the ``call`` of Keras again, if `fetch_first` has changed it."""
    if isinstance(vars(layer).get("call"), FetchFirst):
        del vars(layer)["call"]
