"""Prints and draws a learning rate schedule: ``python -m ctl.schedule``.

The curve is drawn by calling the schedule itself, the same code as in training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from ctl.base.console import load_tensorflow, write_file
from ctl.base.curves import count
from ctl.base.svg import document, line, rect, shorten, text, ticks
from ctl.flags.durations import check_positive
from ctl.flags.groups import define_schedule_flags, schedule_arguments
from ctl.flags.parsing import check_flags, group, run_command

if TYPE_CHECKING:
    from ctl.schedule.schedules import Schedule

flags.disclaim_key_flags()

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 690, 104, 344  # The frame of the curve.

_LIGHT = {".curve": "fill: none; stroke: #0969da; stroke-width: 2; stroke-linejoin: round"}
_DARK = {".curve": "stroke: #4493f8"}


_USAGE = """
Prints the learning rate of a schedule at a few steps, and draws it.

  python -m ctl.schedule --schedule=cosine --learning_rate=3e-3 --warmup=1ep --plot=rate.svg
  python -m ctl.schedule --schedule=piecewise --boundaries=3ep,7ep --rates=1e-3,1e-4,1e-5
"""


def run() -> None:
    """The command: parses the flags, prints a table and, with ``--plot``, draws the schedule."""
    define_schedule_flags()
    with group("Picture"):
        flags.DEFINE_string("plot", None, "SVG file to write (default: print the table only).")
        flags.DEFINE_float("epochs", 12.0, "Length of the training in epochs.")
        flags.DEFINE_integer(
            "train_steps",
            None,
            "Length of the training in steps (default: --epochs times --steps_per_epoch).",
            lower_bound=1,
        )
        flags.DEFINE_float("steps_per_epoch", 156.0, "Updates per epoch; may be a fraction.")
        flags.DEFINE_integer(
            "global_batch_size", None, "Examples per update, for --lr_scaling (default: none)."
        )
    check_flags(("epochs", "steps_per_epoch"), _check_length)
    run_command(_main, _USAGE)


def _check_length(epochs: float, steps_per_epoch: float) -> None:
    check_positive("--epochs", epochs)
    check_positive("--steps_per_epoch", steps_per_epoch)


def _main() -> None:
    load_tensorflow()  # slow, so after the flags are checked

    import tensorflow as tf

    from ctl.schedule.schedules import make_schedule

    tf.config.set_visible_devices([], "GPU")  # not needed, and a training may be using it
    steps_per_epoch = flags.FLAGS.steps_per_epoch
    total_steps = flags.FLAGS.train_steps or math.ceil(flags.FLAGS.epochs * steps_per_epoch)
    schedule = make_schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        global_batch_size=flags.FLAGS.global_batch_size,
        **schedule_arguments(),
    )
    print(table(schedule, total_steps, steps_per_epoch))
    if flags.FLAGS.plot:
        write_file("plot", flags.FLAGS.plot, draw(schedule, total_steps, steps_per_epoch))


def table(schedule: Schedule, total_steps: int, steps_per_epoch: float) -> str:
    """A text table of the rate, one line per step: at eighths of the training, at the end of the
    warm-up, and around boundaries."""
    steps = {total_steps * i // 8 for i in range(8)} | {schedule.warmup_steps, total_steps - 1}
    for boundary in getattr(schedule, "boundaries", ()):
        steps |= {boundary - 1, boundary}
    lines = [f"{_name(schedule)}: {_arguments(schedule)}", "      step    epoch  learning rate"]
    for step in sorted(step for step in steps if step < total_steps):
        rate = float(schedule(step))
        lines.append(f"{step:>10,} {step / steps_per_epoch:>8.2f}  {rate:.6g}")
    return "\n".join(lines)


def draw(schedule: Schedule, total_steps: int, steps_per_epoch: float) -> str:
    """An SVG document: the rate over ``total_steps`` steps, with an axis of epochs at the top."""
    import tensorflow as tf

    from ctl.schedule.schedules import Exponential, Piecewise

    samples = min(total_steps, RIGHT - LEFT)
    steps = [total_steps * i // samples for i in range(samples)]
    in_a_graph = tf.function(lambda at: tf.map_fn(schedule, at, fn_output_signature=tf.float32))
    rates = in_a_graph(tf.constant(steps, tf.int64)).numpy().tolist()
    after_warmup = [r for s, r in zip(steps, rates, strict=True) if s >= schedule.warmup_steps]
    y, y_ticks = _rate_axis(after_warmup or rates, isinstance(schedule, (Exponential, Piecewise)))
    epochs = total_steps / steps_per_epoch

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / total_steps

    # A rate is held for the whole step (M, then horizontal, vertical, ...).
    path = f"M{LEFT} {y(rates[0]):.1f}"
    for step, rate in zip(steps[1:], rates[1:], strict=True):
        path += f"H{x(step):.1f}V{y(rate):.1f}"
    parts = [text(LEFT, 30, f"Learning rate: {_name(schedule)}", "title")]
    parts.append(text(LEFT, 51, shorten(_arguments(schedule), RIGHT - LEFT)))
    for rate in y_ticks:
        parts.append(line(LEFT, y(rate), RIGHT, y(rate)))
        parts.append(text(LEFT - 8, y(rate) + 4, _rate(rate), "y"))
    for tick in ticks(total_steps, least=1):
        parts.append(line(x(tick), TOP, x(tick), BOTTOM))
        parts.append(text(x(tick), BOTTOM + 18, count(tick), "x"))
    for epoch in ticks(epochs):
        at = x(epoch * steps_per_epoch)
        parts.append(f'<path class="frame" d="M{at:.1f} {TOP}v-4"/>')
        parts.append(text(at, TOP - 10, f"{epoch:g}", "x"))
    middle = (LEFT + RIGHT) / 2
    parts.append(text(middle, TOP - 28, "epoch", "x"))
    parts.append(text(middle, BOTTOM + 38, "step", "x"))
    parts.append(rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, "frame"))
    parts.append(f'<path class="curve" d="{path}H{RIGHT}"/>')
    title = f"Learning rate schedule {_name(schedule)}: {_arguments(schedule)}"
    return document("ctl-schedule", WIDTH, HEIGHT, parts, _LIGHT, _DARK, title)


def _rate_axis(
    rates: Sequence[float], by_factors: bool
) -> tuple[Callable[[float], float], list[float]]:
    """The y coordinate of a rate, and the rates to label.

    The axis is logarithmic if rates change ``by_factors``, and by 10 or more in all. Rates below
    the axis, early in a long warm-up, are drawn at its bottom.
    """
    low, high = min(rates), max(rates)
    if not (by_factors and 0 < 9.99 * low <= high):
        ceiling = 1.05 * high or 1.0
        return lambda rate: BOTTOM - (BOTTOM - TOP) * rate / ceiling, ticks(ceiling)
    bottom, top = math.log10(low) - 0.2, math.log10(high) + 0.2
    digits = (1, 2, 5) if top - bottom < 2.5 else (1,)
    decades = range(math.floor(bottom), math.ceil(top) + 1)
    rates_at = [digit * 10.0**decade for decade in decades for digit in digits]

    def y(rate: float) -> float:
        above = math.log10(rate) - bottom if rate > 0 else 0.0
        return BOTTOM - (BOTTOM - TOP) * max(0.0, above) / (top - bottom)

    return y, [tick for tick in rates_at if bottom <= math.log10(tick) <= top]


def _name(schedule: Schedule) -> str:
    return type(schedule).__name__


def _arguments(schedule: Schedule) -> str:
    values = dataclasses.asdict(schedule)
    values["warmup_steps"] = values.pop("warmup_steps")  # last, after the rates
    return " ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: float | str | None | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return ",".join(_value(item) for item in value)
    return _rate(value) if isinstance(value, float) else str(value)


def _rate(rate: float) -> str:
    """Below 0.01 as 1e-3, rather than 0.001 or 1e-03."""
    if rate == 0 or 0.01 <= rate < 1e4:
        return f"{rate:.4g}"
    mantissa, exponent = f"{rate:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
