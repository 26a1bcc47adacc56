"""Trains a model of a --kind in a --loop, on request of `model_kinds.py`.

The first answer has ``jit_compile``, and the ``seconds`` in which the loop was made: ctl's rule
looks at the model then.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command

if TYPE_CHECKING:
    from kinds import Kind

with group("What is trained"):
    _KIND = flags.DEFINE_string("kind", "mlp", "a name of `kinds.KINDS`")
    _LOOP = flags.DEFINE_enum(
        "loop", "ctl", ["ctl", "ctl_off", "plain"], "ctl, also without XLA, or a plain loop"
    )


def _plain(kind: Kind) -> tuple[Callable[[int], float], bool]:
    """The loop of TensorFlow's tutorials, as `plain_loop.py`."""
    import keras
    import tensorflow as tf

    model, optimizer = kind.model, keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = tf.data.Dataset.from_tensor_slices((kind.features, kind.labels)).cache()
    data = data.shuffle(len(kind.labels)).repeat().batch(kind.batch, drop_remainder=True)
    iterator = iter(data.prefetch(tf.data.AUTOTUNE))

    @tf.function
    def train_steps(steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):
            features, labels = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                loss = loss_of(labels, logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            accuracy.update_state(labels, logits)
            total += loss
        return total / tf.cast(steps, tf.float32)

    def train(steps: int) -> float:
        loss = float(train_steps(tf.constant(steps)))
        accuracy.result(), accuracy.reset_state()
        return loss

    return train, False


def _of_ctl(kind: Kind) -> tuple[Callable[[int], float], bool]:
    import keras

    import ctl

    step = ctl.TrainStep(
        kind.model,
        keras.optimizers.Adam(1e-3),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=False if _LOOP.value == "ctl_off" else None,
    )
    data = ctl.data.InMemory((kind.features, kind.labels), global_batch_size=kind.batch)
    loop = ctl.Loop(step, data)

    def train(steps: int) -> float:
        return loop.train(loop.global_step + steps, progress=False)["loss"]

    return train, bool(step.jit_compile)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build() -> tuple[dict[str, Any], Any]:
    import kinds

    import ctl.loop  # noqa: F401 - counts for all

    imported = _peak_bytes()
    kind = kinds.make(_KIND.value)
    began = time.perf_counter()
    train, compiled = (_plain if _LOOP.value == "plain" else _of_ctl)(kind)
    made = time.perf_counter() - began

    def reply(steps: int) -> dict[str, Any]:
        """Trains; returns wall seconds, CPU seconds of all threads, the mean loss, and the most
        memory that the process has held beyond what it had imported."""
        start, cpu = time.perf_counter(), time.process_time()
        loss = train(steps)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "loss": loss,
            "peak_bytes": _peak_bytes() - imported,
        }

    return {"seconds": made, "jit_compile": compiled}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), sys.modules["__main__"].__doc__)
