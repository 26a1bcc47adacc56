"""Which optimizers ctl can apply, and which variables each of them trains."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl.base.models import Models
from ctl.base.names import OPTIMIZERS, check_name
from ctl.base.tf_internals import copy_here
from ctl.errors import UsageError
from ctl.phases.uninitialized import Uninitialized

# Gives the copy of a variable that code may read and write where it runs.
Here: TypeAlias = Callable[[tf.Variable], tf.Variable]

# Optimizers of Keras, as far as the installed one has them. A test compares each of them with plain
# Keras on one device.
PROVEN = tuple(
    getattr(keras.optimizers, kind)
    for kind in dict.fromkeys(OPTIMIZERS.values())
    if hasattr(keras.optimizers, kind)
)

# Keras's update around `update_step`. ctl calls those of `PROVEN` optimizers: Nadam overrides
# `_backend_update_step`, see `before_update`, and Muon `_apply_weight_decay`, see
# `update_variable`. Any other override would be lost.
_UPDATE_METHODS = (
    *("apply", "apply_gradients", "_backend_apply_gradients", "_backend_update_step"),
    *("_apply_weight_decay", "_clip_gradients", "_filter_empty_gradients"),
    *("_overwrite_variables_directly_with_gradients", "_all_reduce_sum_gradients"),
    *("_distributed_tf_update_step", "scale_loss", "finalize_variable_values", "iterations"),
)

# ctl does this itself, after the all-reduce. The optimizer would do it before, or a second time.
_REFUSED_ARGUMENTS = {
    "clipnorm": "TrainStep(clip_norm=...), --clip_norm: one global norm, of the reduced gradients",
    "clipvalue": "TrainStep.clip: override it",
    "global_clipnorm": "TrainStep(clip_norm=...), --clip_norm",
    "gradient_accumulation_steps": "TrainStep(accumulate_steps=...), --accumulate_steps",
    "use_ema": "TrainStep(ema_decay=...), --ema_decay",
    "loss_scale_factor": "TrainStep(loss_scale=True), --precision=mixed_float16",
}


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that this module cannot apply correctly.

    Raises:
        UsageError: a part of the update is outside ``update_step``, no test compares the optimizer
            with Keras, or an argument duplicates what ctl does itself.
    """
    kind = type(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "LossScaleOptimizer checks for NaN and Inf on each replica alone: pass the "
            "inner optimizer and TrainStep(loss_scale=True) (--precision=mixed_float16)"
        )
    if kind.__name__ == "MultiOptimizer":
        raise UsageError(
            "MultiOptimizer applies its optimizers itself: give parameter groups instead, a list "
            "of (optimizer, variables)"
        )
    if not _has_update_step(optimizer):
        raise UsageError(
            f"optimizer {kind.__name__} must have update_step(gradient, variable, learning_rate), "
            "which Keras 3 calls for each variable"
        )
    for method in _UPDATE_METHODS:
        known = (getattr(of, method, None) for of in (keras.optimizers.Optimizer, *PROVEN))
        if method in vars(optimizer) or all(getattr(kind, method, None) is not m for m in known):
            raise UsageError(
                f"optimizer {kind.__name__} overrides {method}(), which would be lost: ctl calls "
                "update_step() for each variable; move it there, to TrainStep.clip, or to "
                "TrainStep.apply"
            )
    if kind not in PROVEN and kind.__module__.split(".")[0] == "keras":
        raise UsageError(
            f"optimizer {kind.__name__} is not supported: ctl has not tested it against Keras; "
            f"use one of {_names(PROVEN)}"
        )
    for argument, remedy in _REFUSED_ARGUMENTS.items():
        if getattr(optimizer, argument, None):
            raise UsageError(f"optimizer argument {argument} must not be set; use {remedy}")


def _has_update_step(optimizer: keras.optimizers.Optimizer) -> bool:
    method = optimizer.update_step
    if getattr(method, "__func__", method) is keras.optimizers.Optimizer.update_step:
        return False
    try:
        inspect.signature(method).bind("gradient", "variable", "learning_rate")
    except TypeError:
        return False
    return True


