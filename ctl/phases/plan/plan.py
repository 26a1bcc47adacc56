"""A plan: what a step moves between replicas, as frozen dataclasses.

A test can state what a step must do::

    (collective,) = loop.plan().collectives
    assert collective.bytes == 4 * parameters

Imports no TensorFlow, so that plans can be read without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Sequence
from typing import Any

from ctl.base.units import size_text
from ctl.errors import UsageError

SCHEMA = 1

# Kinds of collectives that give each replica the tensors of all. The last is one within a process.
GATHERS = frozenset(("CollectiveGather", "CollectiveGatherV2", "ConcatV2"))


@dataclasses.dataclass(frozen=True)
class Member:
    """One tensor of a collective.

    Attributes:
        variables: paths of the variables that it ends up in: the weight whose gradient it is, or a
            moving statistic. Empty if it is not assigned, such as the number of valid examples.
        shape: -1 for a dimension that is unknown while tracing; None for an unknown rank.
        bytes: its size; None if the shape is not fully known.
    """

    variables: tuple[str, ...]
    shape: tuple[int, ...] | None
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communication between replicas, over all of their devices.

    Attributes:
        name: ``pack0``, … for the packs of `ctl.reduce`; otherwise the scope of the operation.
        purpose: ``gradients``; ``forward`` or ``backward`` (a layer that reduces, such as a
            synchronized BatchNorm); ``has data`` (whether a worker's data have ended); ``loss``
            (reported once for each call from Python); or ``other``.
        kind: the type of the operation in TensorFlow's graph. ``AddN`` and ``ConcatV2`` communicate
            if their inputs are on several devices.
        ops: the number of operations in the graph, over all devices of this process.
        dtype: the name of the payload's type, such as ``float32``.
        shape: of one replica's payload, flat for a pack; as in `Member`.
        bytes: the size of one replica's payload; None if unknown.
        group_size: the number of replicas that take part.
        group_key: TensorFlow's number of the group; None if it has none.
        hint: ``ring``, ``nccl`` or ``auto``; empty if the operation is not a collective.
        timeout: seconds; 0 means no limit; None if the operation has no such attribute.
        devices: those of this process, sorted.
        in_loop: True if it runs once a step, False if once for each call from Python.
        after: names of the communications that it waits for directly.
        members: the tensors in it; empty for gathers.
        again: names of the communications that reduce the same gradients a second time.
        start_share: the share of the backward pass, in [0, 1], that must be done before its first
            operation can start; None unless ``purpose`` is ``gradients``.
        full_share: the share that must be done before all of its operations can start. It differs
            from ``start_share`` if an operation of its own sums each gradient.
        share_by: the unit of the shares: ``flops`` of matrix products and convolutions, or ``ops``
            if there are none.
        wire_bytes: bytes that the busiest replica sends; None if unknown. In a ring of n replicas
            these are 2(n-1)/n·bytes (Patarasuk and Yuan 2009, section 3), and (n-1)·bytes for a
            gather. If one device sums for all, they are its copies to the others.
    """

    name: str
    purpose: str
    kind: str
    ops: int
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None
    group_size: int
    group_key: int | None
    hint: str
    timeout: float | None
    devices: tuple[str, ...]
    in_loop: bool
    after: tuple[str, ...]
    members: tuple[Member, ...]
    again: tuple[str, ...]
    start_share: float | None
    full_share: float | None
    share_by: str
    wire_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Fused:
    """One all-reduce as XLA would run it.

    Attributes:
        name: of the operation that it comes from, or of one of them.
        payloads: the number of all-reduces of the step that it combines.
        bytes: the total size of one replica's payloads.
    """

    name: str
    payloads: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Lint:
    """A finding that is wrong or costs time, see `ctl.phases.plan.lints`.

    Attributes:
        name: of the kind of finding.
        reason: what was found, and what it costs.
        remedy: what to try.
    """

    name: str
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class TableWay:
    """How ``embedding_plan="auto"`` trains an embedding table, see `ctl.phases.table_plan`.

    Attributes:
        name: the path of its variable.
        rows, width: its shape.
        how: ``dense``, ``by rows``, or ``split``, by rows.
        wire_bytes: bytes that the busiest replica sends for it in a step, for a batch of the data;
            None if no batch could be read.
        memory_bytes: of it and its optimizer's variables, of all replicas of a worker together.
    """

    name: str
    rows: int
    width: int
    how: str
    wire_bytes: int | None
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one step moves.

    Attributes:
        strategy: the name of the strategy's class.
        replicas: the number of replicas of all workers together.
        workers: the number of processes.
        collectives: the communications that reduce gradients, in the order in which they run.
        other: all other communications.
        lints: findings; empty for a sensible step.
        notes: what could not be determined, and why.
        xla: the all-reduces of the step under XLA; None if XLA was not asked or could not tell.
        tables: how the embedding tables are trained, if that was planned.
    """

    strategy: str
    replicas: int
    workers: int
    collectives: tuple[Collective, ...]
    other: tuple[Collective, ...]
    lints: tuple[Lint, ...] = ()
    notes: tuple[str, ...] = ()
    xla: tuple[Fused, ...] | None = None
    tables: tuple[TableWay, ...] = ()

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that all workers must agree on.

        It covers kind, type, shape, group and members of each communication, in order, but not its
        name. Workers that differ in it would silently sum unrelated tensors.
        """
        rows = [
            [c.kind, c.ops, c.dtype, c.shape, c.group_size, c.hint, c.in_loop]
            + [[m.variables, m.shape] for m in c.members]
            for c in (*self.collectives, *self.other)
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def facts(self) -> dict[str, str]:
        """What all workers must agree on, as name -> text; see `ctl.workers.check_agreement`."""
        return {
            **{
                f"all-reduce {number}": f"{c.purpose}: {len(c.members)} tensors, {c.dtype} "
                f"{'of unknown size' if c.shape is None else list(c.shape)}"
                for number, c in enumerate((*self.collectives, *self.other))
            },
            "the plan of all of them": self.fingerprint[:12],
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` reads it back."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            **json.loads(json.dumps(dataclasses.asdict(self))),
        }


def lines_of(tables: Sequence[TableWay]) -> list[str]:
    """The plan of ``tables`` as lines of text, with a head; none without tables."""
    cells = [("embeddings", "rows x width", "how", "sent a step", "memory of a worker")]
    for one in tables:
        sent, kept = size_text(one.wire_bytes), size_text(one.memory_bytes)
        cells.append((one.name, f"{one.rows} x {one.width}", one.how, sent, kept))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return lines if tables else []


def from_json(value: Any) -> Plan:
    """The plan that `Plan.to_json` wrote.

    Raises:
        UsageError: ``value`` is not a plan, has another schema, or does not match its fingerprint.
    """
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UsageError(f"not a plan of this version of ctl (schema {SCHEMA})")
    known = {field.name for field in dataclasses.fields(Plan)}
    plan = _read(Plan, {key: item for key, item in value.items() if key in known}, "plan")
    if plan.fingerprint != value.get("fingerprint"):
        raise UsageError("the plan was changed: it does not match its fingerprint")
    return plan


def _read(wanted: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``wanted``: a dataclass, a tuple, a union, or a plain type."""
    arguments = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        hints = typing.get_type_hints(wanted)
        if not isinstance(value, dict) or set(value) != set(hints):
            raise UsageError(f"{where} does not have the fields of a {wanted.__name__}")
        return wanted(
            **{key: _read(hints[key], item, f"{where}.{key}") for key, item in value.items()}
        )
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where} is not a list")
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UsageError(f"{where} is not of type {wanted.__name__}")
    return value
