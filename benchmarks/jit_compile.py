"""What does XLA gain in a step of one replica, in ctl and in a plain loop? On a CPU or a GPU.

    python benchmarks/jit_compile.py
    python benchmarks/jit_compile.py --model=convnet --batch=64,256 --steps=1000 --json=out.json

All rows live in one process, and their blocks take turns. On a GPU, it takes two minutes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from processes import in_turn, machine, progress, summary, write

from ctl.flags.parsing import group, run_command

with group("What is trained"):
    _MODEL = flags.DEFINE_list("model", ["dense", "convnet"], "models of ctl.jobs.models")
    _BATCH = flags.DEFINE_list("batch", ["64", "256"], "examples per step")
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "blocks of each row", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 300, "steps of a block", lower_bound=1)
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_EXAMPLES = 10_000
_ROWS = "ctl", "ctl, XLA", "plain", "plain, XLA", "fit, 50 steps a call"


def rows(model: str, batch: int) -> dict[str, Callable[[], None]]:
    """What trains a block of steps, by the name of its row."""
    import numpy as np

    random = np.random.default_rng(0)
    images = random.random((_EXAMPLES, 28, 28, 1), np.float32)
    data = images, random.integers(10, size=_EXAMPLES)
    makers = (ctl_row, ctl_row, plain_row, plain_row, fit_row)
    jit = (False, True, False, True, "auto")
    return {
        name: make(model, data, batch, how)
        for name, make, how in zip(_ROWS, makers, jit, strict=True)
    }


def new_model(name: str) -> tuple[Any, Any]:
    import keras

    import ctl

    keras.utils.set_random_seed(1)
    model = ctl.models.make_model(name, (28, 28, 1), 10)
    return model, keras.optimizers.SGD(0.01, momentum=0.9)


def ctl_row(name: str, data: Any, batch: int, jit: bool) -> Callable[[], None]:
    import ctl

    strategy = ctl.make_strategy("auto").strategy
    with strategy.scope():
        step = ctl.TrainStep(*new_model(name), jit_compile=jit)
    loop = ctl.Loop(step, ctl.data.InMemory(data, global_batch_size=batch), strategy=strategy)
    ends = itertools.count(_STEPS.value, _STEPS.value)
    return lambda: loop.train(next(ends), progress=False)


def plain_row(name: str, data: Any, batch: int, jit: bool) -> Callable[[], None]:
    import keras
    import tensorflow as tf

    model, optimizer = new_model(name)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(_EXAMPLES).repeat()
    batches = iter(dataset.batch(batch, drop_remainder=True).prefetch(2))

    @tf.function(jit_compile=jit)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def block() -> None:
        for batch in itertools.islice(batches, _STEPS.value):
            loss = step(*batch)
        loss.numpy()  # waits for the device

    return block


def fit_row(name: str, data: Any, batch: int, jit: str) -> Callable[[], None]:
    import keras

    model, optimizer = new_model(name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, steps_per_execution=50, jit_compile=jit)
    count = min(_EXAMPLES, _STEPS.value * batch) // batch
    images, labels = (array[: count * batch] for array in data)
    passes = _STEPS.value // count
    kept = {"batch_size": batch, "epochs": passes, "verbose": 0}

    def block() -> None:
        model.fit(images, labels, **kept)

    return block


def measure(blocks: dict[str, Callable[[], None]], what: str) -> dict[str, list[float]]:
    """Seconds of each block."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for number in range(-1, _ROUNDS.value):  # the first one compiles
        for name in in_turn(blocks, max(number, 0)):
            progress(f"{what}: round {number + 1} of {_ROUNDS.value}: {name}")
            began = time.perf_counter()
            blocks[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    progress("")
    return seconds


def main() -> None:
    import tensorflow as tf

    about: dict[str, Any] = machine(os.getloadavg()[0])
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus[:1]]
    about["device"] = details[0].get("device_name", "GPU") if details else "CPU"
    print(*(f"{key}={value}" for key, value in about.items()))
    print(f"{'':34}{'ms per step':>12}   over plain")
    results: dict[str, Any] = {}
    for model, batch in itertools.product(_MODEL.value, map(int, _BATCH.value)):
        what = f"{model}, {batch}"
        seconds = measure(rows(model, batch), what)
        results[what] = seconds
        for name, of in seconds.items():
            ratios = summary([a / b for a, b in zip(of, seconds["plain"], strict=True)])
            step = 1e3 * summary(of)["median"] / _STEPS.value
            print(
                f"{what:12}{name:22}{step:12.3f}   "
                f"{ratios['median']:.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})",
                flush=True,
            )
    write(_JSON.value, {"machine": about, "seconds of blocks": results})


if __name__ == "__main__":
    run_command(main, __doc__)
