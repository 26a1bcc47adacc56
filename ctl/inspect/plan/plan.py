"""What a step moves between replicas, as data: the only place that knows the form of a plan.

Everything is frozen, so that a test can say what a step must do::

    (collective,) = step.plan().collectives
    assert collective.bytes == 4 * parameters

Imports no TensorFlow: plans are read back where there is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any

from ctl.errors import UsageError

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Member:
    """One tensor of a collective.

    Attributes:
        variables: paths of what it ends up in: the weight whose gradient it is, or a moving
            statistic. Empty for what is not assigned, such as the number of valid examples.
        shape: -1 where it is not known while tracing; None when even the rank is not.
        bytes: None when the shape is not known.
    """

    variables: tuple[str, ...]
    shape: tuple[int, ...] | None
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communication between replicas, on all of their devices together.

    Attributes:
        name: ``pack0``, … for what `ctl.reduce` moves; else the scope of the operation.
        purpose: ``gradients``, ``forward`` and ``backward`` (a layer that reduces, such as a
            synchronized BatchNorm), ``has data`` (whether a worker's data have ended), ``loss``
            (what is reported once for each call from Python), or ``other``.
        kind: the type of the operation in TensorFlow's graph. ``AddN`` and ``ConcatV2`` are those
            whose inputs are on several devices.
        ops: how many operations of the graph this is, over all devices of this process.
        dtype: of the payload.
        shape: of one replica's payload, flat for a pack; as in `Member`.
        bytes: of one replica's payload.
        group_size: replicas that take part.
        group_key: TensorFlow's number of the group; None where it has none.
        hint: ``ring``, ``nccl`` or ``auto``; empty where the graph itself does the reducing.
        timeout: seconds; 0 is for ever; None where the operation has none.
        devices: of this process, in order.
        in_loop: it runs once a step; otherwise once for each call from Python.
        after: names of the communications that must have ended before.
        members: what is packed into it; empty for gathers.
        again: names of those that reduce the same gradients a second time.
        start_share: the share of the backward pass that must be done before it can start, in
            [0, 1]; None for what is not a gradient.
        full_share: the same for all of its operations. It differs from ``start_share`` where each
            gradient is summed by an operation of its own.
        share_by: what the shares are counted in: ``flops`` of matrix products and convolutions, or
            ``ops`` where there are none.
        wire_bytes: what the busiest replica sends; None when not known. For a ring of n this is
            2(n-1)/n·bytes (Patarasuk and Yuan 2009, section 3); where one device sums for all, what
            it sends to the others.
        sparse: it moves rows of a sparse gradient.
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
    """An all-reduce as XLA would run it.

    Attributes:
        name: of the operation that it comes from; of several, of one of them.
        payloads: how many all-reduces of the step it is.
        bytes: of one replica's payloads together.
    """

    name: str
    payloads: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Lint:
    """Something that costs time or is wrong, see `ctl.inspect.plan.lints`."""

    name: str
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one step moves.

    Attributes:
        strategy: the name of the class.
        replicas: in all workers together.
        workers: processes.
        collectives: those that reduce gradients, in the order in which they run.
        other: all other communication.
        lints: what to look at; empty for a sensible step.
        notes: what could not be shown, and why.
        xla: the all-reduces of the step under XLA; None when it was not asked.
    """

    strategy: str
    replicas: int
    workers: int
    collectives: tuple[Collective, ...]
    other: tuple[Collective, ...]
    lints: tuple[Lint, ...] = ()
    notes: tuple[str, ...] = ()
    xla: tuple[Fused, ...] | None = None

    @property
    def fingerprint(self) -> str:
        """sha256, hexadecimal, of what all workers must agree on: each communication's kind, type,
        shape, group and members, in order, not its name. Workers that differ in it sum tensors that
        do not belong together, in silence."""
        rows = [
            [c.kind, c.ops, c.dtype, c.shape, c.group_size, c.hint, c.in_loop]
            + [[m.variables, m.shape] for m in c.members]
            for c in (*self.collectives, *self.other)
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def facts(self) -> dict[str, str]:
        """What all workers must agree on, by name, in words: see `ctl.workers.check_agreement`."""
        return {
            **{
                f"all-reduce {number}": f"{c.purpose}: {len(c.members)} tensors, {c.dtype} "
                f"{'of unknown size' if c.shape is None else list(c.shape)}"
                for number, c in enumerate((*self.collectives, *self.other))
            },
            "the plan of all of them": self.fingerprint[:12],
        }

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads it back."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            **json.loads(json.dumps(dataclasses.asdict(self))),
        }


def from_json(value: Any) -> Plan:
    """The plan that `Plan.to_json` wrote.

    Raises:
        UsageError: it is not such a plan, or of another version of ctl.
    """
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UsageError(f"not a plan of this version of ctl (schema {SCHEMA})")
    known = {field.name for field in dataclasses.fields(Plan)}
    plan = _read(Plan, {key: item for key, item in value.items() if key in known}, "plan")
    if plan.fingerprint != value.get("fingerprint"):
        raise UsageError("the plan does not match its fingerprint: it was changed")
    return plan


def _read(wanted: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``wanted``: a dataclass, a tuple, a union, or a plain type."""
    arguments = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(wanted):
        hints = typing.get_type_hints(wanted)
        if not isinstance(value, dict) or set(value) != set(hints):
            raise UsageError(f"{where} has not the fields of a {wanted.__name__}")
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
