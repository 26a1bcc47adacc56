"""Gradient accumulation: micro-batches go through the model one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl import flops, noinline, replicas, share
from ctl.checks import checked_gradients
from ctl.reduce import crossing
from ctl.user_code import graph_function

if TYPE_CHECKING:
    from ctl.step import TrainStep

Gradients = list[tf.Tensor | None]


def _gradient_fn(step: TrainStep) -> Callable:
    """`TrainStep.loss_and_gradients` with a third argument, see `ctl.seeds.Seeds.place`.

    Make it anew for each pass: functions keep their traces, and what a step does in its second pass
    may depend on a Python value that it has changed since its first.
    """

    def placed(batch: Any, divisor: Any, place: tf.Tensor) -> Any:
        with step.seeds.inside(place), flops.counted(step, batch):
            return step.loss_and_gradients(batch, divisor)

    if step.jit_compile:
        return graph_function(placed, jit_compile=True)
    if step.noinline and step.accumulate_steps > 1:  # the loop over micro-batches calls it
        return noinline.noinline(placed)
    return placed


def micro_steps(step: TrainStep, batch: Any, divisor: Any) -> tuple[tf.Tensor, Gradients]:
    """The loss and the gradients of all micro-batches of ``batch``, the examples of a replica, both
    divided by ``divisor``; gradients of several are in float32 at least. Updates the metrics."""
    run = functools.partial(_micro_step, step, _gradient_fn(step))
    if step.accumulate_steps == 1:
        return run(batch, divisor, 0)
    return _several(step, run, batch, divisor)


def _several(
    step: TrainStep, run: Callable, batch: Any, divisor: Any
) -> tuple[tf.Tensor, Gradients]:
    """See `micro_steps`, which AutoGraph converts in less time without this."""
    no_gradient = [False] * len(step.trained)

    def body(micro_batch: Callable, part: Any, loss: Any, totals: Any) -> tuple[Any, Any, Any]:
        more, gradients = run(micro_batch(part), divisor, part)
        no_gradient[:] = [g is None for g in gradients]
        pairs = zip(totals, gradients, strict=True)
        totals = [t if g is None else t + share.widened(g) for t, g in pairs]
        return part + 1, loss + more, totals

    # Sums of float16 overflow early.
    loss, totals = 0.0, [tf.zeros(v.shape, share.wide(v.dtype)) for v in step.trained]
    # Fewer micro-batches than asked for, if there are fewer examples.
    groups = share.micro_batches(batch, step.accumulate_steps)
    done = sum(parts for parts, _ in groups)
    with replicas.drawing_alike(step.parts.layer, done, step.accumulate_steps):
        for parts, micro_batch in groups:
            # One iteration at a time needs the memory of one micro-batch only.
            _, loss, totals = tf.while_loop(
                lambda part, *_, parts=parts: part < parts,
                functools.partial(body, micro_batch),
                (0, loss, totals),
                parallel_iterations=1,
            )
    return loss, [None if no else t for t, no in zip(totals, no_gradient, strict=True)]


def _micro_step(
    step: TrainStep, gradient_fn: Callable, batch: Any, divisor: Any, number: int | tf.Tensor
) -> tuple[tf.Tensor, Gradients]:
    """The loss and the gradients of micro-batch ``number``, see `micro_steps`."""
    computed, empty = share.filled(batch)
    if empty is not None and step.synchronizes:
        share.refuse_empty(empty)
    in_graph = step.accumulate_steps > 1 or bool(step.jit_compile)
    counted = step.parts.counted_unless(empty, *step.logged.variables)
    with counted, crossing(divisor, empty, step.options, in_graph):
        loss, gradients, outputs = gradient_fn(computed, divisor, step.seeds.place(number))
    gradients = checked_gradients(step, gradients, step.trained)
    (loss, gradients), outputs = share.dropped(empty, (loss, gradients), outputs)
    if outputs is not None:
        step.update_metrics(batch, outputs)
    return loss, gradients
