"""`ctl.testing` accepts steps that are right, and names the cause of mistakes that people make."""

from __future__ import annotations

import random

import keras
import pytest
import tensorflow as tf
from keras import layers
from right_steps import NOT_COMPOSED, RATE, RIGHT, check_right, maker
from wrong_steps import COMPOSED, WRONG, check_wrong, composed, wrong

from ctl import testing
from ctl.distributed import replicas
from ctl.phases.losses import cross_entropy
from ctl.step import TrainStep


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    check_right(RIGHT[name].make(), name)


PROGRAM = """
import ctl, keras, numpy as np
from ctl import testing

def make(strategy, checkpoints):
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
        step = ctl.TrainStep(model, keras.optimizers.SGD(0.1))
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    data = ctl.data.InMemory((x, (x[:, 0] > 0).astype("int64")), global_batch_size=8)
    return ctl.Loop(step, data, strategy=strategy, checkpoints=checkpoints)

def run():
    testing.CHECK
    print("right")
"""


@pytest.mark.parametrize(
    "check", ["check_step(make, steps=2)", "check_replicas_equal_one(make, 2)"]
)
def test_a_program_need_not_cut_the_cpu(zygote, tmp_path, check):
    """TensorFlow has one device there until it runs the first operation, which comes too early if
    one replica is the first to train."""
    (tmp_path / "program.py").write_text(PROGRAM.replace("CHECK", check), "utf-8")
    assert zygote.run("program", path=[tmp_path]).stdout == "right\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    check_wrong(wrong(name), name)


@pytest.mark.slow
def test_a_drawn_mistake_of_a_drawn_method():
    """The same in every run; `fuzz` draws others."""
    draw, methods = random.Random(0), [name for name in RIGHT if name not in NOT_COMPOSED]
    mistake, method = draw.choice(COMPOSED), draw.choice(methods)
    check_wrong(composed(mistake, RIGHT[method]), mistake)


def test_the_lists_are_complete():
    assert len(RIGHT) == 14
    assert len(WRONG) >= 37


def test_layers_that_draw():
    drawing = [layers.Dropout(0.1), layers.GRUCell(2, dropout=0.1), layers.GaussianNoise(1.0)]
    silent = [layers.Dropout(0.0), layers.GRUCell(2), layers.LSTMCell(2), layers.SimpleRNNCell(2)]
    assert [replicas.draws(layer) for layer in drawing + silent] == [True] * 3 + [False] * 4


def plain(weights: keras.Model, batches) -> None:
    """Trains by hand."""
    for features, labels in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(cross_entropy(labels, weights(features, training=True)))
        variables = [v.value for v in weights.trainable_variables]
        for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
            variable.assign_sub(RATE * gradient)


class DecaysTwice(TrainStep):
    def clip(self, gradients):
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        return [g + 0.01 * v.value for g, v in pairs]


@pytest.mark.slow
def test_a_reference():
    testing.check_replicas_equal_one(maker(DecaysTwice), 2, steps=2)  # which are all wrong alike
    with pytest.raises(AssertionError, match=r"differs from the reference by .* after 2 steps"):
        testing.check_reference(maker(DecaysTwice), plain, steps=2)


@pytest.mark.slow
def test_each_check_by_itself():
    testing.check_reduced_once(maker(), 2)
    testing.check_one_trace(maker(), steps=2)


class Noise(TrainStep):
    """Its noise depends on the place in the batch, too."""

    by_replica = True

    def noisy(self, features, size=0.3):
        seed = self.seed("features", per_replica=self.by_replica)
        return features + size * tf.random.stateless_normal(tf.shape(features), seed)

    def loss(self, batch):
        features, labels = batch
        return super().loss((self.noisy(features), labels))


class NoiseAlike(Noise):
    by_replica = False


class Contrasts(Noise):
    """The negatives are the other examples of one replica, which is wrong."""

    size = 0.3

    def loss(self, batch):
        z = self.model(self.noisy(batch[0], self.size), training=True)
        return cross_entropy(tf.range(tf.shape(z)[0]), tf.matmul(z, z, transpose_b=True))


class ContrastsWithoutNoise(Contrasts):
    size = 0.0


@pytest.mark.slow
def test_noise_is_named_and_a_mistake_beside_it_is_found_as_advised():
    with pytest.raises(AssertionError, match="numbers depend on the number of examples, so make"):
        testing.check_replicas_equal_one(maker(NoiseAlike), 2, steps=2)
    with pytest.raises(AssertionError, match="other random numbers, .*: make the noise 0 for this"):
        testing.check_replicas_equal_one(maker(Contrasts), 2, steps=2)
    with pytest.raises(AssertionError, match="another loss among other examples: it uses a max"):
        testing.check_replicas_equal_one(maker(ContrastsWithoutNoise), 2, steps=2)
