"""Devices and input pipeline of a plain TensorFlow program, as in the TensorFlow tutorials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctl.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf


def devices(replicas: int) -> list[str]:
    """Names of a device for each replica: GPUs if there are any, else logical CPU devices. Call it
    before any other TensorFlow operation. Raises `UsageError` if there are too few GPUs."""
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


def load(
    name: str,
    batch_size: int,
    data_dir: str | None = None,
    *,
    cache: bool = True,
    shuffle: int = 10_000,
    share: tf.distribute.InputContext | None = None,
) -> tuple[tf.data.Dataset, Any]:
    """Endless batches, images float32 in [0, 1] and labels; the `DatasetInfo` of TFDS. Without
    ``cache``, images are decoded anew in every epoch, as if they were too many for it.
    ``shuffle``: images in the buffer. ``share``: the worker, which reads its files only."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    config = tfds.ReadConfig(try_autocache=cache, input_context=share)
    dataset, info = _scaled(name, "train", data_dir, read_config=config)
    dataset = dataset.cache() if cache else dataset
    dataset = dataset.shuffle(shuffle).repeat().batch(batch_size, drop_remainder=True)
    return dataset.prefetch(tf.data.AUTOTUNE), info


def load_test(name: str, batch_size: int, data_dir: str | None = None) -> tuple[Any, int]:
    """The split ``test`` once, as `load` gives the split ``train``, and its number of batches."""
    import tensorflow as tf

    dataset, info = _scaled(name, "test", data_dir)
    dataset = dataset.batch(batch_size).cache().prefetch(tf.data.AUTOTUNE)
    return dataset, -(-info.splits["test"].num_examples // batch_size)


def _scaled(name: str, split: str, data_dir: str | None, **options: Any) -> tuple[Any, Any]:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from ctl.data.tfds_source import EMBEDDED

    dataset, info = tfds.load(
        name,
        data_dir=data_dir or str(EMBEDDED),
        split=split,
        as_supervised=True,
        with_info=True,
        **options,
    )
    scaled = dataset.map(
        lambda image, label: (tf.cast(image, tf.float32) / 255.0, label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return scaled, info


def arrays(name: str, split: str, data_dir: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """All images, uint8 [n, height, width, channels], and labels, int64 [n]."""
    import tensorflow_datasets as tfds

    from ctl.data.tfds_source import EMBEDDED

    data_dir = data_dir or str(EMBEDDED)
    loaded = tfds.load(name, data_dir=data_dir, split=split, as_supervised=True, batch_size=-1)
    return tfds.as_numpy(loaded)
