"""Parameter groups: each optimizer trains its own variables, with its own rate and loss."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, examples, keras_loss, make_loop, mlp, sgd

import ctl
from ctl import testing
from ctl.control.evaluator import Evaluator
from ctl.errors import UsageError
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

pytestmark = pytest.mark.compiled_update

STEPS = 4


def batches(**options) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples(STEPS * BATCH)).batch(BATCH, **options)


def critic() -> keras.Model:
    parts = [keras.layers.Dense(6, "tanh", kernel_regularizer="l2"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


class Adversarial(TrainStep):
    """A generator (the model, from noise of the features to features) against a critic."""

    def __init__(self, model, optimizer, *args, **options):
        self.critic = critic()
        groups = [
            (optimizer, model.trainable_variables),
            (
                keras.optimizers.Adam(0.02),
                self.critic,
                lambda step: 0.02 / (1.0 + 0.0 * _float(step)),
            ),
        ]
        super().__init__(model, groups, *args, **options)

    def loss(self, batch):
        return losses(self.model, self.critic, batch[0])


def _float(step):
    return tf.cast(step, tf.float32)


def losses(model, judge, features):
    fake, real = judge(model(features))[:, 0], judge(features)[:, 0]
    return [tf.nn.softplus(-fake), tf.nn.softplus(fake) + tf.nn.softplus(-real)]


def generator() -> keras.Model:
    parts = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(FEATURES, kernel_regularizer="l2")]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def reference(model, judge) -> None:
    """Plain TensorFlow: both gradients of the same batch, then both updates."""
    pairs = (keras.optimizers.SGD(0.1), model), (keras.optimizers.Adam(0.02), judge)
    for features, _ in batches():
        with tf.GradientTape(persistent=True) as tape:
            penalty = tf.add_n(model.losses + judge.losses)
            totals = [tf.reduce_mean(one) + penalty for one in losses(model, judge, features)]
        gradients = [
            tape.gradient(total, [v.value for v in part.trainable_variables])
            for total, (_, part) in zip(totals, pairs, strict=True)
        ]
        for (optimizer, part), found in zip(pairs, gradients, strict=True):
            optimizer.apply(found, part.trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"jit_compile": True}, {"accumulate_steps": 2, "loss_scale": True}]
)
def test_two_losses_equal_plain_tensorflow(mirrored, options):
    data = batches(drop_remainder="jit_compile" in options)
    of = {"model": generator, "optimizer": sgd(), "step_class": Adversarial}
    loop = make_loop(mirrored(2), data=data, **of, **options)
    step = loop.step
    model, judge = generator(), critic()
    for mine, other in ((step.model, model), (step.critic, judge)):
        other.set_weights([v.numpy() for v in mine.variables])
    before = judge.get_weights()
    reference(model, judge)
    loop.train(STEPS)
    for mine, other in ((step.model, model), (step.critic, judge)):
        for a, b in zip(mine.variables, other.variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-5)
    assert np.abs(before[0] - judge.get_weights()[0]).max() > 1e-2


@pytest.mark.slow
def test_the_log_counts_regularizers_once():
    of = {"model": generator, "optimizer": sgd(), "step_class": Adversarial}
    loop = make_loop(data=batches(), **of)
    model, judge = loop.step.model, loop.step.critic
    features = next(iter(batches()))[0]
    wanted = tf.add_n([*losses(model, judge, features)])
    penalty = float(tf.add_n(model.losses + judge.losses))
    wanted = float(tf.reduce_mean(wanted)) + penalty
    assert penalty > 0.01
    assert loop.train(1)["loss"] == pytest.approx(wanted, rel=1e-5)


def test_regularizers_of_a_layer_of_the_step_count_with_one_optimizer():
    class WithHead(TrainStep):
        def __init__(self, model, optimizer, *args, **options):
            self.head = keras.layers.Dense(CLASSES, kernel_regularizer="l2")
            self.head.build([None, FEATURES])
            variables = [*model.trainable_variables, *self.head.trainable_variables]
            super().__init__(model, [(optimizer, variables)], *args, **options)

        def loss(self, batch):
            features, labels = batch
            return self.loss_fn(labels, self.head(self.model(features)))

    def regularized(strength):
        keras.utils.set_random_seed(1)
        of = {"model": generator, "optimizer": sgd(), "step_class": WithHead}
        loop = make_loop(data=batches(), **of)
        loop.step.head.kernel.regularizer = keras.regularizers.L2(strength)
        square = float(tf.reduce_sum(loop.step.head.kernel**2))
        return loop.train(1)["loss"], square

    (without, _), (strong, square) = regularized(0.0), regularized(0.5)
    assert strong - without == pytest.approx(0.5 * square, rel=1e-4)


def groups_of(model) -> list:
    """Two rates, of which one follows a schedule."""
    first, second = model.layers
    return [
        (keras.optimizers.SGD(0.5), first, lambda step: 0.5 / (1.0 + _float(step))),
        (keras.optimizers.Adam(0.01, weight_decay=0.1), second.trainable_variables),
    ]


def layerwise(strategy, **options):
    class Layerwise(TrainStep):
        def __init__(self, model, optimizer, *args, **more):
            super().__init__(model, groups_of(model), *args, **more)

    return make_loop(strategy, step_class=Layerwise, data=batches(), **options)


@pytest.mark.slow
def test_rates_of_layers_equal_plain_keras(mirrored):
    loop = layerwise(mirrored(2), ema_decay=0.9)
    model = mlp()
    model.set_weights([v.numpy() for v in loop.step.model.variables])
    (sgd, first, rate), (adam, second) = groups_of(model)
    for step, (features, labels) in enumerate(batches()):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras_loss(labels, model(features)))
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        sgd.learning_rate = float(rate(step))
        sgd.apply(found[:2], first.trainable_variables)
        adam.apply(found[2:], second)
    scalars = loop.train(STEPS)
    for a, b in zip(loop.step.model.variables, model.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    assert scalars["learning_rate"] == pytest.approx(0.5 / STEPS)
    assert scalars["learning_rate_2"] == pytest.approx(0.01)


def test_the_schedule_of_the_loop_is_that_of_groups_without_one(mirrored):
    scalars = layerwise(mirrored(1), schedule=lambda step: 0.25).train(STEPS)
    assert scalars["learning_rate"] == pytest.approx(0.5 / STEPS)
    assert scalars["learning_rate_2"] == 0.25


@pytest.mark.slow
def test_groups_resume_bit_for_bit():
    def make(strategy, checkpoints):
        return layerwise(strategy, ema_decay=0.9, checkpoints=checkpoints)

    testing.check_resumed(make, 2, steps=STEPS)


def refused(message, groups) -> None:
    class Wrong(TrainStep):
        def __init__(self, model, optimizer, *args, **options):
            self.frozen = keras.Variable(np.zeros(3, "float32"), trainable=False, name="frozen")
            super().__init__(model, groups(model, self.frozen), *args, **options)

    with pytest.raises(UsageError, match=message):
        make_loop(step_class=Wrong).train(1)


def test_wrong_groups_are_refused():
    new, one = sgd(), sgd()()
    refused("in two parameter groups: train it in one", lambda m, _: [(new(), m), (new(), m)])
    refused("in no parameter group: add it to one", lambda m, _: [(new(), m.layers[0])])
    refused("give each group its own", lambda m, _: [(one, m.layers[0]), (one, m.layers[1])])
    refused("frozen of a parameter group is not", lambda m, f: [(new(), m), (new(), [f])])
    refused("give .optimizer, variables. or", lambda m, _: [(new(), m.layers[0]), m.layers[1]])
    refused("unknown optimizer 'adma'", lambda m, _: [("adma", m)])
    refused("clipnorm must not be set", lambda m, _: [(keras.optimizers.SGD(clipnorm=1.0), m)])


@pytest.mark.slow
def test_an_optimizer_of_another_model_is_refused():
    optimizer, data = keras.optimizers.Adam(), (np.zeros([8, 5]), np.zeros([8, 2]))
    for number in range(2):
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2, name=f"dense_{number}")])
        step = TrainStep(model, optimizer, "mse")
        if number == 0:
            ctl.Loop(step, data, global_batch_size=4).train(1)
            ctl.Loop(TrainStep(model, optimizer, "mse"), data, global_batch_size=4).train(1)
            continue
        with pytest.raises(
            UsageError, match="built for other variables than .*dense_1/kernel: make"
        ):
            ctl.Loop(step, data, global_batch_size=4)


def test_a_group_is_a_list_of_layers_and_variables_with_the_name_of_an_optimizer():
    layers = [keras.layers.Dense(units) for units in (4, 3, 2)]
    model = keras.Sequential([keras.Input([5]), *layers])
    groups = [("adam", [layers[0], layers[1].kernel]), ("sgd", [layers[1].bias, layers[2]])]
    step = TrainStep(model, groups, "mse")
    data = np.zeros([8, 5], "float32"), np.zeros([8, 2], "float32")
    ctl.Loop(step, data, global_batch_size=4).train(1)
    variables = [[variable.path for variable in group.variables] for group in step.updater.groups]
    kernels = [layer.kernel.path for layer in layers]
    biases = [layer.bias.path for layer in layers]
    assert variables == [
        [kernels[0], biases[0], kernels[1]],
        [biases[1], kernels[2], biases[2]],
    ]


def test_one_loss_for_each_group():
    class Wrong(TrainStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            return [losses, losses], outputs

    with pytest.raises(UsageError, match="a list of 2 losses, and the optimizer has 1 parameter"):
        make_loop(step_class=Wrong).train(1)


def test_an_evaluation_adds_a_list_of_losses(mirrored):
    class Both(EvalStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            return [losses, 2.0 * losses], outputs

    model = mlp()
    once, both = (Evaluator(kind(model), batches()).run()["loss"] for kind in (EvalStep, Both))
    assert both == pytest.approx(3 * once, rel=1e-6)


def test_what_a_step_needs_is_named_if_it_was_compiled():
    model = mlp()
    with pytest.raises(UsageError, match="^None is not an optimizer: give an object such as"):
        TrainStep(model)
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(UsageError, match=r"^a step takes nothing from model\.compile: give Tr"):
        TrainStep(model)
    TrainStep(model, model.optimizer, model.loss)
