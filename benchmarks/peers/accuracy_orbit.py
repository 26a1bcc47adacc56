"""The recipe of `recipe.py` with Orbit's trainer, evaluator and controller."""

from __future__ import annotations

from typing import Any

import tutorial
from recipe import Evaluated, Recipe, keras_program, race


def train(recipe: Recipe, evaluated: Evaluated) -> dict[str, Any]:
    tutorial.check_orbit()
    import keras
    import orbit
    import tensorflow as tf

    program = keras_program(recipe)
    model, optimizer = program.model, program.optimizer
    optimizer.build(model.trainable_variables)
    strategy = tf.distribute.get_strategy()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    global_step = tf.Variable(0, dtype=tf.int64)

    class Trainer(orbit.StandardTrainer):
        def train_step(self, iterator):
            def step(images, labels):
                with tf.GradientTape() as tape:
                    loss = cross_entropy(labels, model(images, training=True))
                variables = model.trainable_variables
                optimizer.apply(tape.gradient(loss, variables), variables)

            strategy.run(step, args=next(iterator))
            global_step.assign_add(1)

    class Evaluator(orbit.StandardEvaluator):
        def eval_begin(self):
            accuracy.reset_state()

        def eval_step(self, iterator):
            def step(images, labels):
                accuracy.update_state(labels, model(images, training=False))

            strategy.run(step, args=next(iterator))

        def eval_end(self):
            return {"accuracy": accuracy.result()}

    controller = orbit.Controller(
        trainer=Trainer(strategy.experimental_distribute_dataset(program.train)),
        evaluator=Evaluator(
            strategy.experimental_distribute_dataset(program.test.repeat()),
            orbit.StandardEvaluatorOptions(use_tf_while_loop=True),
        ),
        strategy=strategy,
        global_step=global_step,
        steps_per_loop=min(500, recipe.evaluate_every),
    )
    step = 0
    while step < recipe.steps:
        step = min(step + recipe.evaluate_every, recipe.steps)
        controller.train(step, checkpoint_at_completion=False)
        results = controller.evaluate(program.test_batches)
        if evaluated(step, float(results["accuracy"])):
            break
    return program.about


if __name__ == "__main__":
    race(train)
