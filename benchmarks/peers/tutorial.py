"""The parts of a plain TensorFlow program before its loop, as in the TensorFlow tutorials:
strategy, input pipeline, Keras model, Adam and a metric.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from typing import Any

import pipeline
import worker

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Tutorial:
    """The parts. ``about`` has the versions and the devices, for the results."""

    strategy: Any
    dataset: Any
    model: Any
    optimizer: Any
    accuracy: Any
    about: dict


def check_orbit() -> None:
    """Raises `UsageError` if Orbit is missing."""
    for package in ("orbit", "tf_keras"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"{package} is not installed: pip install --no-deps tf-models-official tf-keras"
            )


def make(setting: worker.Setting) -> Tutorial:
    """Makes the parts. With several workers, it sets ``TF_CONFIG``."""
    if setting.workers:
        task = {"type": "worker", "index": setting.worker_index}
        config = {"cluster": {"worker": setting.workers}, "task": task}
        os.environ["TF_CONFIG"] = json.dumps(config)

    import keras
    import tensorflow as tf

    from ctl.jobs.models import make_model

    devices = pipeline.devices(setting.replicas)
    keras.utils.set_random_seed(1)
    if setting.workers:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif setting.replicas > 1:
        strategy = tf.distribute.MirroredStrategy(devices)
    else:
        strategy = tf.distribute.get_strategy()
    dataset, info = pipeline.load("fashion_mnist_mini", setting.global_batch_size)
    with strategy.scope():
        model = make_model(
            setting.model, info.features["image"].shape, info.features["label"].num_classes
        )
        optimizer = keras.optimizers.Adam(1e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    about = {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "device": ", ".join(d[1:] for d in devices),
    }
    return Tutorial(strategy, dataset, model, optimizer, accuracy, about)
