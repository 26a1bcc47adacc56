"""Embedding tables whose rows are split over parameter servers.

Server s of n holds rows ``s * rows // n`` to ``(s + 1) * rows // n``, and those of the optimizer's
slots. Only rows that a batch looks up are sent. A table is whole where Keras makes it, on one
server, and on the coordinator, which evaluates a copy, saves and exports.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from ctl.base.tf_internals import count_of_servers
from ctl.distributed.replicas import is_asynchronous
from ctl.phases.shards import Split, check_inside


def servers_of(strategy: tf.distribute.Strategy) -> int:
    """The number of parameter servers; 0 with another strategy."""
    return count_of_servers(strategy) if is_asynchronous(strategy) else 0


class ServerShards:
    """Splits ``table``. Its variable has the rows of the first server from then on.

    Args:
        table: of Keras, [rows, width], with as many rows as servers at least. Its optimizer is not
            built.
        strategy: in whose scope ``table`` was made.

    Attributes:
        rows: number of rows of the whole table.
        bytes: size of the whole table.
        bounds: first and last (exclusive) row of each server.
    """

    def __init__(self, table: keras.Variable, strategy: tf.distribute.Strategy):
        whole, count = table._value, servers_of(strategy)
        self._strategy, self.rows = strategy, table.shape[0]
        self.bytes = table.shape.num_elements() * tf.as_dtype(table.dtype).size
        starts = [number * self.rows // count for number in range(count + 1)]
        self.bounds = list(zip(starts, starts[1:], strict=False))
        self._parts: dict[int, list[tf.Variable]] = {}  # by the id of the first
        name = whole.name.removesuffix(":0")
        with strategy.scope():  # which takes the servers in turn
            parts = [
                tf.Variable(whole.sparse_read(tf.range(*bounds)), name=name)
                for bounds in self.bounds
            ]
        self._parts[id(parts[0])] = parts
        table._value, table._shape = parts[0], tuple(parts[0].shape)

    def add_slot(self, table: tf.Variable, slot: tf.Variable) -> None:
        """Splits a ``slot`` of the optimizer, which was built with the first part of ``table``. All
        rows of a new slot are equal."""
        parts, name = [slot], slot.name.removesuffix(":0")
        for part in self._parts[id(table)][1:]:
            with self._strategy.scope(), self._strategy.extended.colocate_vars_with(part):
                parts.append(tf.Variable(tf.repeat(slot[:1], part.shape[0], 0), name=name))
        self._parts[id(slot)] = parts

    def part(self, variable: tf.Variable, server: int) -> tf.Variable:
        """The part of ``variable``, the table or a slot, that ``server`` holds."""
        return self._parts[id(variable)][server]

    def read(self, variable: tf.Variable, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows ``numbers`` [m] of the whole ``variable``, the table or a slot."""
        with tf.control_dependencies([check_inside(numbers, self.rows)]):
            owner = self._owner(numbers)
        order = tf.range(tf.size(numbers))
        orders = tf.dynamic_partition(order, owner, len(self.bounds))
        places = tf.dynamic_partition(numbers - self._first(owner), owner, len(self.bounds))
        parts = zip(self._parts[id(variable)], places, strict=True)
        return tf.dynamic_stitch(orders, [part.sparse_read(its) for part, its in parts])

    def of_servers(
        self, variable: tf.Variable, gradient: tf.IndexedSlices
    ) -> Iterator[tuple[tf.Variable, tf.IndexedSlices]]:
        """Yields the part of ``variable`` of each server, and those rows of ``gradient`` that it
        holds, by their places in the part."""
        owner = self._owner(gradient.indices)
        places = gradient.indices - self._first(owner)
        each = [tf.dynamic_partition(x, owner, len(self.bounds)) for x in (gradient.values, places)]
        for part, values, its in zip(self._parts[id(variable)], *each, strict=True):
            yield part, tf.IndexedSlices(values, its)

    def _owner(self, numbers: tf.Tensor) -> tf.Tensor:
        starts = np.array([start for start, _ in self.bounds[1:]], numbers.dtype.as_numpy_dtype)
        return tf.searchsorted(starts, numbers, side="right")

    def _first(self, owner: tf.Tensor) -> tf.Tensor:
        return tf.gather(np.array([start for start, _ in self.bounds], np.int64), owner)

    def unsplit(self, table: keras.Variable) -> None:
        """Makes ``table`` whole again, on one server."""
        parts = self.split(table._value)
        with self._strategy.scope():
            table._value = tf.Variable(parts.value(), name=parts.name.removesuffix(":0"))
        table._shape = tuple(table._value.shape)

    def split(self, variable: tf.Variable) -> ServerSplit:
        """What stands for ``variable``, the table or a slot, in the state of a checkpoint."""
        return ServerSplit(self._parts[id(variable)])


class ServerSplit(Split):
    """See `Split`; of a variable whose ``parts`` are on parameter servers."""

    def __init__(self, parts: list[tf.Variable]):
        self._parts = parts
        self.name, self.dtype = parts[0].name, parts[0].dtype
        self.shape = tf.TensorShape([sum(part.shape[0] for part in parts), *parts[0].shape[1:]])
        self.slice = ""  # the coordinator restores all rows

    def gather(self, keep: bool) -> None:
        """The coordinator, which saves, can read all parts."""

    def value(self) -> tf.Tensor:
        return tf.concat([part.value() for part in self._parts], 0)

    def all_rows(self) -> tf.Tensor:
        return self.value()

    def assign_first(self, rows: tf.Tensor, more: tf.Tensor | None = None) -> None:
        rest = self.value()[len(rows) :]
        self.assign(tf.concat([rows, rest if more is None else tf.zeros_like(rest) + more], 0))

    def assign(self, rows: tf.Tensor) -> None:
        for part in self._parts:
            part.assign(rows[: part.shape[0]])
            rows = rows[part.shape[0] :]
