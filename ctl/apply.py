"""Applies gradients that are already reduced: optimizer, weight decay, EMA, loss scale.

Keras's ``optimizer.apply`` would all-reduce a second time, clip before that, and judge finiteness
on one replica. Here the update goes through ``strategy.extended.update`` and the optimizer's
documented ``update_step``, so nothing is reduced and every replica does the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from ctl.errors import UsageError
from ctl.flags.names import OPTIMIZERS

# Optimizers of Keras whose whole update is `update_step`: a test holds each of them equal to plain
# single-device Keras.
PROVEN = tuple(getattr(keras.optimizers, kind) for kind in dict.fromkeys(OPTIMIZERS.values()))

# Part of the update lives in these for some optimizers (Nadam, Muon); `update_step` alone would be
# silently wrong.
_UPDATE_METHODS = (
    *("apply", "_backend_apply_gradients", "_backend_update_step", "_apply_weight_decay"),
)

# In one compiled function: what a call of it costs grows faster than its variables, and several run
# at once (`benchmarks/model_size.py`).
_VARIABLES_PER_UPDATE = 32

# What ctl does itself, after the all-reduce; the optimizer would do it before, or twice.
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
        UsageError: the optimizer's update is not wholly in ``update_step``, is not proven equal to
            Keras, or an argument does what ctl does itself.
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


def _names(kinds: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


class LossScale:
    """Dynamic loss scale for float16: doubled after ``growth_steps`` finite steps, halved and the
    update skipped after one that is not (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    Args:
        initial: the first scale.
        growth_steps: finite steps in a row before the scale doubles.
    """

    def __init__(self, initial: float = 2.0**15, growth_steps: int = 2000):
        self.growth_steps = growth_steps
        self.scale = _counter("loss_scale", initial, tf.float32)
        self.finite_steps = _counter("finite_steps", 0, tf.int64)

    def good(self) -> None:
        """After an update."""
        grow = self.finite_steps + 1 >= self.growth_steps
        self.scale.assign(tf.where(grow, self.scale * 2.0, self.scale))
        self.finite_steps.assign(tf.where(grow, tf.zeros([], tf.int64), self.finite_steps + 1))

    def bad(self) -> None:
        """After gradients that were not finite. The scale stays at 1 or more."""
        self.scale.assign(tf.maximum(self.scale * 0.5, 1.0))
        self.finite_steps.assign(0)


class Updater:
    """Applies reduced gradients to the variables of a model; made in the strategy's scope.

    Args:
        optimizer: see `check_optimizer`. Its ``weight_decay`` is applied here (decoupled, before
            the update, as Keras does), with its exclusions.
        variables: the trainable `keras.Variable` s, in the order of the gradients.
        schedule: the learning rate as a function of the step; by default the optimizer's own.
        ema_decay: when set, keeps an exponential moving average of the weights. It starts as the
            weights after the first update, as in Keras.
        loss_scale: when true, scales the loss for float16, see `LossScale`.
        skip_nonfinite: when true, gradients with a NaN or Inf skip the update.
        jit_update: compiles the update with XLA, which makes one pass over memory of what are a
            dozen kernels for each variable. None: where the variables are on a CPU, because that is
            where it was measured. False is for an optimizer that XLA cannot compile.

    Attributes:
        global_step: int64 scalar variable: batches seen.
        skipped: int64 scalar variable: updates left out because gradients were not finite.
        ema: float variables like the trainable ones; empty without ``ema_decay``.

    Raises:
        UsageError: see `check_optimizer`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        *,
        schedule=None,
        ema_decay: float | None = None,
        loss_scale: bool = False,
        skip_nonfinite: bool = False,
        jit_update: bool | None = None,
    ):
        check_optimizer(optimizer)
        for variable in variables:
            if variable.overwrite_with_gradient:
                raise UsageError(f"variable {variable.path} is to be overwritten by its gradient")
        if not optimizer.built:
            optimizer.build(variables)
        self.optimizer = optimizer
        self.variables = list(variables)
        self.schedule = schedule
        self.ema_decay = ema_decay
        self.jit_update = jit_update
        self.judges_finiteness = loss_scale or skip_nonfinite
        self.global_step = _counter("global_step", 0, tf.int64)
        self.skipped = _counter("skipped", 0, tf.int64)
        self.loss_scale = LossScale() if loss_scale else None
        self.ema = []
        if ema_decay is not None:
            self.ema = [
                tf.Variable(
                    tf.convert_to_tensor(v.value),
                    trainable=False,
                    name=v.value.name.removesuffix(":0"),
                )
                for v in variables
            ]

    def state(self) -> dict[str, list[tf.Variable]]:
        """Everything here that a checkpoint must hold."""
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
        """Updates that were left out; 0 where finiteness is not judged."""
        return int(self.skipped.numpy()) if self.judges_finiteness else 0

    def learning_rate(self, step: tf.Tensor | None = None) -> tf.Tensor:
        """The rate of the update at ``step``, by default the next one: a float32 scalar."""
        step = self.global_step if step is None else step
        rate = self.schedule(step) if self.schedule else self.optimizer.learning_rate
        return tf.convert_to_tensor(rate.value if isinstance(rate, keras.Variable) else rate)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, the model has its averaged weights, where there are any."""
        pairs = list(zip(self.variables, self.ema, strict=True)) if self.ema else []
        trained = [variable.value.read_value() for variable, _ in pairs]
        try:
            for variable, average in pairs:
                variable.value.assign(average.read_value())
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
        """One update, in cross-replica context (that is, through ``merge_call``).

        Args:
            strategy: the strategy of this context.
            gradients: reduced, the same on every replica; None leaves a variable as it is.
            finite: bool scalar, the same on every replica, when finiteness is judged.
        """
        if not self.judges_finiteness:
            self._update(strategy, gradients)
        else:
            # One collective has already run on every replica; this branch holds none.
            tf.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: self._update(strategy, gradients),
                self._skip,
            )
        # Not before: a step that is stuck in its all-reduce is not done.
        reduced = [strategy.experimental_local_results(g) for g in gradients if g is not None]
        with tf.control_dependencies(tf.nest.flatten(reduced)):
            self.global_step.assign_add(1)

    def _update(self, strategy: tf.distribute.Strategy, gradients: Sequence) -> None:
        rate = self.learning_rate()
        first = tf.equal(self.optimizer.iterations.value, 0) if self.ema else None
        devices: dict[str, list[int]] = {}
        for index, variable in enumerate(self.variables):
            devices.setdefault(variable.value.device, []).append(index)
        for device, indices in _in_parts(devices):
            # One function for all of them; naming any of them leads to the device.
            update = functools.partial(self._update_device, indices)
            if "CPU" in device.upper() if self.jit_update is None else self.jit_update:
                update = tf.function(update, jit_compile=True, autograph=False)
            strategy.extended.update(
                self.variables[indices[0]].value,
                lambda _, *args, update=update: update(*args),
                args=([gradients[i] for i in indices], rate, first),
                group=False,
            )
        # Keras's own reads and then assigns: workers that do so at the same time lose counts.
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
        # A private name of Keras: which variables `exclude_from_weight_decay` left in.
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
                momentum = tf.where(first, 0.0, tf.cast(self.ema_decay, value.dtype))
                average = self.ema[index]
                average.assign(momentum * average + (1.0 - momentum) * value)

    def _skip(self) -> None:
        self.skipped.assign_add(1)
        if self.loss_scale:
            self.loss_scale.bad()


def _in_parts(devices: dict[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """The variables of each device, `_VARIABLES_PER_UPDATE` at a time."""
    for device, indices in devices.items():
        for start in range(0, len(indices), _VARIABLES_PER_UPDATE):
            yield device, indices[start : start + _VARIABLES_PER_UPDATE]


def _counter(name: str, initial, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        initial,
        dtype=dtype,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name=name,
    )
