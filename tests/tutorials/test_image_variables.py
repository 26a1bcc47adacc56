"""Tutorials that train an image: its pixels are the weights, and the network is fixed."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from twins import eagerly, images

import ctl

STEPS, SIZE = 4, 12


def extractor() -> keras.Model:
    """From an image in [-1, 1] to what two layers make of it, as VGG and Inception do."""
    keras.utils.set_random_seed(2)
    image = keras.Input([SIZE, SIZE, 3])
    first = layers.Conv2D(4, 3, activation="relu")(image)
    model = keras.Model(image, [first, layers.Conv2D(3, 3, activation="relu")(first)])
    model.trainable = False
    return model


class Picture(keras.Model):
    """The image, whose values an update leaves between ``low`` and ``high``."""

    def __init__(self, image: np.ndarray, low: float, high: float):
        super().__init__()
        self.image = self.add_weight(
            shape=image.shape,
            initializer=lambda shape, dtype: tf.constant(image, dtype),
            constraint=lambda pixels: tf.clip_by_value(pixels, low, high),
            name="image",
        )
        self.built = True


# https://www.tensorflow.org/tutorials/generative/style_transfer ----------------------------------

STYLE_WEIGHT, CONTENT_WEIGHT, VARIATION_WEIGHT = 1e4, 10.0, 0.1


def gram_matrix(features: tf.Tensor) -> tf.Tensor:
    result = tf.linalg.einsum("bijc,bijd->bcd", features, features)
    return result / tf.cast(features.shape[1] * features.shape[2], tf.float32)


def tutorial_style_transfer(network, content_image, style_image) -> tuple[np.ndarray, list[float]]:
    def extract(image):
        style, content = network(image * 2.0 - 1.0)
        return gram_matrix(style), content

    style_targets, content_targets = extract(style_image)[0], extract(content_image)[1]
    opt = keras.optimizers.Adam(learning_rate=0.02, beta_1=0.99, epsilon=1e-1)
    image = tf.Variable(content_image)

    def style_content_loss(style, content):
        style_loss = STYLE_WEIGHT * tf.reduce_mean((style - style_targets) ** 2)
        return style_loss + CONTENT_WEIGHT * tf.reduce_mean((content - content_targets) ** 2)

    @tf.function
    def train_step(image):
        with tf.GradientTape() as tape:
            loss = style_content_loss(*extract(image))
            loss += VARIATION_WEIGHT * tf.image.total_variation(image)[0]
        grad = tape.gradient(loss, image)
        opt.apply_gradients([(grad, image)])
        image.assign(tf.clip_by_value(image, 0.0, 1.0))
        return loss

    losses = [float(train_step(image)) for _ in range(STEPS)]
    return image.numpy(), losses


class StyleTransfer(ctl.TrainStep):
    def __init__(self, picture, network):
        self.network = network
        optimizer = keras.optimizers.Adam(0.02, beta_1=0.99, epsilon=1e-1)
        super().__init__(picture, optimizer)

    def extract(self, image):
        style, content = self.network(image * 2.0 - 1.0)
        return gram_matrix(style), content

    def loss(self, batch):
        content_image, style_image = batch
        image = self.model.image.value
        style, content = self.extract(image)
        loss = STYLE_WEIGHT * tf.reduce_mean((style - self.extract(style_image)[0]) ** 2)
        loss += CONTENT_WEIGHT * tf.reduce_mean((content - self.extract(content_image)[1]) ** 2)
        return loss + VARIATION_WEIGHT * tf.image.total_variation(image)


def port_style_transfer(network, content_image, style_image) -> tuple[np.ndarray, dict]:
    step = StyleTransfer(Picture(content_image, 0.0, 1.0), network)
    data = tf.data.Dataset.from_tensors((content_image, style_image))
    scalars = ctl.Loop(step, data).train(STEPS)
    return step.model.image.numpy(), scalars


def test_style_transfer():
    """On one replica: there is one image."""
    content, style = np.split(np.clip(0.5 + 0.6 * images(2, SIZE, 3), 0.0, 1.0), 2)
    network = extractor()
    with eagerly():
        wanted, losses = tutorial_style_transfer(network, content, style)
    found, scalars = port_style_transfer(network, content, style)
    assert np.abs(wanted - content).max() > 0.02
    assert wanted.min() == 0.0 and wanted.max() == 1.0
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


# https://www.tensorflow.org/tutorials/generative/deepdream ---------------------------------------

STEP_SIZE = 0.3


def tutorial_deepdream(model, img) -> tuple[np.ndarray, list[float]]:
    def calc_loss(img, model):
        layer_activations = model(tf.expand_dims(img, axis=0))
        return tf.reduce_sum([tf.math.reduce_mean(act) for act in layer_activations])

    @tf.function
    def ascend(img):
        with tf.GradientTape() as tape:
            tape.watch(img)
            loss = calc_loss(img, model)
        gradients = tape.gradient(loss, img)
        gradients /= tf.math.reduce_std(gradients) + 1e-8
        img = img + gradients * STEP_SIZE
        return loss, tf.clip_by_value(img, -1, 1)

    losses = []
    for _ in range(STEPS):
        loss, img = ascend(img)
        losses.append(float(loss))
    return img.numpy(), losses


class DeepDream(ctl.TrainStep):
    def __init__(self, picture, network):
        self.network = network
        super().__init__(picture, keras.optimizers.SGD(STEP_SIZE))

    def loss(self, batch):
        activations = self.network(self.model.image[tf.newaxis])
        return -tf.add_n([tf.reduce_mean(one, axis=[1, 2, 3]) for one in activations])

    def clip(self, gradients):
        return [g / (tf.math.reduce_std(g) + 1e-8) for g in gradients]


def port_deepdream(network, img) -> tuple[np.ndarray, dict[str, float]]:
    step = DeepDream(Picture(img, -1.0, 1.0), network)
    scalars = ctl.Loop(step, tf.data.Dataset.from_tensors([0])).train(STEPS)
    return step.model.image.numpy(), scalars


def test_deepdream():
    img, network = tf.constant(images(1, SIZE, 3)[0]), extractor()
    with eagerly():
        wanted, losses = tutorial_deepdream(network, img)
    found, scalars = port_deepdream(network, img)
    assert np.abs(wanted - img).max() > 0.05 and 1.0 in wanted
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert -scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
