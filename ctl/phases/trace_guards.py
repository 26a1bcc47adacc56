"""Notices changes after a step was traced: its graph holds Python values as constants.

If the user changes a value between two calls, the step is traced again. A change that would have no
effect is refused. Plain values and containers are compared by value, other objects by identity. A
container that is empty at first is a record: it may grow without a new trace.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
from absl import logging

from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases.observer import Observer
from ctl.phases.options import options
from ctl.phases.tracked_state import has_state

# Attributes of a step that `TraceKey` holds, or that the loop sets.
_OURS = frozenset(
    ("observer", "bytes_per_pack", "jit_compile", "flops", "trace_guards", "tracked")
    + ("input_specs",)
)

# Attributes of a step that `TrainStep.build` uses, so later changes have no effect.
_FIXED = frozenset(
    (
        *("accumulate_steps", "ema_decay", "loss_scale", "on_nan", "jit_update"),
        *("strategy", "updater", "statistics"),
    )
)

_PLAIN = bool, int, float, complex, str, bytes, type(None)
# Objects that are compared by their attributes.
_ATTRIBUTES = types.SimpleNamespace, keras.optimizers.schedules.LearningRateSchedule
_MOST_ELEMENTS = 64  # of a container with values that are not plain


class TraceKey(NamedTuple):
    """Settings that may change between steps and that the graph of a step depends on."""

    observer: Observer
    bytes_per_pack: int
    jit_compile: bool | None
    version: int  # counts the changes of all other settings, see `TraceGuards`


class TraceGuards:
    """The Python values with which the graph of a step was traced.

    These are the attributes of the step; the public attributes with a plain value of its
    optimizers, its updater and each of its layers; and Keras schedules that are the rate of an
    optimizer. A change during a call comes from the step itself, and is accepted (`snapshot`).

    Args:
        step: a step that is ready to be traced.

    Attributes:
        version: number of changes so far.
        rates: learning rates of optimizers that have a schedule, by name, as `check_rate` first
            found them; empty if they are not known.
    """

    def __init__(self, step: Any):
        self.version = 0
        self.rates: dict[str, float] = {}
        self._records: dict[int, Any] = {}
        owners = {f"layer {layer.name}": layer for layer in replicas.layers_of(step.tracked.layer)}
        self._optimizers = {f"optimizer {o.name}": o for o in step.tracked.optimizers}
        self._scheduled: set[str] = set()  # names of optimizers whose rate is not used
        if hasattr(step, "updater"):
            applied = step.updater.optimizers()
            groups = zip(applied, step.updater.groups, strict=True)
            self._scheduled = {name for name, group in groups if group.schedule is not None}
            self._optimizers |= applied
            owners["updater"] = step.updater
        owners |= self._optimizers
        # For each owner, its attributes and the names of the compared ones.
        self._others = {
            what: (vars(owner), [n for n, v in vars(owner).items() if _is_option(n, v)])
            for what, owner in owners.items()
        }
        self.snapshot(step)
        if hasattr(step, "updater"):
            self.check_rate(step)

    def snapshot(self, step: Any) -> None:
        """Records the values with which the graph was traced. Call it after the graph has run."""
        self._seen = self._read(step)

    def version_for(self, step: Any) -> int:
        """Returns `version`, a new one if a value was changed since `snapshot`.

        Raises:
            UsageError: a change would have no effect.
        """
        now = self._read(step)
        if now == self._seen:
            return self.version
        changes = [*self._changes(step, self._seen, now)]
        for name, before, after, takes_effect in changes:
            if not takes_effect:
                raise UsageError(
                    f"{name} was changed from {_shown(before)} to {_shown(after)}, which would "
                    "have no effect: make a new step and loop"
                )
        self.version += 1
        self._seen = now
        logging.info("the step is traced again: changed %s", ", ".join(c[0] for c in changes))
        return self.version

    def check_rate(self, step: Any) -> None:
        """Refuses a new learning rate of an optimizer that has a schedule.

        Raises:
            UsageError: the rate differs from the rate at an earlier call.
        """
        updater = step.updater
        for (name, optimizer), group in zip(
            updater.optimizers().items(), updater.groups, strict=True
        ):
            variable = optimizer.learning_rate
            if group.schedule is None or not isinstance(variable, keras.Variable):
                continue
            rate = float(variable.value.numpy())
            if self.rates.setdefault(name, rate) != rate:
                raise UsageError(
                    f"{name}.learning_rate was set to {rate:g}, which has no effect, because it "
                    "has a schedule: change the schedule, or make the loop without one"
                )

    def _read(self, step: Any) -> tuple[dict[str, _Value], list[list[Any]], list[_Value]]:
        """Returns the attributes of the step, the compared attributes of other owners, and the rate
        of each optimizer: a variable or a schedule. Keras's public ``learning_rate`` would be the
        current number."""
        of_step = {n: _Value(v, self._records) for n, v in vars(step).items() if n not in _OURS}
        rates = [_Value(o._learning_rate, self._records) for o in self._optimizers.values()]
        return of_step, [[*map(of.get, names)] for of, names in self._others.values()], rates

    def _changes(self, step: Any, before: Any, now: Any) -> Iterator[tuple[str, Any, Any, bool]]:
        """Yields the name, the old and the new value of each change, and whether the change takes
        effect."""
        none = _Value(None, {})
        fixed = {name for name, value in options(type(step)).items() if value.fixed} | _FIXED
        for name in {**before[0], **now[0]}:
            old, new = (values[0].get(name, none) for values in (before, now))
            if old != new:
                stateful = has_state(old.of) or has_state(new.of)
                takes_effect = name not in fixed and not stateful
                yield f"{type(step).__name__}.{name}", old.of, new.of, takes_effect
        for (what, (_, names)), olds, news in zip(
            self._others.items(), before[1], now[1], strict=True
        ):
            for name, old, new in zip(names, olds, news, strict=True):
                if old is not new and old != new:
                    # An optimizer that is made with 0 or None may lack variables for a number.
                    numbers = all(type(v) in (int, float) and v != 0 for v in (old, new))
                    yield f"{what}.{name}", old, new, numbers
        for what, old_rate, new_rate in zip(self._optimizers, before[2], now[2], strict=True):
            if old_rate != new_rate:
                # A rate variable is in the checkpoints, so it must not appear or disappear.
                values = old_rate.of, new_rate.of
                stays = not any(isinstance(value, keras.Variable) for value in values)
                yield f"{what}.learning_rate", *values, stays and what not in self._scheduled


class _Value:
    """A value, and a copy of its elements if it is a container, up to a ``depth``.

    ``records`` holds, by id, the containers that were empty once. An empty ``value`` is added.
    """

    def __init__(self, value: Any, records: dict[int, Any], depth: int = 3):
        self.of = value
        self._elements: dict[Any, Any] | None = None
        self._is_record = False
        if isinstance(value, _PLAIN) or not depth:
            return
        if dataclasses.is_dataclass(value) or isinstance(value, _ATTRIBUTES):
            value = getattr(value, "__dict__", None)
        if not isinstance(value, tuple | list | dict | set | frozenset):
            return
        if not value:
            records[id(value)] = value
        self._is_record, few = records.get(id(value)) is value, len(value) <= _MOST_ELEMENTS
        if self._is_record and not few:
            return
        elements = value if isinstance(value, dict) else dict(enumerate(value))
        if isinstance(value, set | frozenset):
            elements = dict.fromkeys(value)
        if few:
            self._elements = {k: _Value(v, records, depth - 1) for k, v in elements.items()}
        elif all(isinstance(element, _PLAIN) for element in elements.values()):
            self._elements = dict(elements)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Value)
        if self.of is other.of:
            elements, other_elements = self._elements or {}, other._elements or {}
            grows = self._is_record and other._is_record and len(elements) != len(other_elements)
            return elements == other_elements or (grows and not has_state(self.of))
        if isinstance(self.of, _PLAIN):
            return type(self.of) is type(other.of) and self.of == other.of
        same = type(self.of) is type(other.of) and self._elements is not None
        return same and self._elements == other._elements


def _is_option(name: str, value: Any) -> bool:
    return name == "groups" or (name[0] != "_" and isinstance(value, _PLAIN))


def _shown(value: Any) -> str:
    if isinstance(value, keras.Variable):
        return "a number"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
