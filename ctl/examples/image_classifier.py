"""An image classifier: data, model, schedule and evaluation.

    python -m ctl.examples.image_classifier

Trains on 10,000 images of clothes, and evaluates on 2,000 others after each epoch. Its last line is
``step 625: test loss 0.360, accuracy 0.875``.
"""

import keras

import ctl

BATCH, EPOCHS = 64, 4


def make_model() -> keras.Model:
    """From images in [0, 1] to logits: the loss has the softmax."""
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def show(step: int, results: dict[str, float]) -> None:
    print(f"step {step}: test loss {results['loss']:.3f}, accuracy {results['accuracy']:.3f}")


def make_loop() -> ctl.Loop:
    """The step scales images of uint8 to [0, 1], and takes the cross entropy for its loss."""
    train = ctl.data.load("fashion_mnist_mini", global_batch_size=BATCH)
    test = ctl.data.load("fashion_mnist_mini", global_batch_size=500, training=False)
    model = make_model()
    return ctl.Loop(
        ctl.TrainStep(model, "adam", metrics=["accuracy"]),
        train,
        schedule=ctl.schedule.Cosine(2e-3, EPOCHS * train.num_examples // BATCH, warmup_steps=50),
        evaluator=ctl.Evaluator(ctl.EvalStep(model, metrics=["accuracy"]), test),
        eval_actions=[show],
    )


def main() -> None:
    keras.utils.set_random_seed(1)
    make_loop().train_and_evaluate(epochs=EPOCHS)


if __name__ == "__main__":
    main()
