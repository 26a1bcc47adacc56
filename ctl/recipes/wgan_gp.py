"""A Wasserstein GAN with gradient penalty: the generator learns at every fifth step only.

Gulrajani et al. 2017, arXiv:1704.00028, equation 3 and algorithm 1: the critic takes
``critic_steps`` steps, each on a new batch, for each step of the generator. The generator trains
beside the last of them, from the weights before it. `ctl.recipes.gan` has the parameter groups and
the images after an evaluation. The paper trains with Adam: a rate of 1e-4, beta_1 of 0, beta_2 of
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

    def losses(self, batch: Any, noise: Any, mixing: Any) -> list[tf.Tensor]:
        """The losses of generator and critic for each image, two of float32 [n]. ``batch`` is
        ``(images, labels)``; ``noise`` and ``mixing`` are seeds."""
        generator, critic = self.model.layers
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
        self.log("generator", -on_fake)
        self.log("critic", on_fake - on_real + penalty)
        return [-on_fake, on_fake - on_real + penalty]


class Evaluation(Wasserstein, gan.Evaluation):
    """Both losses on the data to evaluate on."""

    def loss(self, batch: Any) -> list[tf.Tensor]:
        return self.losses(batch, SEED, SEED)


class WGANGP(Wasserstein, gan.GAN):
    """Trains a generator and a critic. Arguments as `ctl.recipes.gan.GAN`."""

    eval_step = Evaluation
    critic_steps: int = ctl.option(5, "Steps for each of the generator.", lower_bound=1)

    def loss(self, batch: Any) -> list[tf.Tensor]:
        return self.losses(batch, self.seed("noise"), self.seed("mixing"))

    def attach(self, loop: ctl.Loop) -> None:
        """See `ctl.TrainStep.attach`."""
        super().attach(loop)
        turns = Turns(loop, self.model.layers[1], self.critic_steps)
        turns.choose(loop.global_step)
        loop.actions.insert(0, turns)  # before those that save: a checkpoint has what trains next


class Turns:
    """An action: at every ``steps``-th step all trains, and only ``part`` at the others."""

    def __init__(self, loop: ctl.Loop, part: keras.Layer, steps: int):
        self._loop, self._part, self._steps = loop, part, steps

    def choose(self, step: int) -> None:
        """Sets what trains in the step after ``step`` of them."""
        all_train = step % self._steps == self._steps - 1
        self._loop.train_only(None if all_train else [self._part])

    def __call__(self, status: ctl.actions.Status) -> None:
        self.choose(status.step)

    def steps_until_due(self, step: int) -> int:
        """A call of the loop ends where what trains changes."""
        return max(1, self._steps - 1 - step % self._steps)


def make_model() -> keras.Model:
    """For images of 28x28x1. A critic has no BatchNorm, since the penalty is of single images
    (section 4), and needs no Dropout."""
    generator, _ = gan.make_model().layers
    critic = [keras.Input([28, 28, 1]), layers.Flatten()]
    critic += [layers.Dense(256, "leaky_relu"), layers.Dense(256, "leaky_relu")]
    critic += [layers.Dense(1, dtype="float32")]
    return keras.Sequential([generator, keras.Sequential(critic)])
