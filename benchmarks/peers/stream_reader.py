"""Workers of an input pipeline over files of images, which are decoded anew in every epoch.

`ctl` is its stream. `tf.data` is what the guide of tf.data recommends: parallel interleave of the
files, shuffle, repeat, parallel map, batch, prefetch, with autotuning. `tutorial` is the pipeline
of the tutorials, which scales images to float32. `grain` reads the same images from files of
ArrayRecord, with a data source of TFDS, in threads. A worker of 2 reads every other file of the two
pipelines of tf.data, so that their batches depend on the number of workers, and every other example
of Grain.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pipeline
from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command

# By default, autotuned buffers may take half of the memory that is free, in each process.
_BUFFER_BYTES = 2 << 30

KINDS = ("ctl", "tf.data", "tutorial", "grain")

with group("This peer"):
    _KIND = flags.DEFINE_enum("kind", "ctl", KINDS, "which pipeline")
    _DATA_DIR = flags.DEFINE_string("data_dir", None, "of TFDS")
    _BATCH = flags.DEFINE_integer("global_batch_size", 128, "images per step")
    _SHUFFLE = flags.DEFINE_integer("shuffle", 10_000, "images in the buffer of the tutorial")


def _of_process(file: str, name: str) -> int:
    lines = pathlib.Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def tuned(source: Any, files: list[str], size: int) -> Any:
    """Batches of ``size`` images of TFRecord ``files``."""
    import tensorflow as tf

    auto = tf.data.AUTOTUNE
    return (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files))
        .repeat()
        .interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=auto)
        .shuffle(10_000)
        .map(source.decode, num_parallel_calls=auto)
        .batch(size, drop_remainder=True)
        .prefetch(auto)
    )


def grain_batches(worker: int, workers: int) -> Any:
    """The iterator of a worker's part of the batches, dictionaries of arrays."""
    import grain
    import tensorflow_datasets as tfds

    images = tfds.data_source("ctl_images", split="train", data_dir=_DATA_DIR.value)
    # By default, it would read 500 batches ahead, while others are measured.
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
    shuffled = grain.MapDataset.source(images).shuffle(seed=0).repeat()
    return iter(shuffled[worker::workers].batch(_BATCH.value // workers).to_iter_dataset(options))


def as_dataset(iterator: Any) -> Any:
    """A `tf.data.Dataset` of what ``iterator`` yields."""
    import tensorflow as tf

    spec = tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), next(iterator))
    return tf.data.Dataset.from_generator(lambda: iterator, output_signature=spec)


def build() -> tuple[dict[str, Any], Any]:
    devices = pipeline.devices(2)

    import numpy as np
    import tensorflow as tf

    from ctl.data import Streaming, feed
    from ctl.data.tfds_source import ImageSource, find

    def strategy() -> Any:
        return tf.distribute.MirroredStrategy(devices)

    if _KIND.value in ("ctl", "tf.data"):
        source = ImageSource(find("ctl_images", _DATA_DIR.value), "train")
    if _KIND.value == "ctl":
        streams = {
            block: Streaming(source, global_batch_size=_BATCH.value, block=block)
            for block in (1, 16)
        }
    iterator: Any = None

    def opened(start: int, worker: int, workers: int, replicas: int, block: int) -> Any:
        """The iterator of the batches of a worker, or of replicas of one worker."""
        if _KIND.value == "ctl" and replicas > 1:
            return feed.open_batches(streams[block], strategy(), start)
        if _KIND.value == "ctl":
            return iter(streams[block].shares(start, range(worker, worker + 1), workers))
        if _KIND.value == "grain":
            images = grain_batches(worker, workers)
            return feed.distribute(strategy(), as_dataset(images)) if replicas > 1 else images
        if _KIND.value == "tf.data":
            paths = sorted(pathlib.Path(_DATA_DIR.value).glob("*/*/*.tfrecord-*"))
            files = [str(path) for path in paths[worker::workers]]
            batches = tuned(source, files, _BATCH.value // workers)
        else:
            share = tf.distribute.InputContext(workers, worker)
            batches, _ = pipeline.load(
                "ctl_images",
                _BATCH.value // workers,
                _DATA_DIR.value,
                cache=False,
                shuffle=_SHUFFLE.value,
                share=share,
            )
        options = tf.data.Options()
        options.autotune.ram_budget = _BUFFER_BYTES
        batches = batches.with_options(options)
        return feed.distribute(strategy(), batches) if replicas > 1 else iter(batches)

    def reply(
        steps: int,
        start: int | None = None,
        worker: int = 0,
        workers: int = 1,
        replicas: int = 1,
        block: int = 1,
    ) -> dict[str, float]:
        """Opens the batches of a worker from ``start`` on, if given, and takes ``steps``."""
        nonlocal iterator
        if start is not None:
            iterator = None  # frees the old one, which is not timed
        read = _of_process("io", "rchar")
        begun, cpu = time.perf_counter(), time.process_time()
        if start is not None:
            iterator = opened(start, worker, workers, replicas, block)
        for _ in range(steps):
            np.asarray(tf.nest.flatten(next(iterator), expand_composites=True)[-1])
        return {
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu,
            "bytes": _of_process("io", "rchar") - read,
            "peak_mib": _of_process("status", "VmHWM") / 1024,
        }

    return {"versions": {"tensorflow": tf.__version__}}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
