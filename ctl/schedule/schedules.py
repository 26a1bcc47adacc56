"""Learning rate schedules: functions from the step to the rate.

``schedule(step)`` is the float32 rate of the update that follows ``step`` updates, so the first
update gets ``schedule(0)``. It works inside and outside of graphs, and depends on the step alone;
`Plateau` depends on evaluations, too. Each schedule is also a
`keras.optimizers.schedules.LearningRateSchedule`. `ctl.schedule.plot` prints and draws one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from ctl.base.autograph import AutographMethods
from ctl.base.foreign_names import refuse_unknown
from ctl.base.names import check_name
from ctl.errors import UsageError
from ctl.flags import defaults
from ctl.flags.durations import (
    OF_A_LENGTH,
    SCHEDULES,
    check_increasing,
    check_pieces,
    check_positive,
    check_rate,
    check_unused,
    rates_from,
    scale_learning_rate,
    steps_from,
)
from ctl.schedule.patience import Patience

_serializable = keras.saving.register_keras_serializable(package="ctl")

# How `Schedule` checks a field.
_RATE = {"check": check_rate}
_POSITIVE: dict[str, Any] = {"check": check_positive}


@dataclasses.dataclass(frozen=True)
class Schedule(AutographMethods, keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up, then `decay`, which subclasses define.

    During the first W = ``warmup_steps`` updates, the rate is multiplied by (step + 1) / (W + 1):
    it rises in equal parts, the first update has a rate above 0, and step W is the first at the
    full rate (the gradual warm-up of Goyal et al. 2017, section 2.2).

    Steps may be int32 or int64 tensors, variables or Python integers. float32 is exact for steps up
    to 2^24 only, so the rate is computed in float64 and rounded to float32 at the end. This takes
    at most 16 scalar operations, 1 to 3 microseconds of a step on a CPU.

    Raises:
        UsageError: an argument is out of range.
    """

    warmup_steps: int = dataclasses.field(default=0, kw_only=True)

    def __new__(cls, *_: Any, **named: Any) -> Schedule:
        refuse_unknown(cls, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.warmup_steps != int(self.warmup_steps):
            raise UsageError(
                f"warm-up must be a whole number of steps >= 0, got {self.warmup_steps}"
            )
        for field in dataclasses.fields(self):
            if check := field.metadata.get("check"):
                name = field.metadata.get("name", field.name.replace("_", " "))
                check(name, getattr(self, field.name))

    def __call__(self, step: tf.Tensor | tf.Variable | int) -> tf.Tensor:
        step = tf.cast(step, tf.float64)
        if self.warmup_steps == 0:
            return tf.cast(self.decay(step), tf.float32)
        rate = self.decay(tf.maximum(step - float(self.warmup_steps), 0.0))
        rate *= tf.minimum((step + 1.0) / (self.warmup_steps + 1.0), 1.0)
        return tf.cast(rate, tf.float32)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        """The float64 rate, ``step`` updates (float64) after the end of the warm-up."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """The arguments, for a saved model."""
        return dataclasses.asdict(self)


@_serializable
@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """The same rate throughout."""

    learning_rate: float = dataclasses.field(metadata=_RATE)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return tf.constant(self.learning_rate, tf.float64)


@_serializable
@dataclasses.dataclass(frozen=True)
class Piecewise(Schedule):
    """``values[0]`` before step ``boundaries[0]``, ``values[1]`` from that step on, and so on.

    The step of a boundary has the new rate, so ``3 * steps_per_epoch`` means "before epoch 3",
    counted from 0; `make_schedule` takes ``"3ep"``, too. (In
    `keras.optimizers.schedules.PiecewiseConstantDecay` it has the old rate.) Boundaries are counted
    from step 0, not from the end of the warm-up, which must end before the first boundary.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "boundaries", tuple(int(b) for b in self.boundaries))
        object.__setattr__(self, "values", rates_from("rates", self.values))
        check_pieces(self.boundaries, self.values)
        check_increasing(self.boundaries, self.boundaries)
        if self.boundaries and self.warmup_steps >= self.boundaries[0]:
            raise UsageError(
                f"a warm-up of {self.warmup_steps} steps must end before the first boundary, step "
                f"{self.boundaries[0]}"
            )

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        boundaries = [float(b - self.warmup_steps) for b in self.boundaries]
        passed = tf.cast(step >= tf.constant(boundaries, tf.float64), tf.int32)
        return tf.gather(tf.constant(self.values, tf.float64), tf.reduce_sum(passed))


