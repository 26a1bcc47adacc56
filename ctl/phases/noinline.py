"""Keeps max-pooling out of graphs with loops, where TensorFlow may run its gradient slowly.

On a CPU, TensorFlow replaces operations by oneDNN operations, one after the other. In a graph with
loops, the order differs from process to process. If the gradient of a max-pooling comes before the
max-pooling itself, it is not replaced: one convolutional network took 1.7 times as long. A function
that is not inlined has a separate graph without loops. Calling it costs 0.05 to 0.1 ms per step, so
only networks with max-pooling use one.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from ctl.base.autograph import graph_function
from ctl.distributed.replicas import has_one_device, layers_of

_MAX_POOLING = (
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
)


def is_needed(strategy: tf.distribute.Strategy, model: keras.Model) -> bool:
    """Whether ``model`` has max-pooling layers and one replica runs on a CPU in this process.

    With several replicas, TensorFlow cuts the graph into parts. There, the order was right in each
    of 10 processes.
    """
    on_cpu = "CPU" in model.trainable_variables[0].value.device.upper()
    pools = any(isinstance(layer, _MAX_POOLING) for layer in layers_of(model))
    return on_cpu and pools and has_one_device(strategy)


def noinline(function: Callable) -> Callable:
    """Returns ``function`` as a `tf.function` that TensorFlow does not inline into its caller."""
    return graph_function(function, experimental_attributes={"_noinline": True})
