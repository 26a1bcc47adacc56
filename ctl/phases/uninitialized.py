"""Embedding tables that get their values when they are first read, or by a loop: some rows at a
time, and of a table that is split, only those that a replica holds.

Keras's initializers give a whole table, and need several times its memory. TensorFlow's random
numbers are a function of a counter, so that rows in the middle can be drawn alone, with equal bits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.distributed import replicas, workers

_ELEMENTS_AT_A_TIME = 1 << 19
_DRAWN_AT_ONCE = 4  # elements for each value of the counter; TensorFlow leaves 256 for truncated
_RANDOM: dict[type, tuple[Callable[..., tf.Tensor], int]] = {
    keras.initializers.RandomUniform: (tf.raw_ops.StatelessRandomUniformV2, 1),
    keras.initializers.RandomNormal: (tf.raw_ops.StatelessRandomNormalV2, 1),
    keras.initializers.TruncatedNormal: (tf.raw_ops.StatelessTruncatedNormalV2, 256),
}
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones)


@contextlib.contextmanager
def uninitialized_tables() -> Iterator[None]:
    """Inside, a `keras.layers.Embedding` that is made gets the values of its table later: when the
    table is first read, or when a `ctl.Loop` is made. A loop that splits it over replicas makes
    only the rows that each of them holds, so the whole table need not fit in memory. The values
    have the same bits.

    Use it in the strategy's scope, around the code that makes the model. Tables whose initializer
    is not RandomUniform (Keras's default), RandomNormal or TruncatedNormal, with an integer or no
    seed, Zeros or Ones, or that are not float32, are made at once. So are all with strategies that
    keep one copy of each variable.
    """
    plain = keras.layers.Embedding.build

    def build(layer: keras.layers.Embedding, input_shape: Any = None) -> None:
        initializer = layer.embeddings_initializer
        if layer.built or not _can_wait(layer):
            plain(layer, input_shape)
            return
        layer.embeddings_initializer = lambda shape, dtype=None: tf.zeros([0, *shape[1:]], dtype)
        try:
            plain(layer, input_shape)
        finally:
            layer.embeddings_initializer = initializer
        table = layer._embeddings
        name = table.name if table._value is None else table._value.name  # None: in a symbolic call
        table.__class__, table._value, table._initializer = Uninitialized, None, initializer
        table.strategy, table.value_name = tf.distribute.get_strategy(), name.partition(":")[0]

    keras.layers.Embedding.build = build
    try:
        yield
    finally:
        keras.layers.Embedding.build = plain


def _can_wait(layer: keras.layers.Embedding) -> bool:
    """Whether the rows of the table of ``layer`` can be drawn one by one, and later."""
    initializer = layer.embeddings_initializer
    seed = getattr(initializer, "seed", 0)
    known = type(initializer) in (*_RANDOM, *_CONSTANT) and isinstance(seed, int)
    plain = type(layer) is keras.layers.Embedding and not layer.lora_rank
    of_float = layer.variable_dtype == "float32" and not layer.quantization_mode
    strategy = tf.distribute.get_strategy()
    shared = replicas.has_one_copy(strategy) or isinstance(strategy, tf.distribute.TPUStrategy)
    return known and 0 <= seed < 1 << 31 and plain and of_float and not shared


def values_of(
    variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy | None = None
) -> list[tf.Variable]:
    """The values of ``variables``, but for tables that have none yet; with ``strategy``, only if
    they were made in its scope."""

    def is_waiting(variable: keras.Variable) -> bool:
        return isinstance(variable, Uninitialized) and strategy in (None, variable.strategy)

    return [variable.value for variable in variables if not is_waiting(variable)]


class Uninitialized(keras.Variable):
    """A table of `uninitialized_tables`, until it has values.

    Attributes:
        strategy: in whose scope it was made.
        value_name: name of the `tf.Variable` that it will have.
    """

    strategy: tf.distribute.Strategy
    value_name: str
    _initializer: Any

    @property
    def value(self) -> Any:
        if not in_stateless_scope():  # where Keras asks for shapes
            self.initialize()
        return keras.Variable.value.fget(self)

    @property
    def nameplate(self) -> tf.Variable:
        """A variable of the name that the value will have, without rows."""
        return tf.Variable(tf.zeros([0]), name=self.value_name)

    def _direct_assign(self, value: Any) -> None:
        self.initialize()
        self.assign(value)

    def _deferred_initialize(self) -> None:
        """Keras calls it after a symbolic call, of which it leaves the variables without values."""

    def initialize(self) -> None:
        """Gives all rows their values, on every replica."""
        context = tf.distribute.get_replica_context()
        if context and tf.distribute.has_strategy():  # all replicas come here at once
            context.merge_call(lambda strategy: self._initialize())
        else:
            self._initialize()

    def _initialize(self) -> None:
        strategy, shape = self.strategy, self._shape
        with tf.init_scope():
            with workers.own_initial_values(strategy):
                whole = tf.Variable(tf.zeros(shape, self._dtype), name=self.value_name)
            copies = strategy.experimental_local_results(whole)
            self.become(whole, [(0, shape[0])] * len(copies))

    def become(self, value: tf.Variable, bounds: Sequence[tuple[int, int]]) -> None:
        """Takes ``value``, [m, d], for its value. Gives each copy of it on this worker the rows of
        ``bounds``, first and last (exclusive). All workers must call it."""
        self._take_seed_of_first_worker()
        copies = self.strategy.experimental_local_results(value)
        for one, (start, end) in zip(copies, bounds, strict=True):
            for first, rows in self._rows(start, end):
                places = tf.range(first - start, first - start + len(rows))
                one.scatter_update(tf.IndexedSlices(rows, places))  # a slice copies all rows
        self.__class__ = keras.Variable
        self._value, self._initializer = value, None

    def _take_seed_of_first_worker(self) -> None:
        """Makes all workers draw the values that the first one draws."""
        if not workers.is_multi_worker(self.strategy) or isinstance(self._initializer, _CONSTANT):
            return
        with self.strategy.scope():  # of a variable, TensorFlow gives all workers the first's value
            seed = tf.Variable(self._initializer.seed, dtype=tf.int64, trainable=False, name="seed")
        self._initializer = copy.copy(self._initializer)
        self._initializer.seed = int(self.strategy.experimental_local_results(seed)[0])

    def _rows(self, start: int, end: int) -> Iterator[tuple[int, tf.Tensor]]:
        """Rows ``start`` to ``end`` as the initializer makes them, some at a time, and the number
        of the first of them."""
        width, group = self._shape[1], _DRAWN_AT_ONCE
        step = max(group, _ELEMENTS_AT_A_TIME // width // group * group)
        for first in range(start // group * group, end, step):
            rows = self._draw(first, min(first + step, end) - first)
            skipped = max(start - first, 0)
            yield first + skipped, rows[skipped:]

    def _draw(self, first: int, count: int) -> tf.Tensor:
        """Rows ``first``, a multiple of `_DRAWN_AT_ONCE`, to ``first + count``."""
        made_by, shape = self._initializer, (count, self._shape[1])
        if isinstance(made_by, _CONSTANT):
            return made_by(shape, dtype=self._dtype)
        draw, skip = _RANDOM[type(made_by)]
        start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[made_by.seed, 0])
        low, high = (int(half) for half in start.counter.numpy())
        counter = low + (high << 64) + first * shape[1] // _DRAWN_AT_ONCE * skip
        halves = np.array([counter & (1 << 64) - 1, counter >> 64 & (1 << 64) - 1], np.uint64)
        method = tf.raw_ops.StatelessRandomGetAlg()
        drawn = draw(shape=shape, key=start.key, counter=halves, dtype=self._dtype, alg=method)
        if isinstance(made_by, keras.initializers.RandomUniform):
            least, most = tf.constant(made_by.minval), tf.constant(made_by.maxval)
            return drawn * (most - least) + least
        return drawn * made_by.stddev + made_by.mean


def in_stateless_scope() -> bool:
    """Whether variables have other values here, as in `keras.Model.stateless_call`."""
    with keras.StatelessScope() as scope:
        return scope.original_scope is not None
