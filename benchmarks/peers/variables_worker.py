"""Trains a network of one matrix, cut into --variables variables, on request of `model_size.py`.

The bytes are the same for every number of variables. ``step`` is the whole step; ``own`` is the
model's part of it, forward and backward, without the all-reduce and the update.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from absl import flags
from lines import answerer, serve

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _VARIABLES = flags.DEFINE_integer(
        "variables", 10, "into which the matrix is cut", lower_bound=1
    )
    _ROWS = flags.DEFINE_integer("rows", 1000, "of the matrix, which has as many columns")
    _BATCH = flags.DEFINE_integer("batch", 8, "examples of a replica")
    _REPLICAS = flags.DEFINE_integer("replicas", 1, "of one process", lower_bound=1)
    _JIT = flags.DEFINE_boolean("jit_compile", False, "compile the step with XLA")


def make_loops() -> dict[str, Any]:
    """The loops of ``step`` and of ``own``."""
    import keras
    import numpy as np
    import tensorflow as tf

    import ctl

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

    class Own(ctl.TrainStep):
        """The step without all-reduce and update."""

        def reduce(self, loss, count, gradients, before):
            return loss, count, gradients

        def apply(self, gradients, finite=None):
            with tf.control_dependencies([g for g in gradients if g is not None]):
                self.global_step.assign_add(1)

    placement = ctl.make_strategy(replicas=_REPLICAS.value)
    rng = np.random.default_rng(0)
    examples = 64 * _BATCH.value
    images = rng.normal(size=(examples, _ROWS.value)).astype("float32")
    arrays = images, rng.integers(_ROWS.value, size=examples)
    loops = {}
    for name, kind in (("step", ctl.TrainStep), ("own", Own)):
        keras.utils.set_random_seed(1)
        with placement.strategy.scope():
            model = keras.Sequential([keras.Input([_ROWS.value]), Matrix()])
            step = kind(
                model,
                keras.optimizers.Adam(1e-3),
                options=placement.options,
                jit_compile=_JIT.value,
            )
        data = ctl.data.InMemory(arrays, global_batch_size=_BATCH.value * _REPLICAS.value)
        loops[name] = ctl.Loop(step, data, strategy=placement.strategy, steps_per_loop=sys.maxsize)
    return loops


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> None:
    answer = answerer()
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

    serve({"gradient_bytes": 4 * _ROWS.value**2}, reply, answer)


if __name__ == "__main__":
    run_command(main, sys.modules["__main__"].__doc__)
