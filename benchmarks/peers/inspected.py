"""A worker of `inspect_truth.py`: trains under MultiWorkerMirroredStrategy with planted delays.

    python inspected.py OUT

``OUT/cases.json`` is a list of ``{"name", "worker", "phase", "seconds", "clock", "profile"}``. For
each, worker 0 writes ``OUT/NAME.json``: what `ctl.inspect` saw of it, on every worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ctl import cluster
from ctl.logs import console

console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import ctl  # noqa: E402
from ctl.inspect.measure import window  # noqa: E402
from ctl.inspect.measure.recording import Recording  # noqa: E402
from ctl.strategy import make_multi_worker  # noqa: E402

STEPS = 20
WARM_UP = 30


class Delayed(ctl.TrainStep):
    """A step that sleeps before its batch is there, or before its forward pass."""

    def plant(self) -> None:
        self.seconds = {phase: tf.Variable(0.0, trainable=False) for phase in ("input", "forward")}

    def sleep(self, phase: str, tensors):
        def slept(seconds):
            if seconds:
                time.sleep(float(seconds))
            return np.int32(0)

        done = tf.numpy_function(slept, [self.seconds[phase]], tf.int32)
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, tensors)

    def __call__(self, batch):
        return super().__call__(self.sleep("input", batch))

    def loss(self, batch):
        return super().loss(self.sleep("forward", batch))


def main() -> None:
    out = Path(sys.argv[1])
    me = cluster.resolve(None, None)
    strategy = make_multi_worker(me, collective_timeout=120).strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(512, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input([256]), *layers, keras.layers.Dense(10)])
        step = Delayed(model, keras.optimizers.SGD(0.01))
    step.plant()
    random = np.random.default_rng(0)
    data = random.normal(size=(1024, 256)).astype("float32"), random.integers(0, 10, 1024)
    loop = ctl.Loop(
        step,
        ctl.data.InMemory(data, global_batch_size=128),
        strategy=strategy,
        steps_per_loop=STEPS + 5,
    )
    recording = Recording(step, STEPS)
    recording.start()
    loop.train(WARM_UP)
    for case in json.loads((out / "cases.json").read_text()):
        here = case["worker"] == me.index
        if case["phase"]:
            step.seconds[case["phase"]].assign(case["seconds"] if here else 0.0)
        loop.train(loop.global_step + STEPS + 5)
        windows = recording.take()
        if case["phase"]:
            step.seconds[case["phase"]].assign(0.0)
        if me.is_chief:
            content = [each.to_json() for each in windows]
            (out / f"{case['name']}.json").write_text(json.dumps(content))
    recording.stop()
    assert window.SCHEMA == 1
    ctl.workers.leave_together(strategy, 60)


if __name__ == "__main__":
    main()
    os._exit(0)  # the shutdown of TensorFlow's server takes seconds
