"""Applies gradients that are already reduced: optimizer, weight decay, EMA, loss scale.

Keras's ``optimizer.apply`` would reduce them a second time, clip before that reduction, and check
finiteness on one replica. This module calls the optimizer's documented ``update_step`` through
``strategy.extended.update``, which reduces nothing and does the same on every replica.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl import share
from ctl.errors import UsageError
from ctl.flags.names import OPTIMIZERS

# Optimizers of Keras whose whole update is in `update_step`. A test compares each of them with
# plain Keras on one device.
PROVEN = tuple(getattr(keras.optimizers, kind) for kind in dict.fromkeys(OPTIMIZERS.values()))

# Some optimizers (Nadam, Muon) override one of these methods and do a part of the update there.
# `update_step` alone would then be silently wrong.
_UPDATE_METHODS = (
    *("apply", "_backend_apply_gradients", "_backend_update_step", "_apply_weight_decay"),
)

# Variables per compiled function. The cost of a call grows faster than its number of variables, and
# several functions run at once (`benchmarks/model_size.py`).
_VARIABLES_PER_UPDATE = 32

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
            "LossScaleOptimizer judges finiteness on one replica, before the all-reduce: pass the "
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
            f"optimizer {kind.__name__} is not proven equal to Keras in ctl; use one of "
            f"{_names(PROVEN)}"
        )
    for argument, remedy in _REFUSED_ARGUMENTS.items():
        if getattr(optimizer, argument, None):
            raise UsageError(f"optimizer argument {argument} must not be set; use {remedy}")


def check_precision(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Refuses Adam, AdamW and Lamb if ``beta_2`` rounds to 1 in the type of a variable. Their
    correction of the bias is 0 then: Adam never moves the variable, and Lamb may make it NaN.

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


def average_like(variable: keras.Variable) -> tf.Variable:
    """A variable for the moving average of ``variable``, which it starts with."""
    value = variable.value
    start, name = tf.cast(value, share.wide(value.dtype)), value.name.removesuffix(":0")
    return tf.Variable(start, trainable=False, name=name)


@tf.autograph.experimental.do_not_convert
def global_norm(gradients: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """The norm of all ``gradients`` together, a scalar of float32, or float64 if one of them is.

    `tf.linalg.global_norm` refuses several types. It also squares float16 as float16, which is Inf
    from 256 on and 0 below 2e-4.
    """
    given = [g for g in gradients if g is not None]
    dtype = tf.float64 if any(g.dtype == tf.float64 for g in given) else tf.float32
    return tf.linalg.global_norm([tf.cast(g, dtype) for g in given])


class LossScale:
    """Dynamic loss scale for float16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The scale doubles after ``growth_steps`` finite steps in a row. It halves after a step with a
    gradient that is not finite; `Updater` skips the update of that step.

    Args:
        initial: initial scale.
        growth_steps: finite steps in a row before the scale doubles.

    Attributes:
        scale: float32 scalar variable.
        finite_steps: int64 scalar variable: finite steps since the scale changed.
    """

    def __init__(self, initial: float = 2.0**15, growth_steps: int = 2000):
        self.growth_steps = growth_steps
        self.scale = _counter("loss_scale", initial, tf.float32)
        self.finite_steps = _counter("finite_steps", 0, tf.int64)

    def good(self) -> None:
        """Counts a finite step; doubles the scale when there are enough in a row."""
        grow = self.finite_steps + 1 >= self.growth_steps
        self.scale.assign(tf.where(grow, self.scale * 2.0, self.scale))
        self.finite_steps.assign(tf.where(grow, tf.zeros([], tf.int64), self.finite_steps + 1))

    def bad(self) -> None:
        """Halves the scale, to 1 at least, after gradients that are not finite."""
        self.scale.assign(tf.maximum(self.scale * 0.5, 1.0))
        self.finite_steps.assign(0)


class Updater:
    """Applies reduced gradients to the variables of a model. Create it in the strategy's scope.

    Args:
        optimizer: see `check_optimizer`. As in Keras, its ``weight_decay`` is decoupled and applied
            before the update, except to the variables that the optimizer excludes.
        variables: trainable `keras.Variable` objects, in the order of the gradients.
        statistics: moving statistics of BatchNorm, which ``ema_decay`` averages too: those of the
            trained weights do not fit averaged weights.
        schedule: learning rate as a function of the step; by default that of the optimizer.
        ema_decay: decay of an exponential moving average of the weights; None keeps no average. As
            in Keras, the average starts as the weights after the first update.
        loss_scale: whether to scale the loss for float16, see `LossScale`.
        skip_nonfinite: whether to skip an update when a gradient has a NaN or Inf.
        jit_update: whether XLA compiles the update: one pass over memory replaces a dozen kernels
            per variable. None compiles it on CPUs only, where it was measured. Use False for an
            optimizer that XLA cannot compile.

    Attributes:
        global_step: int64 scalar variable: batches seen.
        skipped: int64 scalar variable: updates skipped because a gradient was not finite.
        ema: variables like ``variables`` and ``statistics``; empty without ``ema_decay``.

    Raises:
        UsageError: see `check_optimizer` and `check_precision`; or a variable is to be overwritten
            by its gradient.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        *,
        statistics: Sequence[keras.Variable] = (),
        schedule: Callable[[Any], Any] | None = None,
        ema_decay: float | None = None,
        loss_scale: bool = False,
        skip_nonfinite: bool = False,
        jit_update: bool | None = None,
    ):
        check_optimizer(optimizer)
        check_precision(optimizer, variables)
        for variable in variables:
            if variable.overwrite_with_gradient:
                raise UsageError(f"variable {variable.path} is to be overwritten by its gradient")
        if not optimizer.built:
            optimizer.build(variables)
        self.optimizer = optimizer
        self.variables = list(variables)
        if ema_decay is not None:
            self.variables += statistics
        self.schedule = schedule
        getattr(schedule, "memory", None)  # is made in this scope
        self.ema_decay = ema_decay
        self.jit_update = jit_update
        self.judges_finiteness = loss_scale or skip_nonfinite
        self.global_step = _counter("global_step", 0, tf.int64)
        self.skipped = _counter("skipped", 0, tf.int64)
        self.loss_scale = LossScale() if loss_scale else None
        self.ema = []
        if ema_decay is not None:
            self.ema = [average_like(v) for v in self.variables]

    def state(self) -> dict[str, list[tf.Variable]]:
        """Variables that a checkpoint must hold, by group."""
        state = {
            "optimizer": [v.value for v in self.optimizer.variables],
            "counters": [self.global_step, self.skipped],
        }
        if self.ema:
            state["ema"] = self.ema
        if self.loss_scale:
            state["loss_scale"] = [self.loss_scale.scale, self.loss_scale.finite_steps]
        return state

    def skipped_so_far(self) -> int:
        """Number of skipped updates; 0 if finiteness is not checked."""
        return int(self.skipped.numpy()) if self.judges_finiteness else 0

    def learning_rate(self, step: tf.Tensor | None = None) -> tf.Tensor:
        """Learning rate of the update at ``step`` (by default the next one), a float32 scalar."""
        step = self.global_step if step is None else step
        rate = self.schedule(step) if self.schedule else self.optimizer.learning_rate
        return tf.convert_to_tensor(rate.value if isinstance(rate, keras.Variable) else rate)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, the model has the averaged weights, if there are any."""
        pairs = list(zip(self.variables, self.ema, strict=True)) if self.ema else []
        trained = [variable.value.read_value() for variable, _ in pairs]
        try:
            for variable, average in pairs:
                variable.value.assign(tf.cast(average.read_value(), variable.value.dtype))
            yield
        finally:
            for (variable, _), value in zip(pairs, trained, strict=True):
                variable.value.assign(value)

    def __call__(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Sequence[tf.Tensor | None],
        finite: tf.Tensor | None = None,
    ) -> None:
        """Makes one update. Call it in cross-replica context, through ``merge_call``.

        Args:
            strategy: the strategy of this context.
            gradients: reduced, equal on every replica; None leaves the variable unchanged.
            finite: bool scalar, equal on every replica; None if finiteness is not checked.
        """
        if not self.judges_finiteness:
            self._update(strategy, gradients)
        else:
            # The all-reduce has run on every replica before; neither branch has a collective.
            tf.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: self._update(strategy, gradients),
                self._skip,
            )
        # The step counts only after its all-reduce: a step that is stuck there is not done.
        reduced = [strategy.experimental_local_results(g) for g in gradients if g is not None]
        with tf.control_dependencies(tf.nest.flatten(reduced)):
            self.global_step.assign_add(1)

    def _update(self, strategy: tf.distribute.Strategy, gradients: Sequence) -> None:
        rate = self.learning_rate()
        gradients = [*gradients, *[None] * (len(self.variables) - len(gradients))]
        first = tf.equal(self.optimizer.iterations.value, 0) if self.ema else None
        devices: dict[str, list[int]] = {}
        for index, variable in enumerate(self.variables):
            devices.setdefault(variable.value.device, []).append(index)
        for device, indices in _in_parts(devices):
            # One function updates all of them. The first variable determines the device.
            update = functools.partial(self._update_device, indices)
            if "CPU" in device.upper() if self.jit_update is None else self.jit_update:
                update = tf.function(update, jit_compile=True, autograph=False)
            strategy.extended.update(
                self.variables[indices[0]].value,
                lambda _, *args, update=update: update(*args),
                args=([gradients[i] for i in indices], rate, first),
                group=False,
            )
        # Not Keras's own increment: it reads and then assigns, so concurrent workers lose counts.
        self.optimizer.iterations.value.assign_add(1)
        if self.loss_scale:
            self.loss_scale.good()

    @tf.autograph.experimental.do_not_convert
    def _update_device(
        self,
        indices: Sequence[int],
        gradients: Sequence[tf.Tensor | None],
        rate: tf.Tensor,
        first: tf.Tensor | None,
    ) -> None:
        """Updates the variables at ``indices``, in the update context of their device."""
        optimizer = self.optimizer
        # A private name of Keras: whether `exclude_from_weight_decay` left the variable in.
        decays = optimizer._use_weight_decay if optimizer.weight_decay else lambda _: False
        for index, gradient in zip(indices, gradients, strict=True):
            variable = self.variables[index]
            value = variable.value
            if gradient is not None:
                if decays(variable):
                    decay = tf.cast(optimizer.weight_decay * rate, value.dtype)
                    value.assign_sub(value * decay)
                optimizer.update_step(gradient, value, rate)
                if variable.constraint is not None:
                    value.assign(variable.constraint(value))
            if self.ema:
                average = self.ema[index]
                decay = tf.constant(self.ema_decay, average.dtype)
                momentum = tf.where(first, tf.zeros_like(decay), decay)
                average.assign(momentum * average + (1.0 - momentum) * tf.cast(value, decay.dtype))

    def _skip(self) -> None:
        self.skipped.assign_add(1)
        if self.loss_scale:
            self.loss_scale.bad()


def _in_parts(devices: dict[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yields the variables of each device, `_VARIABLES_PER_UPDATE` at a time."""
    for device, indices in devices.items():
        for start in range(0, len(indices), _VARIABLES_PER_UPDATE):
            yield device, indices[start : start + _VARIABLES_PER_UPDATE]


def _counter(name: str, initial: float, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        initial,
        dtype=dtype,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )
