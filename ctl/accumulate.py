"""Gradient accumulation: micro-batches go through the model one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl import replicas, share

Gradients = list[tf.Tensor | None]


def accumulated(
    micro_step: Callable[[Any], tuple[tf.Tensor, Gradients]],
    batch: Any,
    micro_batches: int,
    model: keras.Model,
    variables: Sequence[tf.Variable],
) -> tuple[tf.Tensor, Gradients]:
    """The sums of the losses and of the gradients of ``micro_batches`` parts of ``batch``.

    Args:
        micro_step: returns the loss of a micro-batch, a float32 scalar, and its gradients.
        batch: examples of this replica.
        micro_batches: at most this many; fewer if there are fewer examples.
        model: see `replicas.drawing_alike`.
        variables: one for each gradient.
    """
    no_gradient = [False] * len(variables)

    def body(micro_batch: Callable, part: Any, loss: Any, totals: Any) -> tuple[Any, Any, Any]:
        more, gradients = micro_step(micro_batch(part))
        no_gradient[:] = [g is None for g in gradients]
        totals = [t if g is None else t + g for t, g in zip(totals, gradients, strict=True)]
        return part + 1, loss + more, totals

    loss, totals = 0.0, [tf.zeros_like(v) for v in variables]
    groups = share.micro_batches(batch, micro_batches)
    done = sum(parts for parts, _ in groups)
    with replicas.drawing_alike(model, done, micro_batches):
        for parts, micro_batch in groups:
            # One iteration at a time needs the memory of one micro-batch only.
            _, loss, totals = tf.while_loop(
                lambda part, *_, parts=parts: part < parts,
                functools.partial(body, micro_batch),
                (0, loss, totals),
                parallel_iterations=1,
            )
    return loss, [None if no else t for t, no in zip(totals, no_gradient, strict=True)]
