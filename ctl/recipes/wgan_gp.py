"""A Wasserstein GAN with gradient penalty: the generator learns at every fifth step only.

Gulrajani et al. 2017, arXiv:1704.00028, equation 3 and algorithm 1: the critic takes
``critic_steps`` steps, each on a new batch, for each step of the generator. The generator trains
beside the last of them, from the weights before it. `ctl.recipes.gan` has the optimizers and the
images after an evaluation. The paper trains with Adam: a rate of 1e-4, beta_1 of 0, beta_2 of
0.9::

    python -m ctl.train --model_dir=/tmp/wgan --step=ctl.recipes.wgan_gp:WGANGP \\
        --model=ctl.recipes.wgan_gp:make_model --learning_rate=1e-4 --schedule=constant --epochs=20
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

import ctl
from ctl import BaseStep, local_batch
from ctl.recipes import gan
from ctl.recipes.samples import SEED


class Wasserstein(BaseStep):
    """What training and evaluation share."""

    gradient_penalty: float = ctl.option(10.0, "Weight of the gradient penalty.", lower_bound=0.0)

    def losses(self, batch: Any, noise: Any, mixing: Any) -> dict[str, tf.Tensor]:
        """The losses of generator and critic for each image, float32 [n]. ``batch`` is ``(images,
        labels)``; ``noise`` and ``mixing`` are seeds."""
        generator, critic = self.model["generator"], self.model["critic"]
        real = self.preprocess(local_batch.pair(batch)[0])
        count = tf.shape(real)[0]
        drawn = tf.random.stateless_normal([count, generator.input_shape[1]], noise)
        fake = generator(drawn, training=self.training)
        on_fake, on_real = (critic(one, training=self.training)[:, 0] for one in (fake, real))
        share = tf.random.stateless_uniform([count, *[1] * (len(real.shape) - 1)], mixing)
        between = share * real + (1.0 - share) * fake
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = critic(between, training=self.training)
        slopes = tf.norm(layers.Flatten()(tape.gradient(scores, between)), axis=1)
        penalty = self.gradient_penalty * (slopes - 1.0) ** 2
        losses = {"generator": -on_fake, "critic": on_fake - on_real + penalty}
        for name, each in losses.items():
            self.log(name, each)
        return losses


class Evaluation(Wasserstein, gan.Evaluation):
    """Both losses on the data to evaluate on."""

    def loss(self, batch: Any) -> dict[str, tf.Tensor]:
        return self.losses(batch, SEED, SEED)


class WGANGP(Wasserstein, gan.GAN):
    """Trains the models ``generator`` and ``critic``. Arguments as `ctl.recipes.gan.GAN`."""

    eval_step = Evaluation
    other = "critic"
    critic_steps: int = ctl.option(5, "Steps for each of the generator.", lower_bound=1)

    def loss(self, batch: Any) -> dict[str, tf.Tensor]:
        return self.losses(batch, self.seed("noise"), self.seed("mixing"))

    def attach(self, loop: ctl.Loop) -> None:
        """See `ctl.TrainStep.attach`."""
        super().attach(loop)
        turns = [(["critic"], self.critic_steps - 1), (None, 1)]
        loop.actions.insert(0, ctl.actions.Turns(loop, turns))


def make_model() -> dict[str, keras.Model]:
    """For images of 28x28x1. A critic has no BatchNorm, since the penalty is of single images
    (section 4), and needs no Dropout."""
    critic = [keras.Input([28, 28, 1]), layers.Flatten()]
    critic += [layers.Dense(256, "leaky_relu"), layers.Dense(256, "leaky_relu")]
    critic += [layers.Dense(1, dtype="float32")]
    return {"generator": gan.make_model()["generator"], "critic": keras.Sequential(critic)}
