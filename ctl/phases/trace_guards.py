"""Notices changes after a step was traced: its graph holds Python values as constants.

If the user changes a value between two calls, the step is traced again, but back to earlier plain
values it finds their trace. A change that would have no effect is refused. Plain values and
containers are compared by value, other objects by identity. A container that is empty at first is a
record: it may grow without a new trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import logging

from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.phases.observer import Observer
from ctl.phases.options import options
from ctl.phases.tracked_state import has_state

# Attributes of a step that `TraceKey` holds, or that the loop sets.
_OURS = frozenset(
    ("observer", "bytes_per_pack", "jit_compile", "flops", "trace_guards", "tracked")
    + ("input_specs", "returns_outputs", "has_weights", "broadcasts")
)

# Attributes of a step that a checkpoint holds in another way, see `ctl.control.state`.
_IN_CHECKPOINTS = frozenset(("trainable_mask", "jit_by_rule"))

# Attributes of a step that `TrainStep.build` uses, so later changes have no effect.
_FIXED = frozenset(
    (
        *("accumulate_steps", "ema_decay", "loss_scale", "on_nan", "jit_update", "sparse_rows"),
        *("embedding_plan", "table_plan", "strategy", "updater", "statistics", "tables"),
    )
)

_PLAIN = bool, int, float, complex, str, bytes, type(None)
_CONTAINERS = tuple, list, dict, set, frozenset
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, types.MethodType
_COMPARED = (*_PLAIN, *_CONTAINERS, *_FUNCTIONS)
_RULES = keras.regularizers.Regularizer, keras.constraints.Constraint  # of a layer's variables
# Objects that are compared by their attributes.
_ATTRIBUTES = (
    types.SimpleNamespace,
    keras.optimizers.schedules.LearningRateSchedule,
    *_RULES,
)
# Methods of a step that a trace runs.
_PHASES = (
    *("preprocess", "loss", "count", "forward", "backward", "loss_and_gradients"),
    *("forward_backward", "reduce", "sum_gradients", "finite", "clip", "apply"),
    *("update_metrics", "outcome", "__call__"),
)
# Attributes of a variable that its layer sets when it is built.
_OF_VARIABLES = "regularizer", "constraint"
# Attributes of an optimizer that say which variables have no weight decay.
_EXCLUDED = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
_MOST_ELEMENTS = 64  # of a container with values that are not plain


class TraceKey(NamedTuple):
    """Settings that may change between steps and that the graph of a step depends on."""

    observer: Observer
    bytes_per_pack: int
    jit_compile: bool | None
    version: int  # of all other settings, see `TraceGuards`


class TraceGuards:
    """The Python values with which the graph of a step was traced.

    These are

    * the attributes of the step, and plain values of its classes that the user's phases read;
    * plain values and containers in globals and closures that the user's phases, loss, layers, and
      functions that these name, read;
    * of its optimizers, its updater and layers of Keras, public attributes that are plain values or
      functions; of layers of the user's, private ones and containers, too;
    * regularizers and constraints of its variables, variables without weight decay, and Keras
      schedules that are the rate of an optimizer.

    Not compared are elements of arrays, attributes of modules and other objects, and what methods
    of other objects read. A change during a call comes from the step itself, and is accepted
    (`snapshot`).

    Args:
        step: a step that is ready to be traced.

    Attributes:
        version: number of the values as they are now; equal values have the same number.
        retraced_for: names of what was changed before the last new version.
        rates: learning rates of optimizers that have a schedule, by name, as `check_rate` first
            found them; empty if they are not known.
    """

    def __init__(self, step: Any):
        self.version = self._versions = 0
        self._earlier: dict[int, _Read] = {}  # values of other versions, the latest last
        self.retraced_for = ""
        self.rates: dict[str, float] = {}
        self._records: dict[int, Any] = {}
        self._set_by_code: set[str] = set()
        self._set_by_calls: set[str] = set()  # of the step; not set by the user since
        self._seen: _Read
        self._start: _Read | None = None  # what the program has set, before the first call
        self._lost: list[str] = []  # what a restore could not change
        parts = replicas.layers_of(step.tracked.layer)[::-1]  # from the first to the last
        layers = {f"layer {name}": layer for name, layer in replicas.numbered(parts)}
        self._layers = {what: layer for what, layer in layers.items() if _is_users(type(layer))}
        self._variables = replicas.numbered(step.tracked.layer.trainable_variables, "path")
        owners: dict[str, Any] = dict(layers)
        optimizers = replicas.numbered(step.tracked.optimizers)
        self._optimizers = {f"optimizer {name}": optimizer for name, optimizer in optimizers}
        self._scheduled: set[str] = set()  # names of optimizers whose rate is not used
        if hasattr(step, "updater"):
            applied = step.updater.optimizers()
            groups = zip(applied, step.updater.groups, strict=True)
            self._scheduled = {name for name, group in groups if group.schedule is not None}
            self._optimizers |= applied
            owners["updater"] = step.updater
        owners |= self._optimizers
        self._owners = {**owners, type(step).__name__: step}
        self._owners |= {f"class {k.__name__}": k for k in type(step).__mro__ if _is_users(k)}
        # For each owner, its attributes and the names of the compared ones.
        self._others = {
            what: (vars(owner), [n for n, v in vars(owner).items() if _is_option(n, v)])
            for what, owner in owners.items()
            if what not in self._layers and not isinstance(owner, keras.Model)
        }
        for what in layers.keys() & self._others.keys():
            self._others[what][1].extend(("call", "_dtype_policy"))
        for what in self._optimizers:
            self._others[what][1].extend(_EXCLUDED)
        self.snapshot(step)
        if hasattr(step, "updater"):
            self.check_rate(step)

    def snapshot(self, step: Any, *, ran: bool = False) -> None:
        """Records the values with which the graph was traced. Call it after the graph has run.

        With ``ran``, values of the user's code that have changed since the last call are those that
        the trace itself sets, as that of an evaluation may do. They are not compared any more.
        """
        now = self._read(step)
        if ran:
            old, new = self._seen.code, now.code
            changed = {n for n in old | new if n not in old or n not in new or old[n] != new[n]}
            self._set_by_code |= changed
            now = now._replace(code={n: v for n, v in new.items() if n not in changed})
            if self._seen.of_step != now.of_step:
                of_step = self._seen._replace(of_step=now.of_step)
                self._set_by_calls |= {c.name for c in self._changes(step, self._seen, of_step)}
        self._seen = now

    def version_for(self, step: Any) -> int:
        """Returns `version`, another one if a value was changed since `snapshot`.

        Raises:
            UsageError: a change would have no effect.
        """
        now = self._read(step)
        self._start = self._start or now
        if self._lost:
            self._require_changed(step, now)
        if now == self._seen:
            return self.version
        changes = [*self._changes(step, self._seen, now)]
        if not changes:  # only names with None have come or gone
            self._seen = now
            return self.version
        for change in changes:
            if not change.takes_effect:
                before, after = _shown(change.before.of), _shown(change.after.of)
                raise UsageError(
                    f"{change.name} was changed from {before} to {after}, which would have no "
                    "effect: make a new step and loop"
                )
        self.version = self._version_of(step, now, changes)
        self._seen = now
        return self.version

    def _version_of(self, step: Any, now: _Read, changes: list[_Change]) -> int:
        """Returns an earlier version if ``now`` has its values, else a new one."""
        self._earlier.pop(self.version, None)
        self._earlier[self.version] = self._seen
        self._set_by_calls -= {change.name for change in changes}
        if not all(value.is_plain for c in changes for value in (c.before, c.after)):
            self._earlier.clear()  # when an object comes back, other values may be inside
        for version, read in reversed(self._earlier.items()):
            if self._set_by_calls.issuperset(c.name for c in self._changes(step, read, now)):
                return version
        self.retraced_for = ", ".join(c.name for c in changes)
        logging.info("the step is traced again: changed %s", self.retraced_for)
        self._versions += 1
        return self._versions

    def changed(self, step: Any) -> dict[str, Any]:
        """What a checkpoint must hold: the values that the user has changed since the first call,
        by name, as JSON ``[before, now]``. None stands for what cannot be saved, with a warning."""
        found: dict[str, Any] = {}
        for change in self._changes_by_user(step):
            fits = self._owner(change.name) and _fits_json(change.before, change.after)
            found[change.name] = [change.before.then(), change.after.then()] if fits else None
        if lost := [name for name, values in found.items() if values is None]:
            logging.warning(
                "the checkpoint cannot hold what %s was changed to: a run that resumes must change "
                "it again after restore()",
                ", ".join(lost),
            )
        return found

    def restore(self, step: Any, saved: Mapping[str, Any], at: int) -> None:
        """Sets the values of `changed`, as a checkpoint of step ``at`` holds them.

        If the program now begins with another value than the run did, it keeps that value, with a
        warning. What the checkpoint does not hold must be changed before the next call.
        """
        self._start = self._start or self._read(step)
        changed = {change.name: change for change in self._changes_by_user(step)}
        self._lost = [name for name, values in saved.items() if values is None]
        for name in [name for name in {**saved, **changed} if name not in self._lost]:
            owner, attribute = self._owner(name), name.rpartition(".")[2]
            if owner is None:
                logging.warning("%s stays as it is, not as it was at step %d: set it", name, at)
                continue
            known = vars(owner)
            begins = changed[name].before.then() if name in changed else known.get(attribute)
            before, value = saved.get(name, (begins, begins))
            if not (_same(begins, before) or _same(begins, value)):
                logging.warning(
                    "%s is %r, as the program sets it now, not %r, to which it was changed before "
                    "step %d: to change it, set it after restore()",
                    *(name, begins, value, at),
                )
                value = begins
            if value is None and owner is step and attribute not in self._start.of_step:
                known.pop(attribute, None)  # that of the class
            elif not _same(known.get(attribute), value):
                setattr(owner, attribute, value)

    def _changes_by_user(self, step: Any) -> list[_Change]:
        """The changes since the first call that take effect, of what a checkpoint does not hold in
        another way."""
        if self._start is None:
            return []
        own = {f"{type(step).__name__}.{name}" for name in _IN_CHECKPOINTS}
        others = own | self._set_by_calls | self._set_by_code
        changes = self._changes(step, self._start, self._read(step))
        return [change for change in changes if change.takes_effect and change.name not in others]

    def _owner(self, name: str) -> Any:
        """The object with the attribute that `_changes` calls ``name``; None for a variable of a
        function."""
        return self._owners.get(name.rpartition(".")[0])

    def _require_changed(self, step: Any, now: _Read) -> None:
        assert self._start
        changed = {change.name for change in self._changes(step, self._start, now)}
        if still := [name for name in self._lost if name not in changed]:
            raise UsageError(
                f"{', '.join(still)} was changed before the checkpoint that was restored, which "
                "cannot hold it: change it again after restore(), or go on without the change by "
                "restore(changed=False)"
            )
        self._lost = []

    def check_rate(self, step: Any) -> None:
        """Refuses a new learning rate of an optimizer that has a schedule.

        Raises:
            UsageError: the rate differs from the rate at an earlier call.
        """
        for name, rate in step.updater.held_rates(scheduled=True).items():
            if self.rates.setdefault(name, rate) != rate:
                raise UsageError(
                    f"{name}.learning_rate was set to {rate:g}, which has no effect, because it "
                    "has a schedule: change the schedule, or make the loop without one"
                )

    def _read(self, step: Any) -> _Read:
        records = self._records
        of_step = {n: _Value(v, records) for n, v in vars(step).items() if n not in _OURS}
        code = {
            name: _Value(value, records)
            for name, value in _named_by_code(step, self._layers)
            if name not in self._set_by_code
        }
        # Keras's public `learning_rate` would be the current number.
        rates = {
            f"{what}.learning_rate": _Value(optimizer._learning_rate, records)
            for what, optimizer in self._optimizers.items()
        }
        for path, variable in self._variables:
            for name in _OF_VARIABLES:
                if (value := getattr(variable, name)) is not None:
                    code[f"{path}.{name}"] = _Value(value, records)
        settings = [[*map(of.get, names)] for of, names in self._others.values()]
        return _Read(of_step, code, settings, rates)

    def _changes(self, step: Any, before: _Read, now: _Read) -> Iterator[_Change]:
        none = _Value(None, {})
        fixed = {name for name, value in options(type(step)).items() if value.fixed} | _FIXED
        for name in {**before.of_step, **now.of_step}:
            old, new = (values.of_step.get(name, none) for values in (before, now))
            if old != new:
                stateful = has_state(old.of) or has_state(new.of)
                takes_effect = name not in fixed and not stateful
                yield _Change(f"{type(step).__name__}.{name}", old, new, takes_effect)
        for name in {**before.code, **now.code}:
            old, new = (values.code.get(name, none) for values in (before, now))
            if old != new:
                takes_effect = not (has_state(old.of) or has_state(new.of))
                yield _Change(name, old, new, takes_effect)
        for (what, (_, names)), olds, news in zip(
            self._others.items(), before.settings, now.settings, strict=True
        ):
            for name, setting, changed in zip(names, olds, news, strict=True):
                if setting is not changed and setting != changed:
                    takes_effect = _takes_effect(what, name, setting, changed)
                    before_after = _Value(setting, {}), _Value(changed, {})
                    yield _Change(f"{what}.{name}", *before_after, takes_effect)
        for name, old in before.rates.items():
            if old != (new := now.rates[name]):
                # A rate variable is in the checkpoints, so it must not appear or disappear.
                stays = not any(isinstance(value.of, keras.Variable) for value in (old, new))
                takes_effect = stays and name.rpartition(".")[0] not in self._scheduled
                yield _Change(name, old, new, takes_effect)


class _Change(NamedTuple):
    """A value that was changed, and whether a new trace has the change."""

    name: str
    before: _Value
    after: _Value
    takes_effect: bool


class _Read(NamedTuple):
    """What `TraceGuards` compares, by name."""

    of_step: dict[str, _Value]
    code: dict[str, _Value]  # of the user's classes, functions and layers, and of variables
    settings: list[list[Any]]  # of each layer of Keras, optimizer and updater
    rates: dict[str, _Value]


def _takes_effect(owner: str, name: str, old: Any, new: Any) -> bool:
    """Whether a graph that is traced again has a setting, and needs nothing for it that was made
    with the old one."""
    if name in _EXCLUDED:
        return True
    numbers = all(type(value) in (int, float) for value in (old, new)) and old != 0
    if owner.startswith("layer "):
        # Or of ctl, see `ctl.phases.sparse_rows`.
        functions = [v for v in (old, new) if isinstance(v, _FUNCTIONS) or _is_of_ctl(v)]
        return numbers or (bool(functions) and all(v in functions or v is None for v in (old, new)))
    return numbers and new != 0  # an optimizer that is made with 0 or None may lack variables


def _named_by_code(step: Any, layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that a trace of the user's code reads, by name."""
    kind, own = type(step), vars(step)
    functions: dict[str, Any] = {
        f"{kind.__name__}.{name}": own.get(name) or getattr(kind, name, None) for name in _PHASES
    }
    functions["loss_fn"] = getattr(step.loss_fn, "func", step.loss_fn)
    for what, layer in layers.items():
        functions[f"{what}.call"] = layer.call
        of_keras = _of_any_layer() | (_OF_FIT if isinstance(layer, keras.Model) else frozenset())
        for name, value in vars(layer).items():
            if name in of_keras or name.startswith("_self_") or not isinstance(value, _COMPARED):
                continue  # TensorFlow's names begin with `_self_`
            if not isinstance(value, _CONTAINERS) or not has_state(value):
                yield f"{what}.{name}", value
    left, seen, named = [*functions.items()], set(), set()
    while left:
        what, method = left.pop()
        function = inspect.unwrap(getattr(method, "__func__", method))
        code = getattr(function, "__code__", None)
        module = getattr(function, "__module__", None) or ""
        if code is None or code in seen or _is_of_ctl_or_keras(module):
            continue
        seen.add(code)
        named |= {*code.co_names}
        names = {name: function.__globals__.get(name) for name in _globals_of(code)}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                names[name] = cell.cell_contents
        for name, value in names.items():
            if isinstance(value, types.FunctionType):
                left.append((name, value))
            elif value is not None and isinstance(value, (*_PLAIN, *_CONTAINERS)):
                yield f"{name} of {what}", value
    for kind in filter(_is_users, type(step).__mro__):
        for name in named & vars(kind).keys():
            if isinstance(vars(kind)[name], _PLAIN):
                yield f"class {kind.__name__}.{name}", vars(kind)[name]


