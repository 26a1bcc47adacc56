"""Which embedding tables are dense, by rows or split: ``embedding_plan="auto"``.

A table that is split costs more bytes on the wire than one by rows, because its rows are fetched,
too. So tables are split only if they and their optimizer's variables do not fit in memory, the
largest first. A table is trained by rows if they are fewer bytes on the wire than its dense
gradient. The speed of the link changes none of this: everything moves over the same link.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.tf_internals import gpu_memory_limits
from ctl.base.units import size_text
from ctl.data.global_batches import read_again
from ctl.distributed import workers
from ctl.distributed.replicas import devices_of, is_asynchronous
from ctl.phases.fetching import ids_of
from ctl.phases.optimizers import optimizer_of, slots_of
from ctl.phases.plan.plan import TableWay, lines_of
from ctl.phases.sparse_rows import (
    LEAST_BYTES,
    rule_for,
    tables_of,
    takes_all,
    why_dense,
    why_whole,
)
from ctl.phases.tracked_state import put_back
from ctl.phases.uninitialized import Uninitialized

_SHARE = 0.8  # of the memory that is available, which tables may take
_CGROUP = Path("/sys/fs/cgroup")


class _Looked(NamedTuple):
    """How many rows of a table the replicas look up in one batch; of each, the most of a replica.

    Attributes:
        each: numbers to fetch: distinct rows of each lookup, or of all that are fetched together.
        own: of the rows to fetch for any replica, those that the replica has if the table is split.
        rows: distinct rows of all lookups.
    """

    each: int
    own: int
    rows: int


def plan_tables(step: Any, strategy: tf.distribute.Strategy, dataset: Any) -> None:
    """Decides how each embedding table of ``step`` is trained, if its ``embedding_plan`` is
    ``"auto"``; sets its ``table_plan`` and logs it. All workers must call it, before the step is
    built. Reads a batch of ``dataset``, if that takes little time, and computes the ids that it
    looks up. Raises `PeerError`."""
    if step.embedding_plan != "auto" or is_asynchronous(strategy):
        return  # parameter servers split all that can be, see `split_tables`
    order = {id(variable): n for n, variable in enumerate(step.model.trainable_variables)}
    tables = sorted(tables_of(step), key=lambda table: order[id(table[0])])
    if not tables:
        return
    of_tables = {id(variable) for variable, _ in tables}
    others = [v.value for v in step.tracked.layer.variables if id(v) not in of_tables]
    with put_back(strategy, [*others, *step.tracked.raw_variables]):  # a layer may count
        found = _looked_up(step, dataset, strategy.num_replicas_in_sync, tables)
    mine = json.dumps([found, _available(strategy)]).encode()
    texts = workers.all_gather(strategy, mine, "planning the embedding tables")
    every = [json.loads(text) for text in texts]
    looked: dict[str, _Looked | None] = {}
    for variable, _ in tables:  # by the worker with the most
        known = [_Looked(*of[variable.path]) for of, _ in every if of and variable.path in of]
        looked[variable.path] = _Looked(*map(max, zip(*known, strict=True))) if known else None
    held = sum(_size(table) for table, _ in tables if not isinstance(table, Uninitialized))
    held *= len(devices_of(strategy))
    memory = held + int(_SHARE * min(available for _, available in every))
    step.table_plan = _decide(step, strategy, tables, looked, memory)
    for line in lines_of(step.table_plan):
        logging.info("%s", line)


def _decide(
    step: Any,
    strategy: tf.distribute.Strategy,
    tables: Sequence[tuple[keras.Variable, list[Any]]],
    looked: dict[str, _Looked | None],
    memory: int,
) -> tuple[TableWay, ...]:
    """``memory``: bytes of a worker that all tables may take, with their slots."""
    count, local = strategy.num_replicas_in_sync, len(devices_of(strategy))
    ways: list[TableWay] = []
    for variable, layers in tables:
        rows, width = variable.shape
        size = _size(variable)
        optimizer, seen = optimizer_of(step.optimizer, variable), looked[variable.path]
        rule = why_dense(step, strategy, variable, layers) or rule_for(step, optimizer, variable)
        of_row = size // rows + 4  # with its number
        dense = 2 * (count - 1) * size // count
        sent = (count - 1) * seen.rows * of_row if seen else None
        by_rows = takes_all(step) or (
            step.sparse_rows == "auto"
            and rule is None
            and size >= LEAST_BYTES
            and (sent is None or count == 1 or sent < dense)
        )
        by_rows &= not isinstance(rule, str)
        kept = size * (1 + _slots(optimizer)) + (4 * rows if by_rows and rule else 0)
        how, wire = ("by rows", sent) if by_rows else ("dense", dense)
        ways.append(TableWay(variable.path, rows, width, how, wire, local * kept))
    for number in sorted(range(len(ways)), key=lambda number: -ways[number].memory_bytes):
        one, seen = ways[number], looked[ways[number].name]
        fits = sum(way.memory_bytes for way in ways) <= memory
        if fits or one.how == "dense" or count == 1 or one.rows < count:
            continue
        if why_whole(step, strategy, *tables[number]):
            continue
        part = one.memory_bytes * -(-one.rows // count) // one.rows
        of_row = one.width * tf.as_dtype(tables[number][0].dtype).size
        more = (count - 1) * (seen.each * 4 + seen.own * of_row) if seen else None
        wire = None if more is None or one.wire_bytes is None else one.wire_bytes + more
        ways[number] = dataclasses.replace(one, how="split", wire_bytes=wire, memory_bytes=part)
    if sum(way.memory_bytes for way in ways) > memory:
        logging.warning(
            "embedding tables and their optimizer's variables may not fit in %s of memory: use "
            "more workers, or sparse_rows=on (--sparse_rows=on), which lets more tables be split",
            size_text(max(0, memory)),
        )
    return tuple(ways)


def _size(table: keras.Variable) -> int:
    return table.shape[0] * table.shape[1] * tf.as_dtype(table.dtype).size


def _slots(optimizer: keras.optimizers.Optimizer) -> int:
    """The number of variables as large as the table that ``optimizer`` has for one."""
    like = type(optimizer).from_config(optimizer.get_config())
    small = keras.Variable(np.zeros([1, 1], "float32"))
    like.build([small])
    return sum(slot.shape == small.shape for slot in slots_of(like, small))


def _available(strategy: tf.distribute.Strategy) -> int:
    """Bytes of memory of this worker that nothing uses, of all its replicas together. Of GPUs, what
    TensorFlow may take."""
    if "GPU" in devices_of(strategy)[0].upper():
        return min(gpu_memory_limits()) * len(devices_of(strategy))
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
        limit = int((_CGROUP / "memory.max").read_text("ascii"))
        free = min(free, limit - int((_CGROUP / "memory.current").read_text("ascii")))
    return free


def _looked_up(
    step: Any, dataset: Any, count: int, tables: Sequence[tuple[keras.Variable, list[Any]]]
) -> dict[str, _Looked] | None:
    """What a batch looks up, by the path of the table; None if that is not known."""
    size = dataset.global_batch_size
    arrays = getattr(dataset, "arrays", None)
    if arrays is not None:
        total = len(tf.nest.flatten(arrays)[0])
        some = np.sort(np.random.default_rng(0).permutation(total)[:size])
        batch = tf.nest.map_structure(lambda array: tf.constant(np.asarray(array)[some]), arrays)
    else:
        batch = read_again(dataset, 1)
    if not isinstance(batch, tuple | list) or not size:
        return None
    found: dict[str, _Looked] = {}
    try:
        with _recorded(tables) as ids:
            step.model(step.preprocess(batch[0]), training=False)
    except Exception as error:  # of a model that takes something else
        logging.info("what a batch looks up is not known: %r", error)
        return None
    for variable, layers in tables:
        lookups = ids[variable.path]
        parts = [np.array_split(one, max(1, round(len(one) * count / size))) for one in lookups]
        joined = [np.concatenate([*map(np.ravel, some)]) for some in zip(*parts, strict=True)]
        if lookups and all(ids_of(step.model, layer) for layer in layers):  # fetched together
            lookups, parts = [np.concatenate(joined)], [joined]
        each = [sum(len(np.unique(one)) for one in some) for some in zip(*parts, strict=True)]
        rows = [len(np.unique(one)) for one in joined]
        bounds = [number * variable.shape[0] // count for number in range(count + 1)]
        own = sum(np.histogram(np.unique(one), bounds)[0] for one in lookups)
        found[variable.path] = _Looked(*(int(np.max(x, initial=0)) for x in (each, own, rows)))
    return found


@contextlib.contextmanager
def _recorded(
    tables: Sequence[tuple[keras.Variable, list[Any]]],
) -> Iterator[dict[str, list[np.ndarray]]]:
    """Inside, the layers of ``tables`` note their ids, [n, ...], and return zeros."""
    found: dict[str, list[np.ndarray]] = {variable.path: [] for variable, _ in tables}

    def noting(layer: Any, noted: list[np.ndarray]) -> Callable[..., Any]:
        def call(ids: Any) -> Any:
            ids = tf.convert_to_tensor(ids.to_tensor(0) if hasattr(ids, "to_tensor") else ids)
            noted.append(ids.numpy())
            return tf.zeros([*ids.shape, layer.output_dim], layer.compute_dtype)

        return call

    own = {layer: vars(layer).get("call") for _, layers in tables for layer in layers}
    for variable, layers in tables:
        for layer in layers:
            vars(layer)["call"] = noting(layer, found[variable.path])
    try:
        yield found
    finally:
        for layer, call in own.items():
            vars(layer).pop("call")
            if call is not None:
                vars(layer)["call"] = call
