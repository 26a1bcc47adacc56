"""Tutorials whose loop is ``fit``, with what they add to it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from twins import Twins, batches, images

import ctl

BATCH = 8

# https://www.tensorflow.org/tutorials/keras/regression, and the early stopping of
# https://www.tensorflow.org/tutorials/keras/overfit_and_underfit ---------------------------------


def make_fuel(features: np.ndarray) -> keras.Model:
    normalizer = layers.Normalization(axis=-1)
    normalizer.adapt(features)
    return keras.Sequential([keras.Input([5]), normalizer, layers.Dense(units=1)])


def tutorial_regression(model, train, validation) -> dict[str, list[float]]:
    model.compile(keras.optimizers.Adam(learning_rate=0.3), loss="mean_absolute_error")
    early_stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2)
    fitted = model.fit(
        train, validation_data=validation, epochs=20, callbacks=[early_stop], verbose=0
    )
    return fitted.history


def port_regression(model, train, validation, strategy) -> dict[int, dict[str, float]]:
    loss = "mean_absolute_error"
    with strategy.scope():
        step = ctl.TrainStep(model, keras.optimizers.Adam(0.3), loss)
        evaluator = ctl.Evaluator(ctl.EvalStep(model, loss), validation, strategy=strategy)
    early_stop = ctl.EarlyStopping("loss", patience=2)
    loop = ctl.Loop(step, train, strategy=strategy, evaluator=evaluator, eval_actions=[early_stop])
    loop.train_and_evaluate(epochs=20)
    return loop.history.evaluations


@pytest.mark.slow
def test_regression_with_early_stopping(mirrored):
    random = np.random.default_rng(0)
    features = random.normal(5.0, 3.0, (48, 5)).astype("float32")
    labels = (features @ [1.0, -1.0, 0.5, 0.0, 0.2] + random.normal(size=48)).astype("float32")
    train, validation = (
        batches(BATCH, features[part], labels[part]) for part in (slice(32), slice(32, 48))
    )
    twins = Twins(mirrored(2), lambda: make_fuel(features[:32]))
    history = tutorial_regression(twins.theirs, train, validation)
    evaluations = port_regression(twins.ours, train, validation, mirrored(2))
    assert 2 < len(evaluations) < 20
    found = [results["loss"] for results in evaluations.values()]
    assert found == pytest.approx(history["val_loss"], rel=1e-5)
    twins.assert_equal(1e-5)


# https://www.tensorflow.org/tutorials/structured_data/imbalanced_data ----------------------------


def make_fraud() -> keras.Model:
    """The last bias is that of the classes."""
    bias = keras.initializers.Constant(np.log(0.1))
    hidden = layers.Dense(8, activation="relu")
    last = layers.Dense(1, activation="sigmoid", bias_initializer=bias)
    return keras.Sequential([keras.Input([5]), hidden, last])


def tutorial_imbalanced(model, dataset, class_weight) -> dict[str, list[float]]:
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.AUC(name="auc")]
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-2),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=metrics,
    )
    return model.fit(dataset, epochs=1, class_weight=class_weight, verbose=0).history


def port_imbalanced(model, dataset, class_weight, strategy) -> dict[str, float]:
    with strategy.scope():
        step = ctl.TrainStep(
            model,
            keras.optimizers.Adam(1e-2),
            keras.losses.BinaryCrossentropy(),
            metrics=[keras.metrics.Precision(name="precision"), keras.metrics.AUC(name="auc")],
            class_weight=class_weight,
        )
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_imbalanced_data(mirrored):
    random = np.random.default_rng(0)
    features = random.normal(size=(4 * BATCH, 5)).astype("float32")
    labels = (random.random(4 * BATCH) < 0.25).astype("int64")
    class_weight = {0: 0.6, 1: 2.0}
    twins, data = Twins(mirrored(2), make_fraud), batches(BATCH, features, labels)
    history = tutorial_imbalanced(twins.theirs, data, class_weight)
    scalars = port_imbalanced(twins.ours, data, class_weight, mirrored(2))
    twins.assert_equal()
    for name in ("loss", "precision", "auc"):
        assert scalars[name] == pytest.approx(history[name][0], rel=1e-5), name


# https://www.tensorflow.org/tutorials/images/segmentation ----------------------------------------


def make_unet() -> keras.Model:
    image = keras.Input([8, 8, 3])
    down = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(image)
    deep = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(down)
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(deep)
    both = layers.Concatenate()([up, down])
    return keras.Model(image, layers.Conv2DTranspose(3, 3, strides=2, padding="same")(both))


def tutorial_segmentation(model, dataset) -> dict[str, list[float]]:
    def add_sample_weights(image, label):
        class_weights = tf.constant([2.0, 2.0, 1.0])
        class_weights = class_weights / tf.reduce_sum(class_weights)
        return image, label, tf.gather(class_weights, indices=tf.cast(label, tf.int32))

    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model.fit(dataset.map(add_sample_weights), epochs=2, verbose=0).history


class Segmentation(ctl.TrainStep):
    def loss(self, batch):
        image, label = batch
        logits = self.model(image, training=True)
        class_weights = tf.gather([0.4, 0.4, 0.2], label[..., 0])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(label[..., 0], logits)
        return tf.reduce_mean(each * class_weights, axis=[1, 2])


def port_segmentation(model, dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = Segmentation(model, "adam")
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=2)


@pytest.mark.slow
def test_segmentation(mirrored):
    """Each pixel has the weight of its class."""
    masks = np.random.default_rng(0).integers(0, 3, (3 * BATCH, 8, 8, 1))
    twins, data = Twins(mirrored(2), make_unet), batches(BATCH, images(3 * BATCH, 8, 3), masks)
    history = tutorial_segmentation(twins.theirs, data)
    scalars = port_segmentation(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(history["loss"][-1], rel=1e-5)


# https://www.tensorflow.org/tutorials/images/transfer_learning -----------------------------------


def make_transfer() -> keras.Model:
    """On a network with BatchNorm, which keeps its statistics while it is tuned."""
    blocks = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(4, 3)]
    base = keras.Sequential([keras.Input([8, 8, 3]), *blocks], name="base")
    inputs = keras.Input([8, 8, 3])
    x = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    return keras.Model(inputs, layers.Dense(1)(x))


def tutorial_transfer_learning(model, dataset) -> list[float]:
    base_learning_rate = 0.01
    base_model = model.get_layer("base")
    base_model.trainable = False
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate=base_learning_rate), loss=loss)
    history = model.fit(dataset, epochs=1, verbose=0).history["loss"]
    base_model.trainable = True
    for layer in base_model.layers[:2]:
        layer.trainable = False
    model.compile(keras.optimizers.RMSprop(learning_rate=base_learning_rate / 10), loss=loss)
    history += model.fit(dataset, epochs=2, initial_epoch=1, verbose=0).history["loss"]
    return history


def port_transfer_learning(model, dataset, strategy) -> list[float]:
    def train(optimizer):
        with strategy.scope():
            step = ctl.TrainStep(model, optimizer(), "binary_crossentropy")
        return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)["loss"]

    base = model.get_layer("base")
    base.trainable = False
    history = [train(lambda: keras.optimizers.Adam(0.01))]
    base.trainable = True
    ctl.freezing.freeze(model, [layer.name for layer in base.layers[:2]])
    return [*history, train(lambda: keras.optimizers.RMSprop(0.001))]


@pytest.mark.slow
def test_transfer_learning(mirrored):
    """First the new layer alone, then also the last of the network, with another optimizer."""
    labels = np.random.default_rng(0).integers(0, 2, 3 * BATCH)
    data = batches(BATCH, images(3 * BATCH, 8, 3), labels)
    twins = Twins(mirrored(2), make_transfer)
    history = tutorial_transfer_learning(twins.theirs, data)
    losses = port_transfer_learning(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert losses == pytest.approx(history, rel=1e-5)


# https://www.tensorflow.org/tutorials/structured_data/preprocessing_layers -----------------------


def make_pets(ages: np.ndarray) -> keras.Model:
    """Features in a dict: one a number, one a text."""
    age, kind = keras.Input([1], name="age"), keras.Input([1], name="kind", dtype="string")
    normalized = layers.Normalization(axis=None)
    normalized.adapt(ages)
    encoded = layers.StringLookup(vocabulary=["cat", "dog"], output_mode="one_hot")(kind)
    x = layers.Concatenate()([normalized(age), encoded])
    return keras.Model({"age": age, "kind": kind}, layers.Dense(1)(x))


def tutorial_preprocessing(model, dataset) -> dict[str, list[float]]:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    # "accuracy" would compare logits with 0.5.
    accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
    model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=[accuracy])
    return model.fit(dataset, epochs=1, verbose=0).history


def port_preprocessing(model, dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = ctl.TrainStep(
            model, keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"]
        )
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_preprocessing_layers(mirrored):
    random = np.random.default_rng(0)
    ages = random.integers(0, 20, (3 * BATCH, 1)).astype("float32")
    kinds = random.choice(["cat", "dog", "bird"], (3 * BATCH, 1))
    labels = random.integers(0, 2, 3 * BATCH)
    twins = Twins(mirrored(2), lambda: make_pets(ages))
    data = batches(BATCH, {"age": ages, "kind": kinds}, labels)
    history = tutorial_preprocessing(twins.theirs, data)
    scalars = port_preprocessing(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(history["loss"][0], rel=1e-5)
    assert scalars["accuracy"] == pytest.approx(history["accuracy"][0], rel=1e-6)