def _is_of_ctl(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "ctl"


def _is_users(kind: type) -> bool:
    return kind is not object and not _is_of_ctl_or_keras(kind.__module__)


def _is_of_ctl_or_keras(module: str) -> bool:
    return module.split(".")[0] in ("ctl", "keras", "tensorflow", "builtins")


@functools.cache
def _of_any_layer() -> frozenset[str]:
    """Attributes that Keras itself keeps in a layer that was built and called."""
    layer = keras.layers.Identity()
    layer(np.zeros([1, 1], np.float32))
    return frozenset(vars(layer)) | {"_build_shapes_dict"}


# Attributes that `compile`, `fit`, `evaluate` and `predict` of Keras keep in a model.
_OF_FIT = frozenset(
    (
        *("_compile_config", "_compile_loss", "_compile_metrics", "_compiled_trainable_state"),
        *("_compute_loss_has_training_arg", "_distribute_strategy", "_eval_epoch_iterator"),
        *("_initial_epoch", "_jit_compile", "_loss_tracker", "_run_eagerly", "compiled", "history"),
        *("loss", "optimizer", "predict_function", "steps_per_execution", "stop_evaluating"),
        *("stop_predicting", "stop_training", "test_function", "train_function"),
        "unrolled_steps_per_execution",
    )
)


@functools.cache
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Names of globals that ``code`` reads; ``co_names`` has those of attributes, too."""
    reads = "LOAD_GLOBAL", "LOAD_NAME"
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in reads)


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
        if not isinstance(value, _CONTAINERS):
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

    @property
    def is_plain(self) -> bool:
        """Whether all that a trace may read in the value is compared by value."""
        if self._elements is None:
            return isinstance(self.of, _PLAIN)
        return all(
            isinstance(key, _PLAIN) and (not isinstance(element, _Value) or element.is_plain)
            for key, element in self._elements.items()
        )

    def then(self) -> Any:
        """The value as it was read: of a container, a copy."""
        if self._elements is None or not isinstance(self.of, _CONTAINERS):
            return self.of
        elements = {
            key: element.then() if isinstance(element, _Value) else element
            for key, element in self._elements.items()
        }
        kind: Any = type(self.of)
        if isinstance(self.of, dict):
            return elements
        return kind(elements if isinstance(self.of, set | frozenset) else elements.values())

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Value)
        if self.of is other.of:
            elements, other_elements = self._elements or {}, other._elements or {}
            grows = self._is_record and other._is_record and len(elements) != len(other_elements)
            return elements == other_elements or (grows and not has_state(self.of))
        if isinstance(self.of, _PLAIN):
            nan = self.of != self.of and other.of != other.of
            return type(self.of) is type(other.of) and (self.of == other.of or nan)
        same = type(self.of) is type(other.of) and self._elements is not None
        return same and self._elements == other._elements


def _fits_json(*values: _Value) -> bool:
    """Whether JSON gives back the same ``values``, of the same types."""
    with contextlib.suppress(TypeError, ValueError):
        then = [value.then() for value in values]
        again = json.loads(json.dumps(then, allow_nan=False))
        return all(map(_same, again, then))
    return False


def _same(one: Any, other: Any) -> bool:
    return _Value(one, {}) == _Value(other, {})


def _is_option(name: str, value: Any) -> bool:
    plain = isinstance(value, (*_PLAIN, *_FUNCTIONS, *_RULES))
    return name == "groups" or (name[0] != "_" and plain)


def _shown(value: Any) -> str:
    if isinstance(value, keras.Variable):
        return "a number"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
