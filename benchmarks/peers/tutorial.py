"""What a program on plain TensorFlow has before its loop begins, as the TensorFlow tutorials write
it: strategy, input pipeline, Keras model, Adam and a metric.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import worker

from ctl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Tutorial:
    strategy: Any
    dataset: Any
    model: Any
    optimizer: Any
    accuracy: Any
    about: dict


def make(setting: worker.Setting) -> Tutorial:
    if setting.workers:
        task = {"type": "worker", "index": setting.worker_index}
        config = {"cluster": {"worker": setting.workers}, "task": task}
        os.environ["TF_CONFIG"] = json.dumps(config)

    import keras
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from ctl.models import make_model
    from ctl.tfds_source import EMBEDDED

    devices = _devices(setting.replicas)
    keras.utils.set_random_seed(1)
    if setting.workers:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif setting.replicas > 1:
        strategy = tf.distribute.MirroredStrategy(devices)
    else:
        strategy = tf.distribute.get_strategy()
    dataset, info = tfds.load(
        "fashion_mnist_mini",
        data_dir=str(EMBEDDED),
        split="train",
        as_supervised=True,
        with_info=True,
    )
    dataset = (
        dataset.map(
            lambda image, label: (tf.cast(image, tf.float32) / 255.0, label),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        .cache()
        .shuffle(10_000)
        .repeat()
        .batch(setting.global_batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )
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


def _devices(replicas: int) -> list[str]:
    """Devices of the replicas; call it before anything else of TensorFlow."""
    import tensorflow as tf

    if gpus := tf.config.list_physical_devices("GPU"):
        if len(gpus) < replicas:
            raise UsageError(f"--replicas={replicas}, but TensorFlow sees {len(gpus)} GPUs")
        return [f"/gpu:{i}" for i in range(replicas)]
    if replicas > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * replicas,
        )
    return [f"/cpu:{i}" for i in range(replicas)]
