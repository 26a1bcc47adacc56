"""Is ctl faster than a plain loop, on small models of many kinds?

    python benchmarks/model_kinds.py
    python benchmarks/model_kinds.py --kinds=lstm,transformer --rounds=11 --json=out.json

All rows of a kind live in one process, and their blocks take turns. README.md says what each is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags
from processes import in_turn, machine, progress, summary, write

from ctl.base.names import check_name
from ctl.flags.parsing import group, run_command

if TYPE_CHECKING:
    from kinds import Kind

with group("What is trained"):
    _KINDS = flags.DEFINE_list("kinds", [], "any of `kinds.KINDS`; by default all")
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 7, "blocks of each row", lower_bound=1)
    _SECONDS = flags.DEFINE_float("seconds", 0.4, "of a block of the fastest row", lower_bound=0)
    _JSON = flags.DEFINE_string("json", None, "file for the results")

# Trains as many steps as it is told, and returns the mean loss.
Train = Callable[[int], float]


def plain(kind: Kind) -> Train:
    """The loop of TensorFlow's tutorials, as `peers/plain_loop.py`."""
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

    return train


def ours(kind: Kind, jit_compile: bool | None) -> Train:
    """`ctl.Loop`. If ``jit_compile`` is None, the rule decides."""
    import keras

    import ctl

    data = ctl.data.InMemory((kind.features, kind.labels), global_batch_size=kind.batch)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    adam = keras.optimizers.Adam(1e-3)
    step = ctl.TrainStep(kind.model, adam, metrics=metrics, jit_compile=jit_compile)
    loop = ctl.Loop(step, data)

    def train(steps: int) -> float:
        return loop.train(loop.global_step + steps, progress=False)["loss"]

    return train


def measure(name: str) -> dict[str, dict[str, Any]]:
    """Milliseconds per step of each row, and the seconds of its first step."""
    from kinds import make

    rows = {
        "ctl": ours(make(name), None),
        "ctl, XLA off": ours(make(name), False),
        "plain": plain(make(name)),
    }
    found: dict[str, dict[str, Any]] = {}
    for row, train in rows.items():
        progress(f"{name}: {row} begins")
        began = time.perf_counter()
        train(1)
        found[row] = {"first s": time.perf_counter() - began, "ms": [], "CPU ms": []}
        train(20)
    began = time.perf_counter()
    rows["ctl"](20)
    steps = max(5, int(20 * _SECONDS.value / (time.perf_counter() - began)))
    for number in range(-1, _ROUNDS.value):  # the first one warms up
        for row in in_turn(rows, max(number, 0)):
            progress(f"{name}, round {number + 1} of {_ROUNDS.value}: {row}")
            began, cpu = time.perf_counter(), time.process_time()
            rows[row](steps)
            if number >= 0:
                found[row]["ms"].append((time.perf_counter() - began) / steps * 1e3)
                found[row]["CPU ms"].append((time.process_time() - cpu) / steps * 1e3)
    progress("")
    return found


def main() -> None:
    import kinds

    for name in _KINDS.value:
        check_name("kind", name, kinds.KINDS)
    about = machine(os.getloadavg()[0])
    print(*(f"{key}={value}" for key, value in about.items()))
    header = f"{'first s':>9}{'ms':>9}{'CPU ms':>9}{'over plain, ms':>20}{'CPU ms':>20}"
    print(f"{'':15}{'':13}{header}")
    results = {}
    for name in _KINDS.value or kinds.KINDS:
        found = results[name] = measure(name)
        for row, of in found.items():
            line = f"{name:15}{row:13}{of['first s']:9.1f}"
            line += "".join(f"{statistics.median(of[key]):9.2f}" for key in ("ms", "CPU ms"))
            for key in ("ms", "CPU ms"):
                pairs = zip(of[key], found["plain"][key], strict=True)
                ratios = summary([a / b for a, b in pairs])
                line += f"{ratios['median']:8.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})"
            print(line, flush=True)
    write(_JSON.value, {"machine": about, "kinds": results})


if __name__ == "__main__":
    run_command(main, __doc__)
