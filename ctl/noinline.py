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

from ctl.replicas import has_one_device, layers_of

_MAX_POOLING = (
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
)


def is_needed(strategy: tf.distribute.Strategy, model: keras.Model) -> bool:
    """Whether ``model`` has layers of max-pooling, and one replica on a CPU in this process. The
    graph of several is cut into parts, where the order was right in each of 10 processes."""
    on_cpu = "CPU" in model.trainable_variables[0].value.device.upper()
    pools = any(isinstance(layer, _MAX_POOLING) for layer in layers_of(model))
    return on_cpu and pools and has_one_device(strategy)


def noinline(function: Callable) -> Callable:
    """``function`` as one that TensorFlow does not inline in the graph that calls it."""
    return tf.function(function, experimental_attributes={"_noinline": True})
