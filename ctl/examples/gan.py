"""A generative adversarial network: a step with two models, two losses and two optimizers.

    python -m ctl.examples.gan

The generator makes images from noise; the discriminator learns to tell them from real ones
(Goodfellow et al. 2014, arXiv:1406.2661, with the loss of section 3 for the generator). It draws
three images in characters, which begin to look like clothes.
"""

import keras
import tensorflow as tf
from keras import layers

import ctl

NOISE, BATCH, STEPS = 64, 64, 3000


class GAN(ctl.TrainStep):
    """Each model has an optimizer and a loss of its own, by its name."""

    def loss(self, batch: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Two losses [n] from one forward pass."""
        generator, discriminator = self.model["generator"], self.model["discriminator"]
        images, _ = batch
        real = self.preprocess(images)
        noise = tf.random.stateless_normal([tf.shape(real)[0], NOISE], self.seed("noise"))
        on_fake = discriminator(generator(noise, training=True), training=True)[:, 0]
        on_real = discriminator(real, training=True)[:, 0]
        generator_loss = tf.nn.softplus(-on_fake)
        discriminator_loss = tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake)
        self.log("generator", generator_loss)
        self.log("discriminator", discriminator_loss)
        return {"generator": generator_loss, "discriminator": discriminator_loss}


def make_generator() -> keras.Model:
    parts = [keras.Input([NOISE]), layers.Dense(256, use_bias=False)]
    parts += [layers.BatchNormalization(momentum=0.9), layers.ReLU()]
    parts += [layers.Dense(28 * 28, "sigmoid"), layers.Reshape([28, 28, 1])]
    return keras.Sequential(parts, name="generator")


def make_discriminator() -> keras.Model:
    parts = [keras.Input([28, 28, 1]), layers.Flatten(), layers.Dropout(0.4)]
    parts += [layers.Dense(128, "leaky_relu"), layers.Dropout(0.4), layers.Dense(1)]
    return keras.Sequential(parts, name="discriminator")


def make_loop() -> ctl.Loop:
    data = ctl.data.load("fashion_mnist_mini", global_batch_size=BATCH)
    models = {"generator": make_generator(), "discriminator": make_discriminator()}
    optimizers = {name: keras.optimizers.Adam(5e-4, beta_1=0.5) for name in models}
    return ctl.Loop(GAN(models, optimizers), data)


def draw(images: tf.Tensor) -> str:
    """Images side by side, in characters."""
    rows = tf.concat([*images[:, ::2, :, 0]], axis=1).numpy()
    return "\n".join("".join(" .:-=+*#%@"[int(9.99 * value)] for value in row) for row in rows)


def main() -> None:
    keras.utils.set_random_seed(1)
    loop = make_loop()
    scalars = loop.train(STEPS)
    print(f"generator {scalars['generator']:.2f}, discriminator {scalars['discriminator']:.2f}")
    generator = loop.step.model["generator"]
    print(draw(generator(tf.random.stateless_normal([3, NOISE], seed=[0, 0]))))


if __name__ == "__main__":
    main()
