"""Examples that start several processes: they train as a plain loop of TensorFlow on one device."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference
from references import global_batches

import ctl
from ctl.examples import parameter_servers, two_workers

pytestmark = pytest.mark.slow
STEPS = 4

# What each process runs; the one that has results writes the weights that they belong to.
PROGRAM = f"""
import sys
import ctl
import numpy as np
from ctl.examples import NAME as example

def made(placement, make=example.make_loop):
    example.loop = make(placement)
    return example.loop

def run():
    example.STEPS, example.make_loop = {STEPS}, made
    example.main()
    if ctl.workers.is_chief(example.loop.strategy):
        np.savez(sys.argv[1], *example.loop.evaluator.step.model.get_weights())
"""


def trained(zygote, example, tasks: dict[str, int], folder) -> tuple[str, list[np.ndarray]]:
    """What the first task of a job has printed, and its weights."""
    name = example.__name__.rpartition(".")[2]
    (folder / "program.py").write_text(PROGRAM.replace("NAME", name))
    cluster = ctl.launch.cluster(**tasks)
    started = [
        zygote.start(
            "program",
            folder / "weights.npz",
            path=[folder],
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}),
        )
        for kind, addresses in cluster.items()
        for index in range(len(addresses))
    ]
    assert [task.wait() for task in started] == [0] * len(started), started[0].stderr[-3000:]
    with np.load(folder / "weights.npz") as weights:
        return started[0].stdout, [*weights.values()]


def plain_tensorflow() -> list[np.ndarray]:
    """Adam on the mean of the global batch, whose gradient is clipped."""
    keras.utils.set_random_seed(1)
    model = ctl.models.make_model("dense", (28, 28, 1), 10)
    data = ctl.data.load(global_batch_size=two_workers.BATCH)
    optimizer = keras.optimizers.Adam()
    variables = model.trainable_variables
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for images, labels in global_batches(data, STEPS):
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(tf.cast(images, tf.float32) / 255, training=True))
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(tf.clip_by_global_norm(gradients, 1.0)[0], variables)
    return model.get_weights()


@pytest.mark.parametrize(
    ("example", "tasks"),
    [(two_workers, {"workers": 2}), (parameter_servers, {"workers": 1, "ps": 1})],
)
def test_a_job_equals_plain_tensorflow(zygote, example, tasks, tmp_path):
    """With one worker, parameter servers make the updates one after the other."""
    printed, weights = trained(zygote, example, tasks, tmp_path)
    assert f"step {STEPS}: accuracy 0." in printed
    assert largest_difference(weights, plain_tensorflow()) < 1e-5


@pytest.mark.parametrize(
    ("example", "tasks"),
    [(two_workers, {"workers": 2}), (parameter_servers, {"workers": 2, "ps": 1})],
)
def test_started_alone_it_starts_the_job(example, tasks, monkeypatch):
    started = []
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(ctl.launch, "launch", lambda command, **n: started.append((command, n)))
    with pytest.raises(SystemExit):
        example.main()
    assert started == [([sys.executable, "-m", example.__name__], tasks)]
