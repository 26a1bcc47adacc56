"""A step without a model: every replica sums the images of one input pipeline.

Every image is scaled to float32 in [0, 1], as for a model, and summed, so that TensorFlow cannot
leave out a part of the pipeline. `tutorial` scales in the pipeline, ctl in the step.
"""

from __future__ import annotations

import time
from typing import Any

import pipeline
from absl import flags
from lines import serve

from ctl.flags.parsing import group, run_command

PIPELINES = ("tutorial", "ctl_own", "ctl", "ctl_stream", "ctl_stream_tuned")

with group("This peer"):
    _PIPELINE = flags.DEFINE_enum("pipeline", "ctl", PIPELINES, "where the images come from")
    _DATASET = flags.DEFINE_string("dataset", "fashion_mnist_mini", "a dataset of TFDS")
    _DATA_DIR = flags.DEFINE_string("data_dir", None, "where it is; by default in ctl")
    _BATCH = flags.DEFINE_integer("global_batch_size", 128, "images per step", lower_bound=1)
    _REPLICAS = flags.DEFINE_integer(
        "replicas", 1, "replicas; logical CPU devices where there is no GPU", lower_bound=1
    )


def build_tutorial():
    """Strategy, feed and preparation of a batch, as in the TensorFlow tutorials."""
    devices = pipeline.devices(_REPLICAS.value)

    import tensorflow as tf

    from ctl.data.feed import Feed

    strategy = tf.distribute.get_strategy()
    if _REPLICAS.value > 1:
        strategy = tf.distribute.MirroredStrategy(devices)
    dataset, _ = pipeline.load(_DATASET.value, _BATCH.value, _DATA_DIR.value)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return strategy, Feed(iterator, ()), lambda x, _: x


def ctl_dataset(name: str):
    """The `Dataset` of ctl: of `ctl.data.load`, or of the pipeline of the tutorials."""
    import ctl

    batch = _BATCH.value
    if name == "ctl_own":
        dataset, _ = pipeline.load(_DATASET.value, batch, _DATA_DIR.value)
        return ctl.data.as_dataset(dataset, global_batch_size=batch)
    limit = {"resident_limit_mib": 0} if "stream" in name else {}
    return ctl.data.load(_DATASET.value, data_dir=_DATA_DIR.value, global_batch_size=batch, **limit)


def build_ctl(name: str):
    """The same three as of `build_tutorial`, as `ctl.Loop` has them. `ctl_stream_tuned`: with the
    autotuning of `tf.data`, which ctl turns off."""
    import tensorflow as tf

    import ctl
    from ctl.data.feed import Feed, open_feed
    from ctl.phases.base_step import scale_images

    strategy = ctl.make_strategy(replicas=_REPLICAS.value).strategy
    dataset = ctl_dataset(name)
    if "tuned" in name:
        options = tf.data.Options()
        options.autotune.enabled = True
        batches = dataset.batches().with_options(options)
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        feed = Feed(iterator, dataset.resident(strategy))
    else:
        feed = open_feed(dataset, strategy, 0, dataset.resident(strategy))

    def on_replica(element, resident):
        images, labels = dataset.on_replica(element, resident)
        return scale_images(images), labels

    return strategy, feed, on_replica


def build():
    """Facts of the peer, and the function that answers a request."""
    name = _PIPELINE.value
    if name == "tutorial":
        strategy, feed, on_replica = build_tutorial()
    else:
        strategy, feed, on_replica = build_ctl(name)

    import tensorflow as tf

    from ctl.data.feed import Feed, batch_of, next_block

    def add_up(total, block, resident) -> tf.Tensor:
        batch = batch_of(block, block.first, feed.batches_per_block)
        images, labels = on_replica(batch, resident)
        return total + tf.reduce_sum(images) + tf.reduce_sum(tf.cast(labels, tf.float32))

    @tf.function
    def take(feed: Feed, steps: tf.Tensor) -> tuple[tf.Tensor, Any]:
        position = feed.position
        totals = strategy.run(lambda: tf.zeros([]))
        while steps > 0:
            block, position = next_block(feed, position, tf.constant(1))
            totals = strategy.run(add_up, args=(totals, block, feed.resident))
            steps -= 1
        return strategy.reduce(tf.distribute.ReduceOp.SUM, totals, axis=None), position

    def reply(steps: int) -> dict[str, float]:
        nonlocal feed
        start, cpu_start = time.perf_counter(), time.process_time()
        total, position = take(feed, tf.constant(steps))
        feed, total = feed._replace(position=position), float(total)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
            "images": steps * _BATCH.value,
            "mean": total / (steps * _BATCH.value),
        }

    return {"versions": {"tensorflow": tf.__version__}}, reply


if __name__ == "__main__":
    run_command(lambda: serve(build), __doc__)
