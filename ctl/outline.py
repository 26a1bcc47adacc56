"""The only place that knows which functions must not be part of a graph that has loops.

TensorFlow turns operations on a CPU into those of oneDNN one after the other. In a graph with loops
their order differs from process to process, and the gradient of a max-pooling that comes before its
max-pooling is left as it is: a convolutional network of ours took 1.7 times as long then. A
function that is not inlined has a graph of its own. To call it costs 0.05 to 0.1 ms in each step,
so only networks that have such layers do.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

_MAX_POOLING = (
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
)


def is_needed(model: keras.Model) -> bool:
    """Whether ``model`` has layers of max-pooling, and its variables are on a CPU."""
    on_cpu = "CPU" in model.trainable_variables[0].value.device.upper()
    return on_cpu and any(isinstance(layer, _MAX_POOLING) for layer in model._flatten_layers())


def apart(function: Callable) -> Callable:
    """``function`` as one that TensorFlow does not inline in the graph that calls it."""
    return tf.function(function, experimental_attributes={"_noinline": True})
