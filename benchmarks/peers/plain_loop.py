"""The loop as the TensorFlow tutorials write it: Keras model, Keras optimizer, `tf.data` pipeline,
and `tf.range` over the steps inside one `tf.function`.

With --fixed_batch the same step trains on one batch, without an input pipeline. That is a bound for
such loops.
"""

from __future__ import annotations

import tutorial
import worker
from absl import flags

from ctl.flags.parsing import group

with group("This peer"):
    _FIXED_BATCH = flags.DEFINE_boolean("fixed_batch", False, "one batch only, no input pipeline")


def build(setting: worker.Setting):
    program = tutorial.make(setting)

    import keras
    import tensorflow as tf

    strategy, model, optimizer = program.strategy, program.model, program.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=setting.global_batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        program.accuracy.update_state(labels, logits)
        return loss

    if setting.jit_compile:
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

    iterator = iter(strategy.experimental_distribute_dataset(program.dataset))
    if _FIXED_BATCH.value:
        train_steps, iterator = train_steps_on, next(iterator)

    def train(steps: int) -> float:
        loss = float(train_steps(iterator, tf.constant(steps)))
        program.accuracy.result(), program.accuracy.reset_state()
        return loss

    return train, program.about


if __name__ == "__main__":
    worker.serve(build)
