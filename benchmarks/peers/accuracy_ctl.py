"""The recipe of `recipe.py` with `ctl.Loop`."""

from __future__ import annotations

from typing import Any

from absl import flags
from recipe import TEST_BATCH, Evaluated, Recipe, race

from ctl.flags.parsing import group

with group("This peer"):
    _TUNE = flags.DEFINE_boolean("tune", False, "choose jit_compile by a trial, not by the rule")


def train(recipe: Recipe, evaluated: Evaluated) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    import ctl
    from ctl.jobs.trials import tune_jit_compile

    keras.utils.set_random_seed(recipe.seed)
    data = {"data_dir": recipe.data_dir, "download": False}
    setting = recipe.setting
    dataset = ctl.data.load(
        recipe.dataset, global_batch_size=setting.global_batch_size, seed=recipe.seed, **data
    )
    test = ctl.data.load(recipe.dataset, global_batch_size=TEST_BATCH, training=False, **data)
    model = ctl.models.make_model(setting.model, dataset.info.image_shape, dataset.info.num_classes)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    step = ctl.TrainStep(model, keras.optimizers.Adam(), jit_compile=setting.jit_compile or None)
    loop = ctl.Loop(
        step,
        dataset,
        schedule=ctl.schedule.Cosine(recipe.learning_rate, recipe.steps),
        evaluator=ctl.Evaluator(ctl.EvalStep(model, metrics=[accuracy]), test),
        eval_actions=[
            lambda step, results: evaluated(step, results["accuracy"]) and ctl.actions.STOP
        ],
    )
    if _TUNE.value:
        tune_jit_compile(loop)
    loop.train_and_evaluate(recipe.steps, evaluate_every=recipe.evaluate_every)
    return {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        "jit_compile": step.jit_compile,
    }


if __name__ == "__main__":
    race(train)