def is_plain(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether ``optimizer`` updates as Keras does. Such an update depends on the variable only by
    its slots, shape and type."""
    return type(optimizer) in PROVEN and "update_step" not in vars(optimizer)


def with_rate(optimizer: keras.optimizers.Optimizer, rate: tf.Tensor) -> Any:
    """Returns a second object with the methods and the attributes of ``optimizer``, for one trace.

    Its learning rate is ``rate``. It may be called on reduced gradients, outside of a replica:
    Keras's own ``_backend_update_step``, which reduces gradients and calls ``update_step``, does
    nothing.
    """
    kind = type(optimizer)
    bases = kind, _WithoutReduction
    other: Any = object.__new__(type(kind.__name__, bases, {"learning_rate": rate}))
    object.__setattr__(other, "__dict__", vars(optimizer))  # the same, not a copy
    return other


class _WithoutReduction(keras.optimizers.Optimizer):
    def _backend_update_step(self, grads: Any, trainable_variables: Any, rate: Any) -> None:
        pass


def before_update(optimizer: keras.optimizers.Optimizer, rate: tf.Tensor) -> None:
    """Does what ``optimizer`` does once a step before it updates variables, such as Nadam's
    product. Call it in cross-replica context."""
    with_rate(optimizer, rate)._backend_update_step([], [], rate)


def update_variable(optimizer: Any, variable: keras.Variable, gradient: tf.Tensor) -> None:
    """Decays and updates ``variable`` as ``optimizer`` does, which is of `with_rate`. Call it in an
    update context.

    Raises:
        UsageError: ``update_step`` changes a number that is an attribute, or makes a variable. A
            graph does neither in every step.
    """
    value, rate, before = variable.value, optimizer.learning_rate, _numbers(optimizer)
    if _has_own_decay(optimizer):
        optimizer._apply_weight_decay([variable])
    elif is_decayed(optimizer, variable):
        value.assign_sub(value * tf.cast(optimizer.weight_decay * rate, value.dtype))
    optimizer.update_step(gradient, value, rate)
    for name, number in _numbers(optimizer).items():
        if before.get(name, number) != number:
            raise UsageError(
                f"optimizer {optimizer.__class__.__name__} changes its {name} in update_step(), "
                "which runs once, for the graph: make variables in build(), and change those"
            )


def read_rows(
    variable: keras.Variable,
    optimizer: keras.optimizers.Optimizer,
    numbers: tf.Tensor,
    here: Here = copy_here,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns rows ``numbers`` [m] of a variable [n, ...], and of its slots by name. Call it in a
    replica or update context; in another, it reads the first copy. ``here`` gives the copy, or the
    part, of a variable or slot that has these rows."""
    slots = _slots_of_name(optimizer, variable)
    rows = {name: here(slot).sparse_read(numbers) for name, slot in slots.items()}
    return here(variable._value).sparse_read(numbers), rows


def write_rows(
    variable: keras.Variable,
    optimizer: keras.optimizers.Optimizer,
    numbers: tf.Tensor,
    row: tf.Tensor,
    slots: Mapping[str, tf.Tensor],
) -> None:
    """Assigns what `read_rows` returns. Call it in an update context."""
    copy_here(variable.value).scatter_update(tf.IndexedSlices(row, numbers))
    for name, slot in _slots_of_name(optimizer, variable).items():
        copy_here(slot).scatter_update(tf.IndexedSlices(slots[name], numbers))


def _slots_of_name(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> dict[str, tf.Variable]:
    """Keras has no public API for slots. Its optimizers keep slots of one name in a list, in the
    order of the variables. Slots that are kept in another way are not found."""
    # In its scope for mixed precision, Keras gives a tensor for the public `value`.
    index = optimizer._trainable_variables_indices.get(optimizer._var_key(variable._value))
    lists = {} if index is None else _slots_by_name(optimizer)
    slots = {name: slots[index] for name, slots in lists.items()}
    return {name: slot._value for name, slot in slots.items() if isinstance(slot, keras.Variable)}


def update_rows(
    optimizer: Any,
    variable: keras.Variable,
    gradient: tf.IndexedSlices,
    row: tf.Tensor,
    slots: Mapping[str, tf.Tensor],
    here: Here = copy_here,
    asynchronous: bool = False,
) -> None:
    """Decays and updates the rows of ``gradient`` as `update_variable` does a variable. Call it in
    an update context.

    Args:
        optimizer: of `with_rate` and `is_plain`. No element of its update depends on another.
        variable: [n, ...].
        gradient: has no row twice.
        row: these rows of the variable, and of its slots by name: of `read_rows`, or up to date.
        slots: see ``row``.
        here: as for `read_rows`.
        asynchronous: whether other workers update the variable meanwhile. Then what Keras adds to
            it and its slots is added to what they have by now.
    """
    value, rate, kind = _Rows(row), optimizer.learning_rate, type(optimizer)
    each = {name: _Rows(slot) for name, slot in slots.items()}
    on_rows: Any = object.__new__(type(kind.__name__, (_OnRows, kind), {}))
    object.__setattr__(
        on_rows, "__dict__", vars(optimizer) | {name: [slot] for name, slot in each.items()}
    )
    if is_decayed(optimizer, variable):
        on_rows.assign_sub(value, value.value * tf.cast(optimizer.weight_decay * rate, row.dtype))
    on_rows.update_step(gradient.values, value, rate)
    of_name = _slots_of_name(optimizer, variable)
    pairs = [(variable.value, value), *((of_name[name], rows) for name, rows in each.items())]
    for target, rows in pairs:
        if asynchronous and not rows.is_assigned:
            more = rows.value - rows.before
            here(target).scatter_add(tf.IndexedSlices(more, gradient.indices))
        else:
            here(target).scatter_update(tf.IndexedSlices(rows.value, gradient.indices))


class _Rows:
    """Some rows of a variable, which ``update_step`` takes for a variable of its own.

    Attributes:
        before: what they were.
        is_assigned: whether Keras has assigned values, and not only added to what they were.
    """

    def __init__(self, value: tf.Tensor):
        self.value, self.dtype, self.shape = value, value.dtype, value.shape
        self.before, self.is_assigned = value, False

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)


class _OnRows(keras.optimizers.Optimizer):
    """Assigns to `_Rows`. Each list of slots has one entry."""

    def _get_variable_index(self, variable: Any) -> int:
        return 0

    def assign(self, variable: Any, value: Any) -> None:
        variable.value, variable.is_assigned = tf.cast(value, variable.dtype), True

    def assign_add(self, variable: Any, value: Any) -> None:
        variable.value += tf.cast(value, variable.dtype)

    def assign_sub(self, variable: Any, value: Any) -> None:
        variable.value -= tf.cast(value, variable.dtype)


def _numbers(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    numbers = {name: v for name, v in vars(optimizer).items() if type(v) in (int, float)}
    return numbers | {"number of variables": len(optimizer._variables)}


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether ``optimizer`` decays ``variable``, see ``exclude_from_weight_decay`` of Keras.

    Keras looks for excluded words in the name of the ``tf.Variable``, such as ``dense/kernel:0``. A
    Keras variable is called ``kernel``, where Muon looks.
    """
    if _has_own_decay(optimizer):
        return optimizer._use_weight_decay(variable)
    # To exclude a table by itself reads it, so one without values has only a name.
    value = variable.nameplate if isinstance(variable, Uninitialized) else variable.value
    return bool(optimizer.weight_decay) and optimizer._use_weight_decay(value)


def _has_own_decay(optimizer: keras.optimizers.Optimizer) -> bool:
    keras_own = keras.optimizers.Optimizer._apply_weight_decay
    return type(optimizer)._apply_weight_decay is not keras_own


def slots_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> list[tf.Variable]:
    """Returns the slots of ``variable``; none if ``optimizer`` was not built with it."""
    return list(_slots_of_name(optimizer, variable).values())


def _slots_by_name(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    count, variables = len(optimizer._trainable_variables_indices), optimizer._trainable_variables
    lists = {name: x for name, x in vars(optimizer).items() if isinstance(x, list)}
    return {name: x for name, x in lists.items() if x is not variables and len(x) == count}


def common_variables(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Returns the variables of ``optimizer`` that are no slots, such as its iterations."""
    return [one.value for one in vars(optimizer).values() if isinstance(one, keras.Variable)]


def check_precision(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Refuses types of variables with which Keras's update fails.

    If ``beta_2`` rounds to 1, a bias correction is 0: Adam never moves the variable, and others may
    make it NaN. If ``epsilon`` rounds to 0, a gradient of 0 is divided by 0; the first step of
    Adamax divides by ``(1 - beta_1) * epsilon``. Adafactor divides by products of small numbers,
    which are 0 in float16. Muon multiplies float32 by the type of the variable.

    Raises:
        UsageError: names the variable.
    """
    kinds = {of.__name__ for of in type(optimizer).__mro__ if of in PROVEN}
    beta = epsilon = 0.0
    if not kinds.isdisjoint(("Adam", "Lamb", "Nadam", "ScheduleFreeAdamW")):
        beta = float(optimizer.beta_2)
    if kinds and "Adagrad" not in kinds:  # whose sum does not begin at 0
        epsilon = float(getattr(optimizer, "epsilon", 0.0))
    factor = 1.0 - float(optimizer.beta_1) if "Adamax" in kinds else 1.0
    for variable in variables:
        if epsilon > 0.0 and float(tf.cast(epsilon * factor, variable.dtype)) == 0.0:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} has epsilon={epsilon:g}, which is too "
                f"small for {variable.dtype}: {variable.path} would become NaN where its gradient "
                "is 0; keep the weights in float32 (--precision=mixed_float16), or use "
                f"epsilon={1e-7 / factor:.0e}"
            )
        if float(tf.cast(beta, variable.dtype)) == 1.0:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} has beta_2={beta:g}, which is 1 in "
                f"{variable.dtype}, so it would not move {variable.path}: keep the weights in "
                "float32 (--precision=mixed_bfloat16), or use beta_2=0.99"
            )
        too_small = "Adafactor" in kinds and variable.dtype == "float16"
        if too_small or ("Muon" in kinds and variable.dtype != "float32"):
            raise UsageError(
                f"optimizer {type(optimizer).__name__} cannot train {variable.path} in "
                f"{variable.dtype}: keep the weights in float32 "
                f"(--precision=mixed_{'float16' if too_small else 'bfloat16'})"
            )


def copies_of_weights(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns the slots that begin as the weights, as those of ScheduleFreeAdamW do, each with its
    variable. Call it right after `build`."""
    if is_plain(optimizer) and type(optimizer).__name__ != "ScheduleFreeAdamW":
        return []
    copies = []
    for slots in _slots_by_name(optimizer).values():
        pairs = [
            (slot.value, variable.value)
            for slot, variable in zip(slots, optimizer._trainable_variables, strict=True)
            if isinstance(slot, keras.Variable)
        ]
        values = [(slot.numpy(), variable.numpy()) for slot, variable in pairs]
        if any(v.any() for _, v in values) and all(np.array_equal(s, v) for s, v in values):
            copies += pairs
    return copies


def _names(kinds: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


class Group(NamedTuple):
    """Variables that one optimizer trains."""

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    schedule: Callable[[Any], Any] | None


# One optimizer; or one tuple per group: optimizer, variables and optionally a schedule, which
# replaces the schedule of the loop. A layer stands for its trainable variables. A dict has groups
# by the name of their model, see `from_name`.
Optimizers: TypeAlias = "keras.optimizers.Optimizer | Sequence[tuple[Any, ...]] | Mapping[str, Any]"


def from_name(optimizer: Any, model: Any = None) -> Any:
    """Returns ``optimizer``, or the Keras optimizer that it names, such as ``"adam"``.

    Args:
        optimizer: an object or its name; parameter groups; or, for several models, a dict with an
            optimizer, or ``(optimizer, schedule)``, for each of them that trains.
        model: of the step. A dict becomes a dict of parameter groups, in the order of its models.

    Raises:
        UsageError: it is neither a Keras optimizer, nor such a name, nor parameter groups; or the
            names of a dict are not those of the models that train.
    """
    if optimizer is None and getattr(model, "optimizer", None) is not None:
        raise UsageError(
            "a step takes nothing from model.compile: give TrainStep(model, model.optimizer, "
            "model.loss, metrics=[...])"
        )
    if isinstance(optimizer, Mapping):
        return _of_models(optimizer, model)
    if isinstance(optimizer, str):
        known = {kind.__name__.lower(): kind for kind in PROVEN}
        check_name("optimizer", optimizer.lower(), known)
        return known[optimizer.lower()]()
    if not isinstance(optimizer, keras.optimizers.Optimizer | Sequence):
        raise UsageError(
            f"{str(optimizer)[:80]} is not an optimizer: give an object such as "
            "keras.optimizers.Adam(1e-3), its name, or parameter groups"
        )
    if isinstance(optimizer, Sequence):
        return [_named_group(entry) for entry in optimizer]
    return optimizer


def _named_group(entry: Any) -> tuple[Any, ...]:
    """A parameter group whose optimizer may be a name."""
    if isinstance(entry, Sequence) and len(entry) in (2, 3):
        optimizer, *rest = entry
        if isinstance(optimizer, str | keras.optimizers.Optimizer):
            return from_name(optimizer), *rest
    raise UsageError(
        f"parameter group {str(entry)[:80]}: give (optimizer, variables) or (optimizer, variables, "
        "schedule)"
    )


def _of_models(optimizers: Mapping[str, Any], model: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(model, Models):
        raise UsageError(
            "optimizer is a dict, and model is one model: give a dict of models with its names, or "
            "one optimizer"
        )
    for name in optimizers:
        if not model[name].trainable_variables:
            raise UsageError(f"model {name!r} has nothing to train: leave its optimizer out")
    groups = {}
    for name, one in model.items():
        if name not in optimizers:
            if one.trainable_variables:
                raise UsageError(
                    f"model {name!r} has no optimizer: add one, or set its trainable to False"
                )
            continue
        given = optimizers[name]
        optimizer, *schedule = given if isinstance(given, tuple) else (given,)
        if len(schedule) > 1 or not isinstance(optimizer, str | keras.optimizers.Optimizer):
            raise UsageError(
                f"the optimizer of model {name!r} is {str(given)[:80]}: give an optimizer, its "
                "name, or (optimizer, schedule)"
            )
        groups[name] = (from_name(optimizer), one, *schedule)
    return groups


def optimizer_of(optimizers: Optimizers, variable: keras.Variable) -> keras.optimizers.Optimizer:
    """The optimizer that trains ``variable``, before `make_groups`; the first if none does."""
    if isinstance(optimizers, keras.optimizers.Optimizer):
        return optimizers
    groups = [_group(*entry[:2], None) for entry in _entries(optimizers)]
    own = [g for g in groups if any(v is variable for v in g.variables)]
    return (own or groups)[0].optimizer


def are_plain(optimizers: Optimizers) -> bool:
    """Whether each of them `is_plain`. Their variables then begin as constants, or as weights."""
    if isinstance(optimizers, keras.optimizers.Optimizer):
        return is_plain(optimizers)
    return all(is_plain(entry[0]) for entry in _entries(optimizers))


def _entries(groups: Any) -> Sequence[tuple[Any, ...]]:
    return [*(groups.values() if isinstance(groups, Mapping) else groups)]


def make_groups(
    optimizers: Optimizers,
    model_variables: Sequence[keras.Variable],
    schedule: Callable[[Any], Any] | None,
) -> list[Group]:
    """Returns the parameter groups; builds their optimizers.

    Args:
        optimizers: see `Optimizers`.
        model_variables: the trainable variables of the model; one optimizer trains all of them.
        schedule: schedule of the groups that have none; None uses the rate of the optimizer.

    Raises:
        UsageError: an optimizer or a variable is in two groups, a variable of the model is in none
            or cannot be trained, an optimizer was made outside of the strategy's scope, or
            `check_optimizer` or `check_precision` refuses it.
    """
    if isinstance(optimizers, keras.optimizers.Optimizer):
        groups = [Group(optimizers, list(model_variables), schedule)]
    else:
        groups = [_group(*entry, schedule) for entry in _entries(optimizers)]
        _check_disjoint(groups, model_variables)
    strategy = tf.distribute.get_strategy()
    for optimizer, variables, _ in groups:
        check_optimizer(optimizer)
        check_precision(optimizer, variables)
        if not strategy.extended.variable_created_in_scope(optimizer.iterations.value):
            raise UsageError(
                f"optimizer {optimizer.name} was not created in the strategy's scope: make it "
                "inside `with strategy.scope():`"
            )
        for variable in variables:
            if variable.overwrite_with_gradient:
                raise UsageError(
                    f"variable {variable.path} has overwrite_with_gradient=True (as in float8 "
                    "training), which ctl does not support: use float16 or bfloat16"
                )
        if not optimizer.built:
            with _filling():
                optimizer.build(variables)
    return groups


def check_built_for(groups: Sequence[Group]) -> None:
    """Raises `UsageError` if an optimizer was built for other variables, as for those of an earlier
    model."""
    for optimizer, variables, _ in groups:
        known = optimizer._trainable_variables_indices  # of values: a table may have had another
        if new := [v.path for v in variables if optimizer._var_key(v._value) not in known]:
            raise UsageError(
                f"optimizer {optimizer.name} was built for other variables than {new[0]}: make a "
                "new optimizer for a new model"
            )


@contextlib.contextmanager
def _filling() -> Iterator[None]:
    """Inside, the slots of a large table that begin as a constant need no memory but their own:
    Keras multiplies ones by the constant."""
    plain = keras.initializers.Constant.__call__

    def fill(self: Any, shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
        return tf.fill(shape, tf.cast(self.value, dtype or keras.config.floatx()))

    keras.initializers.Constant.__call__ = fill
    try:
        yield
    finally:
        keras.initializers.Constant.__call__ = plain


def _group(optimizer: Any, variables: Any, *schedules: Any) -> Group:
    several = [variables] if isinstance(variables, keras.Layer) else variables
    flat: list[keras.Variable] = []
    for one in several:
        flat += one.trainable_variables if isinstance(one, keras.Layer) else [one]
    return Group(optimizer, flat, next((s for s in schedules if s is not None), None))


def _check_disjoint(groups: Sequence[Group], model_variables: Sequence[keras.Variable]) -> None:
    trained = [v for group in groups for v in group.variables]
    for variable in trained:
        if not variable.trainable:
            raise UsageError(f"variable {variable.path} of a parameter group is not trainable")
    for variable in _twice(trained):
        raise UsageError(f"variable {variable.path} is in two parameter groups: train it in one")
    for optimizer in _twice([group.optimizer for group in groups]):
        raise UsageError(
            f"optimizer {optimizer.name} is in two parameter groups: give each group its own"
        )
    for variable in model_variables:
        if not any(variable is one for one in trained):
            raise UsageError(
                f"variable {variable.path} of the model is in no parameter group: add it to one, "
                "or freeze its layer"
            )


def _twice(things: Sequence[Any]) -> list[Any]:
    count = collections.Counter(map(id, things))
    return [thing for thing in things if count[id(thing)] > 1]
