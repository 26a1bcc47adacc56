"""Tutorials with several networks, each with its own loss and optimizer."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from replica_noise import replica_noise
from twins import Twins, batches, eagerly, images

import ctl

STEPS, BATCH, NOISE = 3, 4, 5
bce = keras.losses.BinaryCrossentropy(from_logits=True)
binary_cross_entropy = ctl.losses.binary_cross_entropy


def adam(rate: float = 2e-3) -> keras.Optimizer:
    return keras.optimizers.Adam(rate, beta_1=0.5)


# https://www.tensorflow.org/tutorials/generative/dcgan -------------------------------------------


def make_dcgan() -> tuple[keras.Model, keras.Model]:
    """Synchronized, BatchNorm has the statistics of the global batch on every number of replicas.
    Without Dropout, which draws other numbers on each replica."""
    generator = [
        keras.Input([NOISE]),
        layers.Dense(4 * 4 * 3, use_bias=False),
        layers.BatchNormalization(synchronized=True),
        layers.LeakyReLU(),
        layers.Reshape([4, 4, 3]),
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
    ]
    discriminator = [
        keras.Input([8, 8, 1]),
        layers.Conv2D(4, 3, strides=2),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    ]
    return keras.Sequential(generator), keras.Sequential(discriminator)


def tutorial_dcgan(generator, discriminator, dataset, noise_of) -> list[list[float]]:
    generator_optimizer, discriminator_optimizer = adam(), adam()

    def discriminator_loss(real_output, fake_output):
        real_loss = bce(tf.ones_like(real_output), real_output)
        fake_loss = bce(tf.zeros_like(fake_output), fake_output)
        return real_loss + fake_loss

    def generator_loss(fake_output):
        return bce(tf.ones_like(fake_output), fake_output)

    @tf.function
    def train_step(images, noise):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated_images = generator(noise, training=True)
            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated_images, training=True)
            gen_loss = generator_loss(fake_output)
            disc_loss = discriminator_loss(real_output, fake_output)
        gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(
            zip(gen_gradients, generator.trainable_variables, strict=True)
        )
        discriminator_optimizer.apply_gradients(
            zip(disc_gradients, discriminator.trainable_variables, strict=True)
        )
        return gen_loss, disc_loss

    losses = []
    for step, image_batch in enumerate(dataset):
        losses.append([float(loss) for loss in train_step(image_batch, noise_of(step))])
    return losses


class DCGAN(ctl.TrainStep):
    def __init__(self, generator, discriminator):
        self.discriminator = discriminator
        super().__init__(generator, [(adam(), generator), (adam(), discriminator)])

    def loss(self, images):
        noise = tf.random.stateless_normal([tf.shape(images)[0], NOISE], self.seed("noise"))
        real = self.discriminator(images, training=True)
        fake = self.discriminator(self.model(noise, training=True), training=True)
        on_fake = binary_cross_entropy(tf.zeros_like(fake), fake)
        on_real = binary_cross_entropy(tf.ones_like(real), real)
        self.log("discriminator", on_real + on_fake)
        return [binary_cross_entropy(tf.ones_like(fake), fake), on_real + on_fake]


def port_dcgan(generator, discriminator, dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = DCGAN(generator, discriminator)
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_dcgan(mirrored):
    twins, data = Twins(mirrored(2), make_dcgan), batches(BATCH, images(STEPS * BATCH, 8, 1))
    with eagerly():
        losses = tutorial_dcgan(
            *twins.theirs, data, lambda step: replica_noise(0, "noise", step, 2, BATCH, NOISE)
        )
    scalars = port_dcgan(*twins.ours, data, mirrored(2))
    twins.assert_equal()
    of_both = [sum(one) / STEPS for one in zip(*losses, strict=True)]
    assert scalars["discriminator"] == pytest.approx(of_both[1], rel=1e-6)
    assert scalars["loss"] == pytest.approx(sum(of_both), rel=1e-6)


# https://www.tensorflow.org/guide/keras/writing_a_training_loop_from_scratch, its second example -


def make_small_gan() -> tuple[keras.Model, keras.Model]:
    generator = [keras.Input([NOISE]), layers.Dense(4, "tanh")]
    discriminator = [keras.Input([4]), layers.Dense(6, "leaky_relu"), layers.Dense(1)]
    return keras.Sequential(generator), keras.Sequential(discriminator)


def tutorial_gan_in_turns(generator, discriminator, dataset) -> list[list[float]]:
    d_optimizer, g_optimizer = adam(), adam()

    @tf.function
    def train_step(real_images, random_latent_vectors):
        generated_images = generator(random_latent_vectors)
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.zeros([BATCH, 1]), tf.ones([BATCH, 1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = bce(labels, discriminator(combined_images))
        grads = tape.gradient(d_loss, discriminator.trainable_weights)
        d_optimizer.apply(grads, discriminator.trainable_weights)
        misleading_labels = tf.ones([BATCH, 1])
        with tf.GradientTape() as tape:
            g_loss = bce(misleading_labels, discriminator(generator(random_latent_vectors)))
        grads = tape.gradient(g_loss, generator.trainable_weights)
        g_optimizer.apply(grads, generator.trainable_weights)
        return d_loss, g_loss

    return [[float(loss) for loss in train_step(*batch)] for batch in dataset]


class GANInTurns(ctl.TrainStep):
    def __init__(self, generator, discriminator):
        self.discriminator = discriminator
        super().__init__(generator, [(adam(), generator), (adam(), discriminator)])

    def loss(self, batch):
        real_images, noise = batch
        real = self.discriminator(real_images, training=True)
        fake = self.discriminator(self.model(noise, training=True), training=True)
        on_real = binary_cross_entropy(tf.ones_like(real), real)
        on_fake = binary_cross_entropy(tf.zeros_like(fake), fake)
        return [binary_cross_entropy(tf.ones_like(fake), fake), (on_real + on_fake) / 2]


def port_gan_in_turns(generator, discriminator, dataset, strategy) -> None:
    with strategy.scope():
        step = GANInTurns(generator, discriminator)
    twice = dataset.flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch).repeat(2))
    loop = ctl.Loop(step, twice, strategy=strategy, steps_per_loop=1)
    turns = itertools.cycle([[generator], [discriminator]])
    loop.train_only([discriminator])
    loop.actions.append(lambda status: loop.train_only(next(turns)))
    loop.train(2 * STEPS)


@pytest.mark.slow
def test_gan_in_turns(mirrored):
    """The discriminator learns first, and the generator from what it has learnt: two steps on each
    batch, in each of which one of them trains. Each optimizer counts its own updates."""
    twins, random = Twins(mirrored(2), make_small_gan), np.random.default_rng(0)
    real, noise = (random.normal(size=(STEPS * BATCH, n)).astype("float32") for n in (4, NOISE))
    data = batches(BATCH, real, noise)
    with eagerly():
        tutorial_gan_in_turns(*twins.theirs, data)
    port_gan_in_turns(*twins.ours, data, mirrored(2))
    twins.assert_equal()


# https://www.tensorflow.org/tutorials/generative/pix2pix -----------------------------------------

LAMBDA = 100


def make_pix2pix() -> tuple[keras.Model, keras.Model]:
    """A U-Net of two levels, and a discriminator of patches, which sees both images."""
    image = keras.Input([8, 8, 3])
    first = layers.LeakyReLU()(layers.Conv2D(4, 4, strides=2, padding="same")(image))
    second = layers.LeakyReLU()(layers.Conv2D(6, 4, strides=2, padding="same")(first))
    up = layers.ReLU()(layers.Conv2DTranspose(4, 4, strides=2, padding="same")(second))
    both = layers.Concatenate()([up, first])
    last = layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh")(both)
    of_image, of_target = keras.Input([8, 8, 3]), keras.Input([8, 8, 3])
    patches = layers.Conv2D(1, 4, strides=2)(layers.Concatenate()([of_image, of_target]))
    return keras.Model(image, last), keras.Model([of_image, of_target], patches)


def tutorial_pix2pix(generator, discriminator, dataset) -> list[list[float]]:
    generator_optimizer, discriminator_optimizer = adam(), adam()

    def generator_loss(disc_generated_output, gen_output, target):
        gan_loss = bce(tf.ones_like(disc_generated_output), disc_generated_output)
        l1_loss = tf.reduce_mean(tf.abs(target - gen_output))
        return gan_loss + LAMBDA * l1_loss, gan_loss, l1_loss

    def discriminator_loss(disc_real_output, disc_generated_output):
        real_loss = bce(tf.ones_like(disc_real_output), disc_real_output)
        generated_loss = bce(tf.zeros_like(disc_generated_output), disc_generated_output)
        return real_loss + generated_loss

    @tf.function
    def train_step(input_image, target):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            gen_output = generator(input_image, training=True)
            disc_real_output = discriminator([input_image, target], training=True)
            disc_generated_output = discriminator([input_image, gen_output], training=True)
            gen_total_loss, _, gen_l1_loss = generator_loss(
                disc_generated_output, gen_output, target
            )
            disc_loss = discriminator_loss(disc_real_output, disc_generated_output)
        generator_gradients = gen_tape.gradient(gen_total_loss, generator.trainable_variables)
        discriminator_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(
            zip(generator_gradients, generator.trainable_variables, strict=True)
        )
        discriminator_optimizer.apply_gradients(
            zip(discriminator_gradients, discriminator.trainable_variables, strict=True)
        )
        return gen_total_loss, gen_l1_loss, disc_loss

    losses = []
    for input_image, target in dataset:
        losses.append([float(loss) for loss in train_step(input_image, target)])
    return losses


class Pix2Pix(ctl.TrainStep):
    def __init__(self, generator, discriminator):
        self.discriminator = discriminator
        super().__init__(generator, [(adam(), generator), (adam(), discriminator)])

    def loss(self, batch):
        image, target = batch
        made = self.model(image, training=True)
        real = self.discriminator([image, target], training=True)
        fake = self.discriminator([image, made], training=True)
        l1 = tf.reduce_mean(tf.abs(target - made), axis=[1, 2, 3])
        self.log("l1", l1)
        of_discriminator = binary_cross_entropy(tf.ones_like(real), real)
        of_discriminator += binary_cross_entropy(tf.zeros_like(fake), fake)
        return [binary_cross_entropy(tf.ones_like(fake), fake) + LAMBDA * l1, of_discriminator]


def port_pix2pix(generator, discriminator, dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = Pix2Pix(generator, discriminator)
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_pix2pix(mirrored):
    twins, pictures = Twins(mirrored(2), make_pix2pix), images(2 * STEPS * BATCH, 8, 3)
    data = batches(BATCH, *pictures.reshape([2, STEPS * BATCH, 8, 8, 3]))
    with eagerly():
        losses = tutorial_pix2pix(*twins.theirs, data)
    scalars = port_pix2pix(*twins.ours, data, mirrored(2))
    twins.assert_equal()
    generator, l1, discriminator = [sum(one) / STEPS for one in zip(*losses, strict=True)]
    assert scalars["l1"] == pytest.approx(l1, rel=1e-6)
    assert scalars["loss"] == pytest.approx(generator + discriminator, rel=1e-6)


# https://www.tensorflow.org/tutorials/generative/cyclegan ----------------------------------------

WEIGHT = 10  # of the cycles


def make_cyclegan() -> tuple[keras.Model, ...]:
    """From X to Y, from Y to X, and a discriminator for each."""

    def generator() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input([6, 6, 2]),
                layers.Conv2D(4, 3, padding="same", use_bias=False),
                layers.GroupNormalization(groups=-1),  # of each channel of each image
                layers.ReLU(),
                layers.Conv2D(2, 3, padding="same", activation="tanh"),
            ]
        )

    def discriminator() -> keras.Model:
        return keras.Sequential([keras.Input([6, 6, 2]), layers.Conv2D(1, 3, strides=2)])

    return generator(), generator(), discriminator(), discriminator()


def tutorial_cyclegan(
    generator_g, generator_f, discriminator_x, discriminator_y, dataset
) -> list[float]:
    generator_g_optimizer, generator_f_optimizer = adam(), adam()
    discriminator_x_optimizer, discriminator_y_optimizer = adam(), adam()

    def discriminator_loss(real, generated):
        real_loss = bce(tf.ones_like(real), real)
        generated_loss = bce(tf.zeros_like(generated), generated)
        return (real_loss + generated_loss) * 0.5

    def generator_loss(generated):
        return bce(tf.ones_like(generated), generated)

    def calc_cycle_loss(real_image, cycled_image):
        return WEIGHT * tf.reduce_mean(tf.abs(real_image - cycled_image))

    def identity_loss(real_image, same_image):
        return WEIGHT * 0.5 * tf.reduce_mean(tf.abs(real_image - same_image))

    @tf.function
    def train_step(real_x, real_y):
        with tf.GradientTape(persistent=True) as tape:
            fake_y = generator_g(real_x, training=True)
            cycled_x = generator_f(fake_y, training=True)
            fake_x = generator_f(real_y, training=True)
            cycled_y = generator_g(fake_x, training=True)
            same_x = generator_f(real_x, training=True)
            same_y = generator_g(real_y, training=True)
            disc_real_x = discriminator_x(real_x, training=True)
            disc_real_y = discriminator_y(real_y, training=True)
            disc_fake_x = discriminator_x(fake_x, training=True)
            disc_fake_y = discriminator_y(fake_y, training=True)
            gen_g_loss = generator_loss(disc_fake_y)
            gen_f_loss = generator_loss(disc_fake_x)
            total_cycle_loss = calc_cycle_loss(real_x, cycled_x) + calc_cycle_loss(real_y, cycled_y)
            total_gen_g_loss = gen_g_loss + total_cycle_loss + identity_loss(real_y, same_y)
            total_gen_f_loss = gen_f_loss + total_cycle_loss + identity_loss(real_x, same_x)
            disc_x_loss = discriminator_loss(disc_real_x, disc_fake_x)
            disc_y_loss = discriminator_loss(disc_real_y, disc_fake_y)
        generator_g_gradients = tape.gradient(total_gen_g_loss, generator_g.trainable_variables)
        generator_f_gradients = tape.gradient(total_gen_f_loss, generator_f.trainable_variables)
        discriminator_x_gradients = tape.gradient(disc_x_loss, discriminator_x.trainable_variables)
        discriminator_y_gradients = tape.gradient(disc_y_loss, discriminator_y.trainable_variables)
        generator_g_optimizer.apply_gradients(
            zip(generator_g_gradients, generator_g.trainable_variables, strict=True)
        )
        generator_f_optimizer.apply_gradients(
            zip(generator_f_gradients, generator_f.trainable_variables, strict=True)
        )
        discriminator_x_optimizer.apply_gradients(
            zip(discriminator_x_gradients, discriminator_x.trainable_variables, strict=True)
        )
        discriminator_y_optimizer.apply_gradients(
            zip(discriminator_y_gradients, discriminator_y.trainable_variables, strict=True)
        )
        return total_gen_g_loss + total_gen_f_loss + disc_x_loss + disc_y_loss

    return [float(train_step(image_x, image_y)) for image_x, image_y in dataset]


class CycleGAN(ctl.TrainStep):
    def __init__(self, *networks):
        self.networks = networks
        super().__init__(networks[0], [(adam(), network) for network in networks])

    def loss(self, batch):
        to_y, to_x, on_x, on_y = self.networks
        x, y = batch
        fake_x, fake_y = to_x(y, training=True), to_y(x, training=True)
        cycles = self.l1(x, to_x(fake_y, training=True)) + self.l1(y, to_y(fake_x, training=True))
        same_x, same_y = to_x(x, training=True), to_y(y, training=True)
        return [
            self.is_real(on_y(fake_y, training=True)) + cycles + 0.5 * self.l1(y, same_y),
            self.is_real(on_x(fake_x, training=True)) + cycles + 0.5 * self.l1(x, same_x),
            self.tells(on_x(x, training=True), on_x(fake_x, training=True)),
            self.tells(on_y(y, training=True), on_y(fake_y, training=True)),
        ]

    def l1(self, a, b):
        return WEIGHT * tf.reduce_mean(tf.abs(a - b), axis=[1, 2, 3])

    def is_real(self, logits):
        return binary_cross_entropy(tf.ones_like(logits), logits)

    def tells(self, real, fake):
        return 0.5 * (self.is_real(real) + binary_cross_entropy(tf.zeros_like(fake), fake))


def port_cyclegan(networks, dataset, strategy) -> dict[str, float]:
    with strategy.scope():
        step = CycleGAN(*networks)
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=1)


@pytest.mark.slow
def test_cyclegan(mirrored):
    """The images of both kinds come from two datasets."""
    twins = Twins(mirrored(2), make_cyclegan)
    kinds = [batches(BATCH, images(STEPS * BATCH, 6, 2, seed=seed)) for seed in (0, 1)]
    data = tf.data.Dataset.zip(*kinds)
    with eagerly():
        losses = tutorial_cyclegan(*twins.theirs, data)
    scalars = port_cyclegan(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(sum(losses) / STEPS, rel=1e-6)
