"""The recipe of `recipe.py` with Keras `Model.fit`: an epoch for each evaluation."""

from __future__ import annotations

import math
from typing import Any

from absl import flags
from recipe import Evaluated, Recipe, keras_program, race

from ctl.flags.parsing import group

with group("This peer"):
    _STEPS_PER_EXECUTION = flags.DEFINE_integer(
        "steps_per_execution", 1, "steps in one call, an argument of compile", lower_bound=1
    )


def train(recipe: Recipe, evaluated: Evaluated) -> dict[str, Any]:
    import keras

    program = keras_program(recipe)
    program.model.compile(
        optimizer=program.optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        steps_per_execution=_STEPS_PER_EXECUTION.value,
        jit_compile=recipe.setting.jit_compile,
    )

    class Goal(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            step = (epoch + 1) * recipe.evaluate_every
            self.model.stop_training = evaluated(step, float(logs["val_accuracy"]))

    program.model.fit(
        program.train,
        steps_per_epoch=recipe.evaluate_every,
        epochs=math.ceil(recipe.steps / recipe.evaluate_every),
        validation_data=program.test,
        verbose=0,
        callbacks=[Goal()],
    )
    return program.about


if __name__ == "__main__":
    race(train)
