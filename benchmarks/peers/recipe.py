"""What the peers of `time_to_accuracy.py` share: the recipe, and how they report an evaluation.

The recipe: Adam, cross-entropy, and a learning rate that falls to 0 as half a cosine wave over
--steps steps. The accuracy on all of ``test`` is computed every --evaluate_every steps. By hand::

    python benchmarks/peers/accuracy_ctl.py --model=dense --steps=1000 --goal=0.85
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import worker
from absl import flags
from lines import answerer

from ctl.base.names import check_model_name
from ctl.flags.parsing import group, run_command

TEST_BATCH = 500

with group("The recipe"):
    _DATASET = flags.DEFINE_string("dataset", "fashion_mnist_mini", "of TFDS, with train and test")
    _DATA_DIR = flags.DEFINE_string("data_dir", None, "its folder; the default is that of ctl")
    _STEPS = flags.DEFINE_integer("steps", 1000, "where the training ends", lower_bound=1)
    _RATE = flags.DEFINE_float("learning_rate", 1e-3, "of the first step", lower_bound=0)
    _EVERY = flags.DEFINE_integer("evaluate_every", 250, "steps", lower_bound=1)
    _GOAL = flags.DEFINE_float("goal", 1.0, "the accuracy that ends the training")
    _SEED = flags.DEFINE_integer("seed", 1, "of the initial weights and of the order")

# Takes the step and the accuracy of an evaluation, and returns whether the training ends there.
Evaluated = Callable[[int, float], bool]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, beside `worker.Setting`; the fields are those of the flags."""

    setting: worker.Setting
    dataset: str
    data_dir: str | None
    steps: int
    learning_rate: float
    evaluate_every: int
    seed: int


def race(train: Callable[[Recipe, Evaluated], dict[str, Any]]) -> None:
    """Parses the flags and trains. Answers ``{"step": int, "accuracy": float}`` after each
    evaluation, and at the end what ``train`` returns: versions and device."""

    def main() -> None:
        check_model_name(worker.setting().model)
        answer = answerer()

        def evaluated(step: int, accuracy: float) -> bool:
            answer(step=step, accuracy=accuracy)
            return accuracy >= _GOAL.value or step >= _STEPS.value

        about = train(
            Recipe(
                setting=worker.setting(),
                dataset=_DATASET.value,
                data_dir=_DATA_DIR.value,
                steps=_STEPS.value,
                learning_rate=_RATE.value,
                evaluate_every=_EVERY.value,
                seed=_SEED.value,
            ),
            evaluated,
        )
        answer(**about)
        os._exit(0)  # threads of a library must not keep the process alive

    run_command(main, sys.modules["__main__"].__doc__)


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a plain Keras program: a model of ctl.jobs.models, its optimizer, the data, and
    the number of batches of ``test``."""

    model: Any
    optimizer: Any
    train: Any
    test: Any
    test_batches: int
    about: dict[str, Any]


def keras_program(recipe: Recipe) -> Program:
    """Makes the parts as the tutorials of TensorFlow do."""
    import keras
    import pipeline
    import tensorflow as tf

    from ctl.jobs.models import make_model

    keras.utils.set_random_seed(recipe.seed)
    size = recipe.setting.global_batch_size
    train, info = pipeline.load(recipe.dataset, size, recipe.data_dir)
    test, batches = pipeline.load_test(recipe.dataset, TEST_BATCH, recipe.data_dir)
    features = info.features
    model = make_model(recipe.setting.model, features["image"].shape, features["label"].num_classes)
    rate = keras.optimizers.schedules.CosineDecay(recipe.learning_rate, recipe.steps)
    about = {"versions": {"tensorflow": tf.__version__, "keras": keras.__version__}}
    return Program(model, keras.optimizers.Adam(rate), train, test, batches, about)
