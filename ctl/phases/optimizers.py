"""Which optimizers ctl can apply, and which variables each of them trains."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ctl.base.names import OPTIMIZERS, check_name
from ctl.errors import UsageError

# Optimizers of Keras whose whole update is in `update_step`. A test compares each of them with
# plain Keras on one device.
PROVEN = tuple(getattr(keras.optimizers, kind) for kind in dict.fromkeys(OPTIMIZERS.values()))

# Some optimizers (Nadam, Muon) override one of these methods and do a part of the update there.
# `update_step` alone would then be silently wrong.
_UPDATE_METHODS = (
    *("apply", "_backend_apply_gradients", "_backend_update_step", "_apply_weight_decay"),
    *("apply_gradients", "_clip_gradients"),
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
    for method in _UPDATE_METHODS:
        if getattr(kind, method, None) is not getattr(keras.optimizers.Optimizer, method, None):
            raise UsageError(
                f"optimizer {kind.__name__} overrides {method}(): part of its update is outside "
                f"update_step() and would be lost; use one of {_names(PROVEN)}"
            )
    if kind not in PROVEN and kind.__module__.split(".")[0] == "keras":
        raise UsageError(
            f"optimizer {kind.__name__} is not supported: ctl has not tested it against Keras; "
            f"use one of {_names(PROVEN)}"
        )
    for argument, remedy in _REFUSED_ARGUMENTS.items():
        if getattr(optimizer, argument, None):
            raise UsageError(f"optimizer argument {argument} must not be set; use {remedy}")


def is_plain(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether ``optimizer`` updates as Keras does. Such an update depends on the variable only by
    its slots, shape and type."""
    return type(optimizer) in PROVEN and "update_step" not in vars(optimizer)


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether ``optimizer`` decays ``variable``, see `exclude_from_weight_decay` of Keras.

    Keras looks for excluded words in the name of the ``tf.Variable``, such as ``dense/kernel:0``. A
    Keras variable is called ``kernel``.
    """
    return bool(optimizer.weight_decay) and optimizer._use_weight_decay(variable.value)


def slots_of(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> list[tf.Variable]:
    """Returns the slots of ``variable``; none if ``optimizer`` was not built with it.

    Keras has no public API for slots. Its optimizers keep slots of one name in a list, in the order
    of the variables. Slots that are kept in another way are not found.
    """
    indices = optimizer._trainable_variables_indices
    index = indices.get(optimizer._var_key(variable))
    lists = [x for x in vars(optimizer).values() if isinstance(x, list) and len(x) == len(indices)]
    slots = [] if index is None else [x[index] for x in lists]
    return [slot.value for slot in slots if isinstance(slot, keras.Variable)]


def check_precision(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Refuses Adam, AdamW and Lamb if ``beta_2`` rounds to 1 in the type of a variable. Their bias
    correction is then 0: Adam never moves the variable, and Lamb may make it NaN.

    Raises:
        UsageError: names the variable.
    """
    corrected = keras.optimizers.Adam, keras.optimizers.Lamb
    if not isinstance(optimizer, corrected):
        return
    beta = float(optimizer.beta_2)
    for variable in variables:
        if float(tf.cast(beta, variable.dtype)) == 1.0:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} has beta_2={beta:g}, which is 1 in "
                f"{variable.dtype}, so it would not move {variable.path}: keep the weights in "
                "float32 (--precision=mixed_bfloat16), or use beta_2=0.99"
            )


def _names(kinds: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


class Group(NamedTuple):
    """Variables that one optimizer trains."""

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    schedule: Callable[[Any], Any] | None


# One optimizer; or one tuple per group: optimizer, variables and optionally a schedule, which
# replaces the schedule of the loop. A layer stands for its trainable variables.
Optimizers: TypeAlias = "keras.optimizers.Optimizer | Sequence[tuple[Any, ...]]"


def from_name(optimizer: Any) -> Any:
    """Returns ``optimizer``, or the Keras optimizer that it names, such as ``"adam"``.

    Raises:
        UsageError: it is neither a Keras optimizer, nor such a name, nor parameter groups.
    """
    if isinstance(optimizer, str):
        known = {kind.__name__.lower(): kind for kind in PROVEN}
        try:
            return keras.optimizers.get(optimizer)
        except ValueError:
            check_name("optimizer", optimizer.lower(), known)
    if not isinstance(optimizer, keras.optimizers.Optimizer | Sequence):
        raise UsageError(
            f"{str(optimizer)[:80]} is not an optimizer: give an object such as "
            "keras.optimizers.Adam(1e-3), its name, or parameter groups"
        )
    return optimizer


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
            or cannot be trained, or `check_optimizer` or `check_precision` refuses an optimizer.
    """
    if isinstance(optimizers, keras.optimizers.Optimizer):
        groups = [Group(optimizers, list(model_variables), schedule)]
    else:
        groups = [_group(*entry, schedule) for entry in optimizers]
        _check_disjoint(groups, model_variables)
    for optimizer, variables, _ in groups:
        check_optimizer(optimizer)
        check_precision(optimizer, variables)
        for variable in variables:
            if variable.overwrite_with_gradient:
                raise UsageError(
                    f"variable {variable.path} has overwrite_with_gradient=True (as in float8 "
                    "training), which ctl does not support: use float16 or bfloat16"
                )
        if not optimizer.built:
            optimizer.build(variables)
    return groups


def _group(optimizer: Any, variables: Any, *schedules: Any) -> Group:
    if isinstance(variables, keras.Layer):
        variables = variables.trainable_variables
    return Group(optimizer, list(variables), next((s for s in schedules if s is not None), None))


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
