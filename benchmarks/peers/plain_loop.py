"""The loop as the TensorFlow tutorials write it: Keras model, Keras optimizer, `tf.data` pipeline,
and `tf.range` over the steps inside one `tf.function`.

With --fixed_batch the same step trains on one batch without any input pipeline, which bounds what a
loop can reach.
"""

from __future__ import annotations

import worker
from absl import flags

from ctl.flags import group

with group("This peer"):
    _FIXED_BATCH = flags.DEFINE_boolean("fixed_batch", False, "one batch only, no input pipeline")


def build(model: str, global_batch_size: int, replicas: int, jit_compile: bool):
    import keras
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from ctl.models import make_model
    from ctl.tfds_source import EMBEDDED

    devices = worker.tensorflow_devices(replicas)
    keras.utils.set_random_seed(1)
    if replicas > 1:
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
        .batch(global_batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )
    with strategy.scope():
        network = make_model(
            model, info.features["image"].shape, info.features["label"].num_classes
        )
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(network.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            losses = cross_entropy(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply(gradients, network.trainable_variables)
        accuracy.update_state(labels, logits)
        return loss

    if jit_compile:
        step = tf.function(step, jit_compile=True)

    @tf.function
    def train_steps(iterator, steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):
            losses = strategy.run(step, args=next(iterator))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return total / tf.cast(steps, tf.float32)

    @tf.function
    def train_steps_on(batch: tuple, steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(steps):
            losses = strategy.run(step, args=batch)
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return total / tf.cast(steps, tf.float32)

    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    if _FIXED_BATCH.value:
        train_steps, iterator = train_steps_on, next(iterator)

    def train(steps: int) -> float:
        loss = float(train_steps(iterator, tf.constant(steps)))
        accuracy.result(), accuracy.reset_state()
        return loss

    return train, {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "device": ", ".join(d[1:] for d in devices),
    }


if __name__ == "__main__":
    worker.serve(build)
