"""A worker of `inspect_truth.py`: trains under MultiWorkerMirroredStrategy with planted delays.

    python inspected.py OUT

``OUT/cases.json`` is a list of ``{"name", "worker", "phase", "seconds"}`` (`inspect_truth.Case`).
For each case, worker 0 writes ``OUT/NAME.json``: the windows that `ctl.inspect` recorded on all
workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.load_tensorflow()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import ctl  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.inspect.measure import window  # noqa: E402
from ctl.inspect.measure.recording import Recording  # noqa: E402

STEPS = 20
WARM_UP = 30


class Delay:
    """Sleeps in a graph. ``seconds`` is a variable, so that no case traces again."""

    def __init__(self):
        self.seconds = tf.Variable(0.0, trainable=False)

    def __call__(self, tensors):
        def slept(seconds):
            if seconds:
                time.sleep(float(seconds))
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(slept, [self.seconds], tf.int32)]):
            return tf.nest.map_structure(tf.identity, tensors)


class DelayedInput(ctl.data.InMemory):
    """Sleeps before a replica gets its batch."""

    def on_replica(self, element, resident):
        return self.delay(super().on_replica(element, resident))


class DelayedForward(ctl.TrainStep):
    """Sleeps before the forward pass."""

    def loss(self, batch):
        return super().loss(self.delay(batch))


def main() -> None:
    out = Path(sys.argv[1])
    me = cluster.resolve(None, None)
    strategy = make_multi_worker(me, collective_timeout=120).strategy
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(512, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input([256]), *layers, keras.layers.Dense(10)])
        step = DelayedForward(model, keras.optimizers.SGD(0.01))
    random = np.random.default_rng(0)
    data = random.normal(size=(1024, 256)).astype("float32"), random.integers(0, 10, 1024)
    dataset = DelayedInput(data, global_batch_size=128)
    dataset.delay, step.delay = Delay(), Delay()
    delays = {"input": dataset.delay, "forward": step.delay}
    loop = ctl.Loop(step, dataset, strategy=strategy, steps_per_loop=STEPS + 5)
    recording = Recording(loop, STEPS)
    recording.start()
    loop.train(WARM_UP)
    for case in json.loads((out / "cases.json").read_text()):
        here = case["worker"] == me.index
        if case["phase"]:
            delays[case["phase"]].seconds.assign(case["seconds"] if here else 0.0)
        loop.train(loop.global_step + STEPS + 5)
        windows = recording.take()
        if case["phase"]:
            delays[case["phase"]].seconds.assign(0.0)
        if me.is_chief:
            content = [each.to_json() for each in windows]
            (out / f"{case['name']}.json").write_text(json.dumps(content))
    recording.stop()
    assert window.SCHEMA == 1
    ctl.workers.leave_together(strategy)


def run() -> None:
    main()
    os._exit(0)  # TensorFlow's server would take seconds to shut down


if __name__ == "__main__":
    run()
