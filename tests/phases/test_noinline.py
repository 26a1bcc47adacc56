"""Steps of networks with max-pooling are functions of their own: what is in the graph, and that
they train as others do."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, make_loop, mlp, sgd

from ctl.data import InMemory
from ctl.loop import Loop
from ctl.phases import noinline


def pooling() -> keras.Model:
    keras.utils.set_random_seed(3)
    inner = keras.Sequential([keras.layers.MaxPooling2D(2), keras.layers.Flatten()])
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), inner, keras.layers.Dense(3)]
    return keras.Sequential([keras.Input([8, 8, 1]), *layers])


def pooling_loop(strategy, accumulate_steps: int = 1) -> Loop:
    random = np.random.default_rng(5)
    images = random.normal(size=(48, 8, 8, 1)).astype(np.float32)
    data = InMemory((images, random.integers(0, 3, 48)), global_batch_size=16)
    return make_loop(
        strategy, model=pooling, optimizer=sgd(), data=data, accumulate_steps=accumulate_steps
    )


def test_needed_where_there_is_max_pooling_and_one_replica(mirrored):
    assert noinline.is_needed(tf.distribute.get_strategy(), pooling())
    assert noinline.is_needed(mirrored(1), pooling())
    assert not noinline.is_needed(mirrored(2), pooling())
    assert not noinline.is_needed(mirrored(1), mlp())


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_its_gradient_is_in_no_graph_with_loops(mirrored, accumulate_steps):
    library = pooling_loop(mirrored(1), accumulate_steps).traced().graph.as_graph_def().library
    pools = [f for f in library.function if any(n.op == "MaxPoolGrad" for n in f.node_def)]
    assert pools
    for function in pools:
        assert function.attr["_noinline"].b
        assert not [n.op for n in function.node_def if n.op in ("While", "StatelessWhile")]


@pytest.mark.slow
def test_trains_as_one_replica_without(mirrored, monkeypatch):
    monkeypatch.setattr(noinline, "is_needed", lambda *_: False)
    plain = pooling_loop(mirrored(1))
    loss = plain.train(5)["loss"]
    monkeypatch.setattr(noinline, "is_needed", lambda *_: True)
    for replicas, accumulate_steps in ((1, 2), (2, 1)):
        loop = pooling_loop(mirrored(replicas), accumulate_steps)
        assert loop.train(5)["loss"] == pytest.approx(loss, rel=1e-5)
        weights = loop.step.model.get_weights(), plain.step.model.get_weights()
        assert largest_difference(*weights) <= 1e-6


@pytest.mark.compiled_update
def test_a_loop_is_freed_without_the_garbage_collector(mirrored):
    loop = pooling_loop(mirrored(1))
    loop.train(2)
    freed = weakref.ref(loop)
    gc.disable()
    try:
        del loop
        assert freed() is None
    finally:
        gc.enable()
