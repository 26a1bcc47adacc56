"""Frees graphs that TensorFlow would keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python.framework import ops


@contextlib.contextmanager
def freed_afterwards() -> Iterator[None]:
    """Forgets the gradients of each `tf.custom_gradient` that graphs use in this context.

    TensorFlow registers them for ever, Keras uses them, and each keeps the graph that it is in.
    Outside of the context, these graphs can be called, but not differentiated.
    """
    gradients = ops.gradient_registry._registry  # private; without it, all tests fail
    before = set(gradients)
    try:
        yield
    finally:
        for name in gradients.keys() - before:
            if name.startswith("CustomGradient-"):
                del gradients[name]
