"""Embedding tables whose rows are split over all replicas, so that none holds a whole table.

Replica r of n holds rows ``r * rows // n`` to ``(r + 1) * rows // n``. The variable has as many
rows on each replica, and maybe one too many. A lookup asks all replicas for the rows that any of
them needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl.base.tf_internals import copy_here
from ctl.distributed import workers
from ctl.errors import UsageError
from ctl.phases.uninitialized import Uninitialized
from ctl.reduce import Read, fetch_rows

_ROWS_AT_A_TIME = 1 << 16  # of each replica, that a gather for a checkpoint moves


class Shards:
    """Splits ``table``, which is whole on every replica or has no values yet, see
    `ctl.phases.uninitialized`. All workers must make one.

    Args:
        table: of Keras, [rows, width]. Its optimizer is not built.
        strategy: in whose scope ``table`` was made.

    Attributes:
        strategy: that strategy.
        rows: number of rows of the whole table.
        bytes: size of the whole table.
        most: number of rows of the variable.
        bounds: first and last (exclusive) row of each replica.
        here: those of the replicas of this worker.

    Raises:
        UsageError: there are fewer rows than replicas.
    """

    def __init__(self, table: keras.Variable, strategy: tf.distribute.Strategy):
        self.strategy, self.rows = strategy, table.shape[0]
        count, whole = strategy.num_replicas_in_sync, table._value
        late = isinstance(table, Uninitialized)
        if self.rows < count:
            raise UsageError(
                f"{table.path} has {self.rows} rows for {count} replicas: leave "
                "embedding_plan=sharded (--embedding_plan=sharded) out"
            )
        self.bytes = table.shape.num_elements() * tf.as_dtype(table.dtype).size
        starts = [number * self.rows // count for number in range(count + 1)]
        self.bounds = list(zip(starts, starts[1:], strict=False))
        self.most = max(end - start for start, end in self.bounds)
        local = len(strategy.extended.worker_devices)
        worker = workers.cluster_of(strategy).index if workers.is_multi_worker(strategy) else 0
        self.here = self.bounds[worker * local :][:local]
        with workers.own_initial_values(strategy):
            # An update does not know its replica, so each has its bounds in a variable.
            self._own = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="bounds")
            name = table.value_name if late else whole.name.removesuffix(":0")
            part = tf.Variable(tf.zeros([self.most, *table.shape[1:]], table.dtype), name=name)
        for copy, bounds in zip(self.copies(self._own), self.here, strict=True):
            copy.assign(bounds)
        if late:
            table.become(part, self.here)
        else:
            self.split(part).assign(self.copies(whole)[0].value())
        table._value, table._shape = part, tuple(part.shape)

    def unsplit(self, table: keras.Variable) -> None:
        """Makes ``table`` whole again on every replica. All workers must call it."""
        parts = self.split(table._value)
        parts.gather(keep=True)
        with self.strategy.scope():
            table._value = tf.Variable(parts.value(), name=parts.name.removesuffix(":0"))
        table._shape = tuple(table._value.shape)

    def split(self, variable: tf.Variable, read: Read | None = None) -> Split:
        """What stands for ``variable``, with rows of a replica, in the state of a checkpoint."""
        return Split(self, variable, read)

    def copies(self, variable: tf.Variable | tf.Tensor) -> Sequence[tf.Variable | tf.Tensor]:
        """Those of the replicas of this worker."""
        return self.strategy.experimental_local_results(variable)

    def own(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """Those rows of ``gradient`` that this replica holds, by their places in its variable. Call
        it in an update context."""
        first, end = tf.unstack(copy_here(self._own).value())
        mine = (gradient.indices >= first) & (gradient.indices < end)
        places = tf.boolean_mask(gradient.indices, mine) - first
        return tf.IndexedSlices(tf.boolean_mask(gradient.values, mine), places)

    def from_outside(self, look_up: Read) -> Read:
        """Returns ``look_up``, which all replicas must call, for code outside of
        `tf.distribute.Strategy.run`. Raises as `require_one_worker`."""
        on_replicas = self.on_replicas(look_up)

        def looked_up(numbers: tf.Tensor) -> tf.Tensor:
            self.require_one_worker()
            return self.copies(on_replicas(numbers))[0]

        return looked_up

    def on_replicas(self, read: Read) -> Callable[[tf.Tensor], Any]:
        """Returns a function of places, or numbers, that gives them to ``read`` on each replica. It
        is traced when it is first called."""

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
        def run(rows: tf.Tensor) -> Any:
            return self.strategy.run(read, args=(rows,))

        traced = functools.cache(run.get_concrete_function)  # which does not warn of retracing
        return lambda rows: traced()(rows)

    def require_one_worker(self) -> None:
        """Raises `UsageError` if other workers hold rows: they may not ask at the same time."""
        if workers.is_multi_worker(self.strategy):
            raise UsageError(
                "an embedding table is split over several workers, so only a step or a "
                "ctl.Evaluator can call the model, and nothing else can read it: load a checkpoint "
                "into another model, with ctl.checkpoint.load_weights"
            )


class Wanted(NamedTuple):
    """Rows of a table that this replica needs.

    Attributes:
        shards: how the table is split.
        numbers: of the rows, int64 [m]. m may differ between replicas.
        read: reads this replica's rows.
    """

    shards: Shards
    numbers: tf.Tensor
    read: Read


def look_up(wanted: Sequence[Wanted]) -> list[tf.Tensor]:
    """Returns rows of tables of one width and type, [m, d] for each, in one `fetch_rows`. Call it
    on all replicas, in replica context.

    On the way, the tables are one: first all rows of replica 0, table by table, then those of
    replica 1, and so on.
    """
    bounds = np.array([one.shards.bounds for one in wanted])  # [tables, replicas, 2]
    starts, sizes = bounds[..., 0], bounds[..., 1] - bounds[..., 0]
    ends = np.cumsum(sizes.T).reshape(sizes.T.shape).T  # [tables, replicas], in the one table
    first, total = ends - sizes, int(ends[-1, -1])
    numbers = []
    for (shards, its, _), start, place in zip(wanted, starts, first, strict=True):
        with tf.control_dependencies([check_inside(its, shards.rows)]):
            owner = tf.searchsorted(start[1:], its, side="right")
        numbers.append(its + tf.gather(place - start, owner))
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.gather(np.append(first[0], total), replica + tf.range(2))
    places = tf.gather(first.T - first[0][:, np.newaxis], replica)  # of the tables in its part

    def read(part: tf.Tensor) -> tf.Tensor:
        table = tf.searchsorted(places[1:], part, side="right")
        part -= tf.gather(places, table)
        each = tf.dynamic_partition(part, table, len(wanted))
        return tf.concat([one.read(rows) for one, rows in zip(wanted, each, strict=True)], 0)

    rows = fetch_rows(tf.concat(numbers, 0), read, own, total)
    return tf.split(rows, tf.stack([tf.size(its) for its in numbers]), num=len(wanted))


def check_inside(numbers: tf.Tensor, rows: int) -> tf.Operation:
    outside = tf.boolean_mask(numbers, (numbers < 0) | (numbers >= rows))
    # In the words of TensorFlow, which `local_batch.translate_graph_checks` knows.
    said = tf.strings.format(f"indices[0] = {{}} is not in [0, {rows})", tf.reduce_max(outside))
    return tf.debugging.Assert(tf.equal(tf.size(outside), 0), [said])


class Split:
    """One variable in the state of a checkpoint, for a variable of which each replica has a part.

    Args:
        shards: how it is split.
        variable: [m, ...]; of a replica, its rows.
        read: what is saved; by default, the rows of ``variable``.

    Attributes:
        shape: of the whole.
        slice: which rows this worker restores, as TensorFlow's checkpoints name them.
    """

    def __init__(self, shards: Shards, variable: tf.Variable, read: Read | None = None):
        self._shards, self._variable = shards, variable
        self._on_replicas = shards.on_replicas(read or self._plain)
        self._is_plain = read is None
        self._gathered: np.ndarray | None = None
        self.name, self.dtype = variable.name, variable.dtype
        self.shape = tf.TensorShape([shards.rows, *variable.shape[1:]])
        self._first, end = shards.here[0][0], shards.here[-1][1]
        sizes = " ".join(map(str, self.shape))
        others = ":-" * (self.shape.rank - 1)
        self.slice = f"{sizes} {self._first},{end - self._first}{others}"

    def _plain(self, places: tf.Tensor) -> tf.Tensor:
        return copy_here(self._variable).sparse_read(places)

    def gather(self, keep: bool) -> None:
        """Gathers the rows of all workers, which must all call it, for the next `value`, if
        ``keep``. With one worker, there is nothing to do. Raises `PeerError`."""
        shards, self._gathered = self._shards, None
        if not workers.is_multi_worker(shards.strategy):
            return
        whole = np.empty(self.shape if keep else [], self.dtype.as_numpy_dtype)
        for first in range(0, shards.most, _ROWS_AT_A_TIME):
            places = tf.range(first, min(first + _ROWS_AT_A_TIME, shards.most), dtype=tf.int64)
            parts = self._on_replicas(places)
            rows = workers.gather(shards.strategy, parts, "gathering an embedding table").numpy()
            each = np.split(rows, len(shards.bounds)) if keep else []
            for part, (start, end) in zip(each, shards.bounds, strict=keep):
                here = whole[start + first : end]
                here[: len(part)] = part[: len(here)]
        self._gathered = whole if keep else None

    def value(self) -> tf.Tensor:
        """All rows, if there is one worker or they were gathered. Else those of this worker."""
        rows, self._gathered = self._gathered, None
        if rows is not None:
            return tf.constant(rows)
        if self._is_plain:
            parts = [copy.value() for copy in self._shards.copies(self._variable)]
        else:
            places = tf.range(self._shards.most, dtype=tf.int64)
            parts = [*self._shards.copies(self._on_replicas(places))]
        pairs = zip(parts, self._shards.here, strict=True)
        return tf.concat([part[: end - start] for part, (start, end) in pairs], axis=0)

    def all_rows(self) -> tf.Tensor:
        """All rows, also as they were gathered. Raises as `Shards.require_one_worker`."""
        if self._gathered is None:
            self._shards.require_one_worker()
        return self.value()

    def numpy(self) -> np.ndarray:
        return self.value().numpy()

    def assign_first(self, rows: tf.Tensor, more: tf.Tensor | None = None) -> None:
        """Takes the first ``rows``. The others stay as they are, or become ``more``."""
        copies = self._shards.copies(self._variable)
        for copy, (start, _) in zip(copies, self._shards.here, strict=True):
            mine = rows[start : start + self._shards.most]
            rest = copy.value()[len(mine) :]
            rest = rest if more is None else tf.zeros_like(rest) + more
            copy.assign(tf.concat([mine, rest], 0))

    def assign(self, rows: tf.Tensor) -> None:
        """Takes the rows of ``slice``, or all of them."""
        first = 0 if rows.shape[0] == self._shards.rows else self._first
        copies = self._shards.copies(self._variable)
        for copy, (start, end) in zip(copies, self._shards.here, strict=True):
            rest = [[0, self._shards.most - (end - start)]] + [[0, 0]] * (self.shape.rank - 1)
            copy.assign(tf.pad(rows[start - first : end - first], rest))
