"""Tutorials and guides about the training loop itself."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from twins import Twins, batches, eagerly, images

import ctl

EPOCHS = 2


def of_each_epoch(epochs: list[dict]) -> Callable[[ctl.actions.Status], None]:
    """An action that keeps what a tutorial prints at the end of an epoch, and begins anew."""

    def end(status: ctl.actions.Status) -> None:
        epochs.append(status.scalars())
        status.reset()

    return end


# https://www.tensorflow.org/tutorials/distribute/custom_training ---------------------------------


def make_classifier() -> keras.Model:
    """With a penalty on the weights, which the tutorial scales by the number of replicas."""
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-2)),
            layers.Dense(3),
        ]
    )


def tutorial_custom_training(model, train_dataset, test_dataset, strategy) -> list[dict]:
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)
    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        optimizer = keras.optimizers.Adam(learning_rate=0.001)

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    epochs = []
    for _ in range(EPOCHS):
        total_loss, num_batches = 0.0, 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        for x in test_dist_dataset:
            distributed_test_step(x)
        results = {
            "train_loss": total_loss / num_batches,
            "train_accuracy": train_accuracy.result(),
            "loss": test_loss.result(),
            "accuracy": test_accuracy.result(),
        }
        epochs.append({name: float(value) for name, value in results.items()})
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()
    return epochs


def port_custom_training(model, train_dataset, test_dataset, strategy) -> tuple[list, dict]:
    epochs, loss = [], keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        step = ctl.TrainStep(model, keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
        evaluation = ctl.EvalStep(model, loss, metrics=["accuracy"])
    evaluator = ctl.Evaluator(evaluation, test_dataset, strategy=strategy)
    actions = [ctl.Every(of_each_epoch(epochs), steps=len(train_dataset))]
    loop = ctl.Loop(step, train_dataset, strategy=strategy, evaluator=evaluator, actions=actions)
    loop.train_and_evaluate(epochs=EPOCHS)
    return epochs, loop.history.evaluations


@pytest.mark.slow
def test_custom_training(mirrored):
    """The last batch of the test is smaller."""
    twins = Twins(mirrored(2), make_classifier, in_scope=True)
    labels = np.random.default_rng(1).integers(0, 3, 40)
    train = batches(8, images(24, 8, 1), labels[:24])
    test = tf.data.Dataset.from_tensor_slices((images(13, 8, 1, seed=2), labels[24:37])).batch(8)
    wanted = tutorial_custom_training(twins.theirs, train, test, mirrored(2))
    epochs, evaluations = port_custom_training(twins.ours, train, test, mirrored(2))
    twins.assert_equal()
    for results, trained, tested in zip(wanted, epochs, evaluations.values(), strict=True):
        assert tested == pytest.approx({name: results[name] for name in tested}, rel=1e-6)
        for name in tested:
            assert trained[name] == pytest.approx(results[f"train_{name}"], rel=1e-6)


# https://www.tensorflow.org/guide/keras/writing_a_training_loop_from_scratch ---------------------


class ActivityRegularization(layers.Layer):
    """Of the guide, but the mean of the examples instead of their sum."""

    def call(self, inputs):
        self.add_loss(1e-2 * tf.reduce_mean(tf.reduce_sum(inputs, axis=-1)))
        return inputs


def make_digits() -> keras.Model:
    inputs = keras.Input([6])
    x = ActivityRegularization()(layers.Dense(8, activation="relu")(inputs))
    x = layers.Dense(8, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def tutorial_from_scratch(model, train_dataset, val_dataset) -> list[tuple[float, float, float]]:
    optimizer = keras.optimizers.RMSprop(learning_rate=1e-2)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_acc_metric = keras.metrics.SparseCategoricalAccuracy()
    val_acc_metric = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
            loss_value += sum(model.losses)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply(grads, model.trainable_weights)
        train_acc_metric.update_state(y, logits)
        return loss_value

    @tf.function
    def test_step(x, y):
        val_acc_metric.update_state(y, model(x, training=False))

    epochs = []
    for _ in range(EPOCHS):
        losses = [float(train_step(x, y)) for x, y in train_dataset]
        train_acc = train_acc_metric.result()
        train_acc_metric.reset_state()
        for x, y in val_dataset:
            test_step(x, y)
        epochs.append((np.mean(losses), float(train_acc), float(val_acc_metric.result())))
        val_acc_metric.reset_state()
    return epochs


def port_from_scratch(model, train_dataset, val_dataset, strategy) -> tuple[list, dict]:
    epochs, loss = [], "sparse_categorical_crossentropy"
    with strategy.scope():
        optimizer = keras.optimizers.RMSprop(1e-2)
        step = ctl.TrainStep(model, optimizer, loss, metrics=["accuracy"])
        evaluation = ctl.EvalStep(model, loss, metrics=["accuracy"])
    evaluator = ctl.Evaluator(evaluation, val_dataset, strategy=strategy)
    actions = [ctl.Every(of_each_epoch(epochs), steps=len(train_dataset))]
    loop = ctl.Loop(step, train_dataset, strategy=strategy, evaluator=evaluator, actions=actions)
    loop.train_and_evaluate(epochs=EPOCHS)
    return epochs, loop.history.evaluations


def test_training_loop_from_scratch(mirrored):
    twins, random = Twins(mirrored(2), make_digits), np.random.default_rng(0)
    x, y = random.normal(size=(40, 6)).astype("float32"), random.integers(0, 3, 40)
    train, val = batches(8, x[:24], y[:24]), batches(8, x[24:], y[24:])
    with eagerly():
        wanted = tutorial_from_scratch(twins.theirs, train, val)
    epochs, evaluations = port_from_scratch(twins.ours, train, val, mirrored(2))
    twins.assert_equal()
    for results, trained, tested in zip(wanted, epochs, evaluations.values(), strict=True):
        found = trained["loss"], trained["accuracy"], tested["accuracy"]
        assert found == pytest.approx(results, rel=1e-6)


# https://www.tensorflow.org/guide/basic_training_loops -------------------------------------------


class Line(keras.Model):
    """With weights of Keras; the guide has a `tf.Module`, and variables of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(initializer=keras.initializers.Constant(5.0), name="w")
        self.b = self.add_weight(initializer="zeros", name="b")
        self.built = True

    def call(self, x):
        return x * self.w + self.b


