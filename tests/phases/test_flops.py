"""FLOPs of a step, against formulas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop, mlp
from keras import layers

from ctl.phases import flops

# The first layer has no gradient for its input.
OF_MLP = 2 * (2 * FEATURES * 8) + 3 * (2 * 8 * CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"accumulate_steps": 2}], ids=str)
def test_of_a_step(mirrored, options):
    for replicas in (1, 2):
        loop = make_loop(mirrored(replicas), **options)
        assert loop.step.flops is None
        loop.traced()
        assert loop.step.flops == OF_MLP


def test_they_are_unknown(mirrored):
    data = tf.data.Dataset.from_tensor_slices((np.ones([8, FEATURES], "f"), np.zeros(8, int)))
    loop = make_loop(mirrored(1), data=data.batch(4))  # the last batch might be smaller
    loop.traced()
    assert loop.step.flops is None


def counted(model, *shape):
    """FLOPs of the forward pass, and of both, for a batch of 2."""
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, [x, *variables])

    spec = tf.TensorSpec([2, *shape])
    forward = tf.function(lambda x: model(x)).get_concrete_function(spec)
    graphs = forward.graph, both.get_concrete_function(spec).graph
    return [flops.count(graph.get_operations()) for graph in graphs]


@pytest.mark.parametrize(
    ("layer", "shape", "products"),
    [
        (layers.Conv2D(5, 3, strides=2, padding="same"), [8, 6, 4], 4 * 3 * 5 * (9 * 4)),
        (layers.DepthwiseConv2D(3, depth_multiplier=2), [8, 6, 4], 6 * 4 * 8 * 9),
        (layers.Conv2DTranspose(5, 3, strides=2), [4, 3, 2], 4 * 3 * 2 * 9 * 5),
        (layers.Conv1D(5, 3), [8, 4], 6 * 5 * (3 * 4)),
        (layers.Conv3D(5, 2), [4, 4, 4, 3], 27 * 5 * (8 * 3)),
        (layers.EinsumDense("abc,cd->abd", output_shape=[None, 7]), [5, 3], 5 * 3 * 7),
        (layers.Dense(7), [5, 3], 5 * 3 * 7),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, layers.Layer) else "",
)
def test_of_a_layer(layer, shape, products):
    """Each of the three passes has as many."""
    model = keras.Sequential([keras.Input(shape), layer])
    assert counted(model, *shape) == [2 * 2 * products, 3 * 2 * 2 * products]


def test_what_a_graph_calls_is_unknown():
    model = keras.Sequential([keras.Input([5, 3]), layers.GRU(2, use_cudnn=False)])
    assert counted(model, 5, 3)[0] is None
    grouped = keras.Sequential([keras.Input([8, 6, 4]), layers.Conv2D(6, 3, groups=2)])
    assert counted(grouped, 8, 6, 4)[0] is None  # Keras makes a function of its own
    assert counted(mlp(), FEATURES)[0] == 2 * (2 * FEATURES * 8 + 2 * 8 * CLASSES)
