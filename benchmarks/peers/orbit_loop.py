"""Orbit's `StandardTrainer` and `Controller`, with a Keras 3 model and optimizer.

Orbit is a part of `tf-models-official`, but does not need all of its dependencies:
`pip install --no-deps tf-models-official tf-keras`.
"""

from __future__ import annotations

import tutorial
import worker


def build(setting: worker.Setting):
    tutorial.check_orbit()
    program = tutorial.make(setting)

    import keras
    import orbit
    import tensorflow as tf

    strategy = program.strategy
    with strategy.scope():
        program.optimizer.build(program.model.trainable_variables)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        mean_loss = keras.metrics.Mean(name="loss")

    class Trainer(orbit.StandardTrainer):
        def __init__(self):
            super().__init__(strategy.experimental_distribute_dataset(program.dataset))

        def train_loop_begin(self):
            mean_loss.reset_state()
            program.accuracy.reset_state()

        def train_step(self, iterator):
            def step(images, labels):
                with tf.GradientTape() as tape:
                    logits = program.model(images, training=True)
                    losses = cross_entropy(labels, logits)
                    loss = tf.nn.compute_average_loss(
                        losses, global_batch_size=setting.global_batch_size
                    )
                variables = program.model.trainable_variables
                program.optimizer.apply(tape.gradient(loss, variables), variables)
                mean_loss.update_state(losses)
                program.accuracy.update_state(labels, logits)

            if setting.jit_compile:
                step = tf.function(step, jit_compile=True)
            strategy.run(step, args=next(iterator))
            global_step.assign_add(1)

        def train_loop_end(self):
            return {"loss": mean_loss.result(), "accuracy": program.accuracy.result()}

    global_step = tf.Variable(0, dtype=tf.int64)
    losses: list[float] = []
    controller = orbit.Controller(
        trainer=Trainer(),
        strategy=strategy,
        global_step=global_step,
        steps_per_loop=500,
        train_actions=[lambda output: losses.append(float(output["loss"]))],
    )

    def train(steps: int) -> float:
        controller.train(int(global_step) + steps, checkpoint_at_completion=False)
        return losses[-1]

    return train, program.about


if __name__ == "__main__":
    worker.serve(build)