def tutorial_basic_loops(model, x, y) -> list[float]:
    def loss(target_y, predicted_y):
        return tf.reduce_mean(tf.square(target_y - predicted_y))

    def train(model, x, y, learning_rate):
        with tf.GradientTape() as t:
            current_loss = loss(y, model(x))
        dw, db = t.gradient(current_loss, [model.w.value, model.b.value])
        model.w.assign_sub(learning_rate * dw)
        model.b.assign_sub(learning_rate * db)
        return current_loss

    return [float(train(model, x, y, learning_rate=0.1)) for _ in range(5)]


def port_basic_loops(model, x, y, strategy) -> dict[str, float]:
    with strategy.scope():
        step = ctl.TrainStep(model, keras.optimizers.SGD(0.1), "mean_squared_error")
    loop = ctl.Loop(step, (x, y), global_batch_size=len(x), strategy=strategy)
    return loop.train(epochs=5)


def test_basic_training_loops(mirrored):
    """A batch is the whole data."""
    twins, random = Twins(mirrored(2), Line), np.random.default_rng(0)
    x = np.linspace(-2, 2, 20, dtype="float32")
    y = (3.0 * x + 2.0 + random.normal(size=20)).astype("float32")
    losses = tutorial_basic_loops(twins.theirs, x, y)
    scalars = port_basic_loops(twins.ours, x, y, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(losses[-1], rel=1e-6)


# https://www.tensorflow.org/tutorials/customization/custom_training_walkthrough ------------------


def make_penguins() -> keras.Model:
    hidden = [layers.Dense(10, activation="relu"), layers.Dense(10, activation="relu")]
    return keras.Sequential([keras.Input([4]), *hidden, layers.Dense(3)])


def tutorial_walkthrough(model, dataset) -> list[tuple[float, float]]:
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(learning_rate=0.05)

    def loss(model, x, y, training):
        return loss_object(y_true=y, y_pred=model(x, training=training))

    def grad(model, inputs, targets):
        with tf.GradientTape() as tape:
            loss_value = loss(model, inputs, targets, training=True)
        return loss_value, tape.gradient(loss_value, model.trainable_variables)

    epochs = []
    for _ in range(3):
        epoch_loss_avg = keras.metrics.Mean()
        epoch_accuracy = keras.metrics.SparseCategoricalAccuracy()
        for x, y in dataset:
            loss_value, grads = grad(model, x, y)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            epoch_loss_avg.update_state(loss_value)
            epoch_accuracy.update_state(y, model(x, training=True))
        epochs.append((float(epoch_loss_avg.result()), float(epoch_accuracy.result())))
    return epochs


def port_walkthrough(model, dataset, strategy) -> dict[str, float]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        step = ctl.TrainStep(model, keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=3)


def test_walkthrough(mirrored):
    """The batches are shuffled, in another order in each epoch."""
    twins, random = Twins(mirrored(2), make_penguins), np.random.default_rng(0)
    x, y = random.normal(size=(24, 4)).astype("float32"), random.integers(0, 3, 24)

    def shuffled():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24, seed=5).batch(8, True)

    epochs = tutorial_walkthrough(twins.theirs, shuffled())
    scalars = port_walkthrough(twins.ours, shuffled(), mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(epochs[-1][0], rel=1e-6)
