"""Trains a network of one matrix, cut into --variables variables, on request of `model_size.py`.

The bytes are the same for every number of variables. ``step`` is the whole step; ``own`` is the
model's part of it, forward and backward, without the all-reduce and the update. With --plain, both
are loops as tutorials write them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _VARIABLES = flags.DEFINE_integer(
        "variables", 10, "into which the matrix is cut", lower_bound=1
    )
    _ROWS = flags.DEFINE_integer("rows", 1000, "of the matrix, which has as many columns")
    _BATCH = flags.DEFINE_integer("batch", 8, "examples of a replica")
    _REPLICAS = flags.DEFINE_integer("replicas", 1, "of one process", lower_bound=1)
    _JIT = flags.DEFINE_boolean("jit_compile", False, "compile the step with XLA")
    _PLAIN = flags.DEFINE_boolean("plain", False, "a plain loop, without ctl")


def make_loops() -> dict[str, Any]:
    """The loops of ``step`` and of ``own``."""
    import keras
    import numpy as np
    import tensorflow as tf

    class Matrix(keras.layers.Layer):
        """[batch, rows] times the matrix [rows, rows], which all variables make up together."""

        def build(self, shape: tuple[int | None, ...]) -> None:
            sizes = np.diff(np.linspace(0, _ROWS.value**2, _VARIABLES.value + 1).astype(int))
            self.parts = [
                self.add_weight(shape=(int(size),), initializer="random_normal", name=f"part{i}")
                for i, size in enumerate(sizes)
            ]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            matrix = tf.concat([part.value for part in self.parts], 0)
            return tf.matmul(x, tf.reshape(matrix, [_ROWS.value, _ROWS.value]))

    def make_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input([_ROWS.value]), Matrix()])

    rng = np.random.default_rng(0)
    examples = 64 * _BATCH.value
    images = rng.normal(size=(examples, _ROWS.value)).astype("float32")
    arrays = images, rng.integers(_ROWS.value, size=examples)
    return (_plain if _PLAIN.value else _of_ctl)(make_model, arrays)


def _of_ctl(make_model: Callable[[], Any], arrays: tuple) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    import ctl

    class Own(ctl.TrainStep):
        """The step without all-reduce and update."""

        def reduce(self, loss, count, gradients, snapshot):
            return loss, count, gradients

        def apply(self, gradients, finite=None):
            with tf.control_dependencies([g for g in gradients if g is not None]):
                self.global_step.assign_add(1)

    placement = ctl.make_strategy(replicas=_REPLICAS.value)
    loops = {}
    for name, kind in (("step", ctl.TrainStep), ("own", Own)):
        with placement.strategy.scope():
            step = kind(
                make_model(),
                keras.optimizers.Adam(1e-3),
                options=placement.options,
                jit_compile=_JIT.value,
            )
        data = ctl.data.InMemory(arrays, global_batch_size=_BATCH.value * _REPLICAS.value)
        loops[name] = ctl.Loop(step, data, strategy=placement.strategy, steps_per_loop=sys.maxsize)
    return loops


def _plain(make_model: Callable[[], Any], arrays: tuple) -> dict[str, Any]:
    """What tutorials write for one device: one `tf.function`, and Keras's optimizer."""
    import keras
    import tensorflow as tf

    class Loop:
        def __init__(self, updates: bool):
            self.model, self.optimizer = make_model(), keras.optimizers.Adam(1e-3)
            self.optimizer.build(self.model.trainable_variables)
            self.updates, self.global_step = updates, 0
            data = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[0])).repeat()
            self.batches = iter(data.batch(_BATCH.value, drop_remainder=True).prefetch(2))

        @tf.function
        def run(self, steps: tf.Tensor) -> tf.Tensor:
            loss = 0.0
            for _ in tf.range(steps):
                images, labels = next(self.batches)
                with tf.GradientTape() as tape:
                    logits = self.model(images, training=True)
                    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                    loss = tf.reduce_mean(losses)
                gradients = tape.gradient(loss, self.model.trainable_variables)
                if self.updates:
                    self.optimizer.apply(gradients, self.model.trainable_variables)
                else:
                    loss += 0.0 * tf.add_n([tf.reshape(g, [-1])[0] for g in gradients])
            return loss

        def train(self, until: int) -> None:
            self.run(tf.constant(until - self.global_step)).numpy()
            self.global_step = until

    return {"step": Loop(updates=True), "own": Loop(updates=False)}


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def build() -> tuple[dict[str, Any], Any]:
    loops = make_loops()

    def reply(what: str, steps: int) -> dict[str, Any]:
        """Trains; returns ``seconds``, and the memory of this process, now and at most so far."""
        loop = loops[what]
        start = time.perf_counter()
        loop.train(loop.global_step + steps)
        return {
            "seconds": time.perf_counter() - start,
            "resident_bytes": resident_bytes(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    return {"gradient_bytes": 4 * _ROWS.value**2}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), sys.modules["__main__"].__doc__)