@dataclasses.dataclass(frozen=True)
class _ToEnd(Schedule):
    """From ``learning_rate`` after the warm-up to ``end_learning_rate`` from ``total_steps`` on."""

    learning_rate: float = dataclasses.field(metadata=_RATE)
    total_steps: int = dataclasses.field(metadata=_POSITIVE | {"name": "the number of steps"})
    end_learning_rate: float = dataclasses.field(default=0.0, kw_only=True, metadata=_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_warmup(self.warmup_steps, self.total_steps)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        steps = float(self.total_steps - self.warmup_steps)
        left = self.shape(tf.maximum(steps - step, 0.0) / steps)
        return self.end_learning_rate + (self.learning_rate - self.end_learning_rate) * left

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        """The share of the decay that is left, from 1 to 0, when a share ``left`` of the steps is
        left. Both are float64."""
        raise NotImplementedError


@_serializable
@dataclasses.dataclass(frozen=True)
class Cosine(_ToEnd):
    """end + (rate - end) * (1 + cos(pi * t / T)) / 2, for T steps after the warm-up.

    Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016, equation 5,
    without restarts.
    """

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        # (1 + cos(pi * (1 - left))) / 2, in a form that is accurate near 0.
        return tf.square(tf.sin(left * (math.pi / 2)))


@_serializable
@dataclasses.dataclass(frozen=True)
class Polynomial(_ToEnd):
    """end + (rate - end) * (1 - t / T) ** power, for T steps after the warm-up."""

    power: float = dataclasses.field(default=1.0, kw_only=True, metadata=_POSITIVE)

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return left if self.power == 1.0 else left**self.power


@_serializable
@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """rate * decay_rate ** (t / decay_steps), t steps after the warm-up; continuous, it never ends.

    A ``decay_rate`` above 1 makes the rate grow, as in a learning rate range test (Smith, "Cyclical
    Learning Rates for Training Neural Networks", 2015, section 3.3).
    """

    learning_rate: float = dataclasses.field(metadata=_RATE)
    decay_rate: float = dataclasses.field(metadata=_POSITIVE)
    decay_steps: int = dataclasses.field(metadata=_POSITIVE)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return self.learning_rate * tf.exp(step * (math.log(self.decay_rate) / self.decay_steps))


@_serializable
@dataclasses.dataclass(frozen=True)
class InverseSqrt(Schedule):
    """rate * sqrt((warmup_steps + 1) / (step + 1)) after the warm-up, without end.

    Vaswani et al., "Attention Is All You Need", 2017, equation 3, with two differences:
    ``learning_rate`` is the peak instead of a power of the width of the model, and steps count
    from 0 instead of 1.
    """

    learning_rate: float = dataclasses.field(metadata=_RATE)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return self.learning_rate * tf.math.rsqrt(step / (self.warmup_steps + 1.0) + 1.0)


@_serializable
@dataclasses.dataclass(frozen=True)
class Plateau(Schedule):
    """rate * factor ** k, at least ``end_learning_rate``, after k times in which a metric has not
    improved for ``patience`` evaluations.

    Like `keras.callbacks.ReduceLROnPlateau`, with the same defaults. `ctl.Loop`
    calls `evaluated` after each evaluation, and saves the memory in its checkpoints. ``metric``,
    ``mode``, ``min_delta`` and ``cooldown`` (in evaluations): see `ctl.schedule.patience.Patience`.
    """

    learning_rate: float = dataclasses.field(metadata=_RATE)
    metric: str = "loss"
    factor: float = defaults.PLATEAU_FACTOR
    patience: int = defaults.PLATEAU_PATIENCE
    mode: str | None = dataclasses.field(default=None, kw_only=True)
    min_delta: float = dataclasses.field(default=1e-4, kw_only=True)
    cooldown: int = dataclasses.field(default=0, kw_only=True)
    end_learning_rate: float = dataclasses.field(default=0.0, kw_only=True, metadata=_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_learning_rate > self.learning_rate:
            low, rate = self.end_learning_rate, self.learning_rate
            raise UsageError(f"end learning rate {low:g} is above the learning rate, {rate:g}")
        if not 0 < self.factor < 1:
            raise UsageError(f"factor must be between 0 and 1, got {self.factor}")
        patience = Patience(self.metric, self.patience, self.mode, self.min_delta, self.cooldown)
        object.__setattr__(self, "_patience", patience)  # no field, because it is no argument

    @property
    def memory(self) -> tf.Variable:
        """See `ctl.schedule.patience.Patience`."""
        return self._patience.memory

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """An evaluation action: remembers the results of the evaluation at ``step``.

        Raises:
            UsageError: ``results`` have no such metric.
        """
        if self._patience.evaluated(step, results):
            logging.info("learning rate: %.3g from step %d on", float(self(step)), step)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        factor = tf.constant(self.factor, tf.float64) ** self._patience.ended
        return tf.maximum(self.learning_rate * factor, self.end_learning_rate)


def _check_warmup(warmup: int, total: int) -> None:
    if warmup >= total:
        raise UsageError(
            f"a warm-up of {warmup} steps must be shorter than the training of {total} steps"
        )


def make_schedule(
    name: str,
    *,
    learning_rate: float | None = None,
    total_steps: int | None = None,
    steps_per_epoch: float | None = None,
    warmup_steps: int | str = 0,
    boundaries: Sequence[int | str] | None = None,
    values: Sequence[float | str] | None = None,
    decay_rate: float | None = None,
    decay_steps: int | str | None = None,
    end_learning_rate: float | None = None,
    power: float | None = None,
    metric: str | None = None,
    patience: int | None = None,
    global_batch_size: int | None = None,
    base_batch_size: int | None = None,
    scaling: str = "none",
) -> Schedule:
    """Makes the schedule ``name``, one of `ctl.flags.durations.SCHEDULES`.

    Durations (``warmup_steps``, ``boundaries``, ``decay_steps``) are steps, or text such as
    ``"0.5ep"`` for epochs of ``steps_per_epoch`` steps. ``total_steps`` is the length of the
    training. ``None`` means the default of the flags (`ctl.flags.defaults`). An option that the
    schedule does not use must be ``None``. ``scaling`` multiplies the whole curve, its end
    included; see `ctl.flags.durations.scale_learning_rate`.

    Raises:
        UsageError: an option is missing, unused or out of range.
    """
    check_name("schedule", name, SCHEDULES)
    check_unused(
        name,
        learning_rate=learning_rate,
        boundaries=boundaries,
        rates=values,
        end_learning_rate=end_learning_rate,
        power=power,
        decay_rate=decay_rate,
        decay_steps=decay_steps,
        plateau_metric=metric,
        plateau_patience=patience,
    )

    def scaled(rate: float) -> float:
        if scaling == "none":
            return rate
        if global_batch_size is None:
            raise UsageError(
                "scaling the learning rate needs the global batch size: give global_batch_size"
            )
        return scale_learning_rate(
            rate, global_batch_size, base_batch_size or defaults.BASE_BATCH_SIZE, scaling
        )

    def steps(what: str, duration: int | str) -> int:
        return steps_from(what, duration, steps_per_epoch)

    warmup = steps("warm-up", warmup_steps)
    if total_steps is not None:
        _check_warmup(warmup, total_steps)
    if name == "piecewise":
        if values is None:
            raise UsageError("the piecewise schedule needs rates, e.g. --rates=1e-3,1e-4,1e-5")
        return Piecewise(
            [steps("boundaries", b) for b in boundaries or ()],
            [scaled(rate) for rate in rates_from("rates", values)],
            warmup_steps=warmup,
        )
    rate = scaled(defaults.LEARNING_RATE if learning_rate is None else learning_rate)
    if name == "constant":
        return Constant(rate, warmup_steps=warmup)
    if name == "inverse_sqrt":
        return InverseSqrt(rate, warmup_steps=warmup)
    if name == "exponential":
        return Exponential(
            rate,
            defaults.DECAY_RATE if decay_rate is None else decay_rate,
            steps("decay steps", defaults.DECAY_STEPS if decay_steps is None else decay_steps),
            warmup_steps=warmup,
        )
    if name == "plateau":
        return Plateau(
            rate,
            defaults.PLATEAU_METRIC if metric is None else metric,
            defaults.PLATEAU_FACTOR if decay_rate is None else decay_rate,
            defaults.PLATEAU_PATIENCE if patience is None else patience,
            end_learning_rate=scaled(end_learning_rate or defaults.END_LEARNING_RATE),
            warmup_steps=warmup,
        )
    assert name in OF_A_LENGTH, f"{name} is in SCHEDULES, and has no branch here"
    if total_steps is None:
        raise UsageError(
            f"the {name} schedule needs the number of training steps: give total_steps"
        )
    end = scaled(defaults.END_LEARNING_RATE if end_learning_rate is None else end_learning_rate)
    if name == "cosine":
        return Cosine(rate, total_steps, end_learning_rate=end, warmup_steps=warmup)
    assert name == "polynomial", f"{name} is in OF_A_LENGTH, and has no branch here"
    return Polynomial(
        rate,
        total_steps,
        end_learning_rate=end,
        power=defaults.POWER if power is None else power,
        warmup_steps=warmup,
    )
