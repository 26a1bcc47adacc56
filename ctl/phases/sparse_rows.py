"""Embedding tables of which a step reads and writes only the rows that its batch looks up.

The gradient of a lookup stays a `tf.IndexedSlices`, the numbers of the rows and a gradient for
each, from the tape to the update. A dense gradient is as large as the table: so are the time of the
backward pass, the all-reduce and the update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.differences import names_of
from ctl.base.tf_internals import copy_here
from ctl.base.units import size_text
from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases.deferred import Deferred, Rule, rule_of, why_not_lazy
from ctl.phases.fetching import fetch_first, fetched, unfetch
from ctl.phases.optimizers import Here, optimizer_of, read_rows, slots_of, update_rows
from ctl.phases.server_shards import ServerShards, servers_of
from ctl.phases.shards import Shards, Split, Wanted, look_up
from ctl.phases.uninitialized import Uninitialized, in_stateless_scope
from ctl.reduce import densify, sum_rows

# Of a smaller table, a dense gradient costs less than to find the rows (benchmarks/README.md).
LEAST_BYTES = 4 << 20

# Phases that take or return gradients, which a user's may expect to be dense.
_OF_GRADIENTS = (
    *("__call__", "forward_backward", "loss_and_gradients", "backward", "reduce", "sum_gradients"),
    *("finite", "clip", "apply"),
)


class Table:
    """An embedding table that is trained by rows.

    Args:
        variable: of Keras; of a table that is split, with the rows of a replica.
        optimizer: of the variable, which is built.
        deferred: what its rows have missed; None if the optimizer moves no row without a gradient.
        shards: how its rows are split, over replicas or parameter servers; None if each replica has
            all of them.
        asynchronous: whether workers update it that do not wait for each other.

    Attributes:
        rows: number of rows of the whole table.
        parts: what a checkpoint holds for each variable of which a replica has a part, by its id.
        whole: of a table that is split, the same for the table, with all rows up to date.
    """

    def __init__(
        self,
        variable: keras.Variable,
        optimizer: keras.optimizers.Optimizer,
        deferred: Deferred | None,
        shards: Shards | ServerShards | None,
        asynchronous: bool,
    ):
        self.variable, self._optimizer = variable, optimizer
        self.deferred, self.shards = deferred, shards
        self.rows = shards.rows if shards else variable.shape[0]
        self.parts: dict[int, Split] = {}
        self.whole: Split | None = None
        self._asynchronous = asynchronous
        if isinstance(shards, ServerShards):
            for slot in slots_of(optimizer, variable):
                shards.add_slot(variable.value, slot)
        elif shards:
            self._from_outside = shards.from_outside(self.look_up)
        if shards:
            split = [variable.value, *slots_of(optimizer, variable)]
            split += [deferred.last] if deferred else []
            self.parts = {id(part): shards.split(part) for part in split}
            self.whole = self.parts[id(variable.value)]
        if isinstance(shards, Shards) and deferred:
            self.whole = shards.split(variable.value, self.read)
        if self.is_special:
            variable.__class__ = _Variable
            variable._table, variable._shape = self, (self.rows, *variable.shape[1:])

    @property
    def is_special(self) -> bool:
        """Whether the rows of the variable are not those that a reader means."""
        return bool(self.deferred or self.shards)

    @property
    def needs_all_replicas(self) -> bool:
        """Whether other replicas hold some of the rows."""
        return isinstance(self.shards, Shards)

    def read(self, places: tf.Tensor) -> tf.Tensor:
        """Rows of this replica's variable by their places in it, up to date. Of a table that is
        split over parameter servers, rows by their numbers."""
        if isinstance(self.shards, ServerShards):
            return self.shards.read(self.variable._value, places)
        if self.deferred:
            return self.deferred.read(places)[0]
        return copy_here(self.variable._value).sparse_read(places)

    def look_up(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows ``numbers`` [m] of the table, none of which is there twice. Of a table that
        is split, all replicas must call it."""
        if not self.needs_all_replicas:
            rows = self.read(tf.cast(numbers, tf.int64))
        elif _in_replica():
            (rows,) = look_up([self.wanted(tf.cast(numbers, tf.int64))])
        else:
            return self._from_outside(tf.cast(numbers, tf.int64))
        return self.with_gradient(numbers, rows)

    def wanted(self, numbers: tf.Tensor) -> Wanted:
        """Rows ``numbers`` of a table that is split, for `look_up` of `shards`."""
        shards: Any = self.shards
        return Wanted(shards, numbers, self.read)

    def with_gradient(self, numbers: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Returns ``rows``, whose gradient is that of rows ``numbers`` of this replica's table."""
        return _with_rows(copy_here(self.variable._value), numbers, rows)

    def updates(
        self, gradient: tf.IndexedSlices
    ) -> Iterator[tuple[tf.Variable, tf.IndexedSlices, Here]]:
        """Yields what `update` is called with, in the update context of the variable: rows of
        ``gradient``, none of which is there twice. There are several of a table that is split over
        parameter servers."""
        variable = self.variable.value
        if not isinstance(self.shards, ServerShards):
            yield variable, gradient, copy_here
            return
        for server, (part, rows) in enumerate(self.shards.of_servers(variable, gradient)):
            yield part, rows, functools.partial(self.shards.part, server=server)

    def update(self, optimizer: Any, gradient: tf.IndexedSlices, here: Here) -> None:
        """Updates rows with ``optimizer`` of `optimizers.with_rate`, see `updates`."""
        gradient = self.shards.own(gradient) if isinstance(self.shards, Shards) else gradient
        places, table = gradient.indices, self.variable
        if not self.deferred:
            rows = read_rows(table, self._optimizer, places, here)
            update_rows(optimizer, table, gradient, *rows, here, self._asynchronous)
            return
        update_rows(optimizer, table, gradient, *self.deferred.read(places))
        self.deferred.note_update(places, optimizer.learning_rate)

    def value(self) -> tf.Tensor:
        """All rows, up to date; writes nothing.

        Raises:
            UsageError: other workers hold some of them, or it is called in a step, where other
                replicas do.
        """
        if not self.whole:
            return self.deferred.value() if self.deferred else self.variable.value.value()
        if _in_replica():
            raise self.not_looked_up()
        return self.whole.all_rows()

    def not_looked_up(self) -> UsageError:
        """For a table that is split, and read in a step otherwise than by plain lookups."""
        where = "replicas" if self.needs_all_replicas else "parameter servers"
        return UsageError(
            f"{self.variable.path} is used other than by lookups, or looked up in a loop, and "
            f"split over the {where}: give embedding_plan=replicated "
            "(--embedding_plan=replicated)"
        )

    def bring_up_to_date(self) -> None:
        """Makes up for what rows have missed. Call it outside of a graph, on all workers."""
        if self.deferred:
            self.deferred.bring_up_to_date()

    def assign(self, value: tf.Tensor) -> None:
        """Sets all rows. All workers must call it."""
        self.bring_up_to_date()
        value = tf.cast(value, self.variable.value.dtype)
        (self.whole or self.variable.value).assign(value)

    def release(self) -> None:
        """Makes the variable again what Keras made. All workers must call it."""
        self.bring_up_to_date()
        self.variable.__class__ = keras.Variable
        del self.variable._table
        if self.shards:
            self.shards.unsplit(self.variable)


class Tables:
    """The embedding tables of a step whose gradients are rows. Their layers read only the rows that
    are looked up. Logs how each table of at least `LEAST_BYTES` is trained.

    Args:
        step: a `ctl.TrainStep` whose updater is made. By its ``sparse_rows``, tables of at least
            `LEAST_BYTES` are trained by rows if their optimizer moves no other row (``"auto"``),
            all are (``"on"``), or none is (``"off"``). With ``"lazy"``, all are, and rows without a
            gradient stay as they are, whatever the optimizer.
        shards: of the tables that are split, by the id of their Keras variable, see `split_tables`.

    Raises:
        UsageError: ``sparse_rows`` is ``"on"`` or ``"lazy"``, and a table cannot be trained by
            rows; or one that is split.
    """

    def __init__(self, step: Any, shards: Mapping[int, Shards | ServerShards]):
        self._room = 0  # steps for which all histories have room, at least
        self._of: dict[int, Table] = {}  # by the id of their tf.Variable
        by_way: dict[str, list[tuple[str, int]]] = {}
        split: list[keras.layers.Embedding] = []
        asynchronous = replicas.is_asynchronous(step.strategy)
        for variable, layers in tables_of(step):
            parts = shards.get(id(variable))
            if not parts and not _is_wanted(step, variable):
                continue
            optimizer = step.updater.group_of(variable).optimizer
            size = _bytes_of(variable) if parts is None else parts.bytes
            rule = rule_or_why(step, variable, layers)
            if isinstance(rule, str) and takes_all(step):
                setting = f"sparse_rows={step.sparse_rows}"
                raise UsageError(
                    f"layer {layers[0].name} cannot be trained by rows, because {rule}: leave "
                    f"{setting} (--{setting}) out"
                )
            way = f"dense, because {rule}" if isinstance(rule, str) else "by rows"
            way += ", lazily" if step.sparse_rows == "lazy" else ""
            where = "parameter servers" if asynchronous else "replicas"
            way += f", split over the {where}" if parts else ""
            by_way.setdefault(way, []).append((variable.path, size))
            if isinstance(rule, str):
                continue
            with step.strategy.scope():
                deferred = Deferred(variable, optimizer, rule, step.strategy) if rule else None
            table = Table(variable, optimizer, deferred, parts, asynchronous)
            self._of[id(variable.value)] = table
            for layer in layers:
                vars(layer)["call"] = _Lookup(layer)
            split += layers if table.needs_all_replicas else []
        fetch_first(step.tracked.layer, split)
        for way, tables in by_way.items():
            names, size = names_of([path for path, _ in tables]), sum(n for _, n in tables)
            logging.info("embeddings %s, %s: %s", names, size_text(size), way)

    @property
    def deferred(self) -> list[Deferred]:
        """Of the tables of which rows without a gradient move."""
        return [table.deferred for table in self if table.deferred]

    def __iter__(self) -> Iterator[Table]:
        return iter(self._of.values())

    def __contains__(self, variable: tf.Variable) -> bool:
        return id(variable) in self._of

    def __getitem__(self, variable: tf.Variable) -> Table:
        return self._of[id(variable)]

    @property
    def parts(self) -> dict[int, Split]:
        """What a checkpoint holds for each variable of which a replica has a part, by its id."""
        return {key: part for table in self for key, part in table.parts.items()}

    def gather(self, keep: bool, slots: bool = True) -> None:
        """Gathers the tables of which other workers hold rows, and their ``slots``, for a
        checkpoint or an export, if ``keep``. All workers must call it. Raises `PeerError`."""
        for table in self:
            for part in dict.fromkeys([table.whole, *(table.parts.values() if slots else [])]):
                if part:
                    part.gather(keep)

    def reserve(self, most: int) -> int:
        """Returns how many steps the next call may run, ``most`` at most. Call it before each call:
        where a history is full, it brings all rows of a table up to date.

        Raises:
            UsageError: a step that was built later has taken a table over.
        """
        for table in self:
            owner: Any = table.variable
            if table.is_special and vars(owner).get("_table") is not table:
                raise UsageError(
                    f"{owner.path} belongs to a step that was made later: make a new step and loop "
                    "for this model, or leave sparse_rows=on out"
                )
        if not self.deferred:
            return most
        if self._room < 1:
            self._room = min(deferred.make_room() for deferred in self.deferred)
        most = min(most, self._room)
        self._room -= most
        return most

    def restored(self) -> None:
        """The variables of ``deferred`` have other values now."""
        self._room = 0

    def check(self, jit_compile: bool | None) -> None:
        """Raises `UsageError` if something was changed since the step was built with which a table
        cannot be trained by rows."""
        for deferred in self.deferred:
            deferred.check()
        if jit_compile and self._of:
            raise UsageError(
                "embedding tables are trained by rows, which XLA cannot compile: leave jit_compile "
                "out, or give sparse_rows=off (--sparse_rows=off)"
            )

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
            if self[variable].shards:
                raise self[variable].not_looked_up()
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
        shapes = [(self[v].rows, v.shape[1]) for v in tables.values()]
        sums = sum_rows([gradients[i] for i in tables], shapes, options=options)
        of_table = dict(zip(tables, sums, strict=True))
        return [of_table.get(i, gradient) for i, gradient in enumerate(gradients)]


@contextlib.contextmanager
def split_tables(step: Any) -> Iterator[dict[int, Shards | ServerShards]]:
    """Takes over the tables of ``step``'s model from an earlier step. With
    ``embedding_plan="sharded"``, splits those that ``sparse_rows`` wants by rows over the replicas,
    or the parameter servers; with ``"auto"``, those that the plan says, or over parameter servers
    those that can be split. The other tables that wait for values get them. If something is raised
    inside, they become whole again. All workers must call it.

    Yields:
        how a table is split, by the id of its Keras variable.

    Raises:
        UsageError: such a table cannot be split.
    """
    for layer in replicas.layers_of(step.tracked.layer):
        unfetch(layer)
        if isinstance(layer, keras.layers.Embedding) and layer.built:
            _release(layer)
    shards: dict[int, Shards | ServerShards] = {}
    tables = tables_of(step) if step.embedding_plan != "replicated" else []
    servers = servers_of(step.strategy)
    where = "parameter servers" if servers else "replicas"
    try:
        for variable, layers in tables:
            if not _is_wanted_split(step, variable, layers):
                continue
            if why := _why_not_split(step, variable, layers):
                also = f", and leave sparse_rows={step.sparse_rows} out" if takes_all(step) else ""
                raise UsageError(
                    f"layer {layers[0].name} cannot be split over the {where}, because {why}: give "
                    f"embedding_plan=replicated (--embedding_plan=replicated){also}"
                )
            if not servers:
                shards[id(variable)] = Shards(variable, step.strategy)
            elif variable.shape[0] >= servers > 1:
                shards[id(variable)] = ServerShards(variable, step.strategy)
        if step.embedding_plan == "sharded" and not shards:
            logging.warning("embedding_plan=sharded splits no table: %s", _why_none(step, tables))
        for layer in replicas.layers_of(step.tracked.layer):
            if isinstance(table := getattr(layer, "_embeddings", None), Uninitialized):
                table.initialize()  # outside of the strategy's scope, which needs more memory
        yield shards
    except BaseException:
        for variable, _ in tables:
            if isinstance(variable, _Variable):
                variable._table.release()
            elif parts := shards.get(id(variable)):
                parts.unsplit(variable)
        raise


def _bytes_of(table: keras.Variable) -> int:
    return table.shape.num_elements() * tf.as_dtype(table.dtype).size


def _is_wanted(step: Any, table: keras.Variable) -> bool:
    """Whether ``sparse_rows``, or the plan, wants ``table`` to be trained by rows, if it can be."""
    if step.table_plan:
        return table.path in _planned(step, "by rows", "split")
    large = _bytes_of(table) >= LEAST_BYTES
    return takes_all(step) or (large and step.sparse_rows == "auto")


def _is_wanted_split(step: Any, table: keras.Variable, layers: Sequence[Any]) -> bool:
    """Whether ``embedding_plan``, which is not ``"replicated"``, wants ``table`` to be split."""
    servers, wanted = servers_of(step.strategy), _is_wanted(step, table)
    if step.embedding_plan == "sharded":
        return wanted and (servers > 0 or step.strategy.num_replicas_in_sync > 1)
    if not servers:
        return table.path in _planned(step, "split")
    return wanted and not _why_not_split(step, table, layers)


def _why_not_split(step: Any, table: keras.Variable, layers: Sequence[Any]) -> str | None:
    """Why ``table`` cannot be split, or its optimizer does not train it by rows; None if it can."""
    rule = rule_or_why(step, table, layers)
    return why_whole(step, step.strategy, table, layers) or (
        rule if isinstance(rule, str) else None
    )


def takes_all(step: Any) -> bool:
    """Whether ``sparse_rows`` asks for all tables, or an error."""
    return step.sparse_rows in ("on", "lazy")


def rule_for(
    step: Any, optimizer: keras.optimizers.Optimizer, table: keras.Variable
) -> Rule | str | None:
    """As `rule_of`; with ``sparse_rows="lazy"``, rows that have no gradient do not move."""
    if step.sparse_rows == "lazy":
        return why_not_lazy(optimizer)
    rule = rule_of(optimizer, table)
    if isinstance(rule, Rule) and replicas.is_asynchronous(step.strategy):
        return (
            f"{type(optimizer).__name__} moves rows that have no gradient, which cannot be made up "
            "for where workers do not wait for each other; with sparse_rows=lazy "
            "(--sparse_rows=lazy), they stay"
        )
    return rule


def rule_or_why(
    step: Any, table: keras.Variable, layers: Sequence[keras.layers.Embedding]
) -> Rule | str | None:
    """How the optimizer of ``table`` moves rows that have no gradient, None if it does not; or why
    ``table`` is not trained by rows."""
    if why := why_dense(step, step.strategy, table, layers):
        return why
    optimizer = optimizer_of(step.optimizer, table)
    rule = rule_for(step, optimizer, table)
    if isinstance(rule, Rule) and step.sparse_rows == "auto":
        return (
            f"{type(optimizer).__name__} moves rows that have no gradient, which sparse_rows=on "
            "defers (--sparse_rows=on)"
        )
    return rule


def _planned(step: Any, *ways: str) -> set[str]:
    """The paths of the tables for which ``embedding_plan="auto"`` has chosen one of ``ways``."""
    return {one.name for one in step.table_plan if one.how in ways}


def tables_of(step: Any) -> list[tuple[keras.Variable, list[keras.layers.Embedding]]]:
    """The tables that ``step`` trains, with their layers."""
    trained = {id(variable) for variable in step.model.trainable_variables}
    found: dict[int, list[keras.layers.Embedding]] = {}
    for layer in replicas.layers_of(step.tracked.layer):
        embeds = isinstance(layer, keras.layers.Embedding) and layer.built
        if embeds and id(layer._embeddings) in trained:
            found.setdefault(id(layer._embeddings), []).append(layer)
    return [(layers[0]._embeddings, layers) for layers in found.values()]


def _release(layer: keras.layers.Embedding) -> None:
    """Makes a layer, and its table, again what Keras made them."""
    if isinstance(vars(layer).get("call"), _Lookup):
        del vars(layer)["call"]
    if isinstance(variable := layer._embeddings, _Variable):
        variable._table.release()


def why_whole(
    step: Any,
    strategy: tf.distribute.Strategy,
    table: keras.Variable,
    layers: Sequence[keras.layers.Embedding],
) -> str | None:
    """Why ``table`` of ``layers`` cannot be split; None if it can be, or its optimizer decides."""
    if step.accumulate_steps > 1 and not replicas.is_asynchronous(strategy):
        return "micro-batches run in a loop, in which TensorFlow has no collectives of replicas"
    if optimizer_of(step.optimizer, table).built:
        return "its optimizer was built before the step, with the whole table"
    return why_dense(step, strategy, table, layers)


def _why_none(step: Any, tables: Sequence[Any]) -> str:
    servers = servers_of(step.strategy)
    if (servers or step.strategy.num_replicas_in_sync) == 1:
        return f"there is one {'parameter server' if servers else 'replica'}"
    if not tables or step.sparse_rows == "off":
        return "none is trained by rows"
    least = size_text(LEAST_BYTES)
    return f"none has {least}; sparse_rows=on (--sparse_rows=on) takes smaller ones, too"


def why_dense(
    step: Any,
    strategy: tf.distribute.Strategy,
    table: keras.Variable,
    layers: Sequence[keras.layers.Embedding],
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
    if replicas.shares_variables(strategy):
        return "the strategy keeps one copy of each variable"
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return "the device is a TPU"
    for method in _OF_GRADIENTS:
        if step.overrides(method):
            return f"{type(step).__name__}.{method}() may expect a dense gradient"
    return None


class _Lookup:
    """The ``call`` of an Embedding that reads the rows of its ids, and not the table."""

    def __init__(self, layer: keras.layers.Embedding):
        self._layer, self._call = layer, layer.call

    @property
    def _table(self) -> Table | None:
        """The table, if its variable has not the rows that a reader means."""
        return vars(self._layer._embeddings).get("_table")

    @property
    def is_split(self) -> bool:
        return self._table is not None and self._table.shards is not None

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """While inside, the layer and its table are as Keras made them, with all rows up to date.
        Call it outside of a graph. Raises `UsageError` as `Table.value` does."""
        variable, table = self._layer._embeddings, self._table
        kept = variable._value
        if table:
            variable._value = tf.Variable(table.value(), name=kept.name.removesuffix(":0"))
            variable.__class__ = keras.Variable
        del vars(self._layer)["call"]
        try:
            yield
        finally:
            vars(self._layer)["call"] = self
            if table:
                variable.__class__, variable._value = _Variable, kept

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        plain = isinstance(inputs, tf.Tensor | tf.RaggedTensor)  # no symbols, no sparse tensors
        if not plain or in_stateless_scope():
            return self._call(inputs, *args, **options)
        return tf.ragged.map_flat_values(self._rows, inputs)

    @property
    def split_table(self) -> Table | None:
        """The table, if it is split, and all replicas are here to look up rows."""
        here = self.is_split and _in_replica() and not in_stateless_scope()
        return self._table if here else None

    def numbers(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows that ``ids`` mean to Keras."""
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        return tf.where(ids < 0, ids + self._layer.input_dim, ids)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        layer, variable, ids = self._layer, self._layer._embeddings, self.numbers(ids)
        is_remote = replicas.is_asynchronous(tf.distribute.get_strategy())
        # Keras casts the public `value` where it casts by itself.
        plain = copy_here(variable._value).sparse_read
        if self._table is None and not is_remote:
            return tf.cast(plain(ids), layer.compute_dtype)
        if rows := fetched(layer):
            rows = rows.look_up(tf.cast(tf.reshape(ids, [-1]), tf.int64))
        else:  # each row once
            numbers, places = tf.unique(tf.reshape(ids, [-1]))
            look_up = self._table.look_up if self._table else plain
            rows = tf.gather(look_up(numbers), places)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), variable._value.shape[1:]], 0))
        rows = tf.ensure_shape(rows, [*ids.shape, *variable._value.shape[1:]])
        return tf.cast(rows, layer.compute_dtype)


def _in_replica() -> bool:
    """Whether this is the code of a replica of a strategy."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _with_rows(variable: tf.Variable, numbers: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns ``rows``, whose gradient is that of rows ``numbers`` of ``variable``."""

    @tf.custom_gradient
    def with_gradient(numbers: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        variable.sparse_read([0])  # by this, TensorFlow knows the variable

        def gradient(upstream: Any, variables: Sequence[tf.Variable]) -> Any:
            of, shape = numbers, variable.shape.as_list()
            if isinstance(upstream, tf.IndexedSlices):  # of those that a gather has read
                upstream, of = upstream.values, tf.gather(numbers, upstream.indices)
            return (None, None), [tf.IndexedSlices(upstream, of, tf.constant(shape))]

        return tf.identity(rows), gradient

    return with_gradient(numbers, rows)


@tf.custom_gradient
def _with_value(table: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Returns ``value``, and gives its gradient to ``table``."""
    return value, lambda upstream: (upstream, None)


class _Variable(keras.Variable):
    """A table whose rows are up to date, and all there, for whoever reads it as a whole. Those of
    its ``value``, the `tf.Variable`, may not be."""

    _table: Table

    def numpy(self) -> np.ndarray:
        return self._table.value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        if in_stateless_scope():
            return super().__tf_tensor__(dtype, name)
        value = self._table.value()
        if not self._table.shards:
            value = _with_value(tf.convert_to_tensor(self._value), value)
        return tf.cast(value, dtype or self.dtype, name=name)

    def _direct_assign(self, value: Any) -> None:
        self._table.assign(value)


def _on_all_rows(name: str) -> Any:
    """The operator of Keras's variable of this ``name``, which would take its ``value``."""

    def operator(self: _Variable, *others: Any) -> tf.Tensor:
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return operator


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "abs", "getitem"):
    setattr(_Variable, f"__{_name}__", _on_all_rows(f"__{_name}__"))
