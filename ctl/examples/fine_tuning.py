"""Fine-tuning: a new head on trained features. The head trains first, then all layers, in one run.

    python -m ctl.examples.fine_tuning

The features are learned on five classes of clothes; the others have 200 images to train on. It
prints the accuracy on these: 0.796 after the steps of the head, and 0.905 at the end.
"""

from typing import Any

import keras
import numpy as np

import ctl

HEAD_STEPS, STEPS, BATCH = 200, 400, 50


def make_data(classes: range, training: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images of some classes, uint8 [n, 28, 28, 1], and their labels from 0, int64 [n]."""
    data: Any = ctl.data.load("fashion_mnist_mini", global_batch_size=1, training=training)
    images, labels = data.arrays
    chosen = np.isin(labels, classes)
    return images[chosen], labels[chosen] - classes[0]


def make_features() -> keras.Model:
    layers = [
        keras.Input([28, 28, 1]),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
    ]
    return keras.Sequential(layers, name="features")


def make_loop(
    features: keras.Model, classes: range, *, rates: list[float], most: int | None = None
) -> ctl.Loop:
    """Trains on ``most`` images, with one of the ``rates`` up to step `HEAD_STEPS`, and then with
    the other."""
    images, labels = make_data(classes)
    model = keras.Sequential([features, keras.layers.Dense(5, name="head")])
    step = ctl.EvalStep(model, metrics=["accuracy"])
    return ctl.Loop(
        ctl.TrainStep(model, "adam"),
        (images[:most], labels[:most]),
        global_batch_size=BATCH,
        schedule=ctl.schedule.Piecewise([HEAD_STEPS], rates),
        evaluator=ctl.Evaluator(step, make_data(classes, training=False)),
    )


def fine_tune(loop: ctl.Loop, head_steps: int = HEAD_STEPS, steps: int = STEPS) -> None:
    """Layers that do not train have no gradient and no part in the update."""
    loop.train_only([loop.step.model.get_layer("head")])
    loop.train(head_steps)
    print(f"after {head_steps} steps of the head: accuracy {loop.evaluate()['accuracy']:.3f}")
    loop.train_only(None)
    loop.train(steps)
    print(f"after {steps - head_steps} of all layers:  accuracy {loop.evaluate()['accuracy']:.3f}")


def main() -> None:
    keras.utils.set_random_seed(1)
    features = make_features()
    make_loop(features, range(5), rates=[1e-3, 1e-3]).train(HEAD_STEPS)
    fine_tune(make_loop(features, range(5, 10), most=200, rates=[3e-3, 3e-4]))


if __name__ == "__main__":
    main()
