"""`ctl.testing` finds the mistakes that people make, and says what is wrong."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, accuracy, examples
from keras import layers

from ctl import testing
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.losses import cross_entropy
from ctl.step import TrainStep

pytestmark = pytest.mark.slow

RATE = 0.1


def model(*more: keras.Layer) -> keras.Model:
    parts = [layers.Dense(6, "tanh", name="first"), *more, layers.Dense(CLASSES, name="last")]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


def maker(kind=TrainStep, *, more=lambda: (), rate=None, seed=None, optimizer=None, **options):
    """The ``make`` of a step, with ``more`` layers, and perhaps a ``rate`` and a ``seed`` of the
    data that depend on the replicas."""

    def make(strategy, checkpoints):
        replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            sgd = (optimizer or keras.optimizers.SGD)(RATE)
            step = kind(model(*more()), sgd, metrics=[accuracy()], **options)
        data = InMemory(examples(), global_batch_size=BATCH, seed=seed(replicas) if seed else 3)
        schedule = rate and (lambda step: rate(replicas))
        return Loop(step, data, strategy=strategy, checkpoints=checkpoints, schedule=schedule)

    return make


class Reduces(TrainStep):
    """With a function in place of the all-reduce; it is given what sums over replicas."""

    how = staticmethod(lambda add, gradients, replicas: add(gradients))

    def sum_gradients(self, gradients):
        return self.how(super().sum_gradients, gradients, self.strategy.num_replicas_in_sync)


def reduces(how) -> type:
    return type("Mistake", (Reduces,), {"how": staticmethod(how)})


class ClipsBefore(TrainStep):
    def backward(self, tape, loss, variables=None):
        gradients = super().backward(tape, loss, variables)
        return tf.clip_by_global_norm(gradients, 0.05)[0]


class DividesByItsOwn(TrainStep):
    def loss_and_gradients(self, batch, divisor):
        return super().loss_and_gradients(batch, divisor // self.strategy.num_replicas_in_sync)


class CountsOne(TrainStep):
    def count(self, batch):
        return 1


class PenaltyOfEachReplica(TrainStep):
    def forward(self, batch):
        loss, outputs = super().forward(batch)
        return loss + tf.reduce_sum(self.model.layers[0].kernel.value ** 2), outputs


class MetricsOfOne(TrainStep):
    def update_metrics(self, batch, outputs):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        weights = tf.cast(tf.fill([tf.shape(outputs)[0]], tf.equal(replica, 0)), tf.float32)
        super().update_metrics((*batch[:2], weights), outputs)


class Drifts(TrainStep):
    """Adds another number to a variable on each replica."""

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        context = tf.distribute.get_replica_context()
        number = 1e-3 * tf.cast(context.replica_id_in_sync_group, tf.float32)
        context.merge_call(self._drift, args=(number,))

    def _drift(self, strategy, number):
        bias = self.model.layers[0].bias.value
        strategy.extended.update(
            bias, lambda v, n: v.assign_add(tf.fill(v.shape, n)), args=(number,)
        )


class Traces(TrainStep):
    calls = 0

    @property
    def trace_key(self):
        Traces.calls += 1
        return super().trace_key._replace(bytes_per_pack=Traces.calls)


class HidesNoise(TrainStep):
    """Its seed generator is where nobody looks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        generator = keras.random.SeedGenerator(5)
        self.draw = lambda shape: keras.random.normal(shape, seed=generator)

    def loss(self, batch):
        features, labels = batch
        outputs = self.model(features + self.draw(features.shape))
        return self.loss_fn(labels, outputs), outputs


class HidesState(TrainStep):
    """Trains less and less, by a counter that no checkpoint has."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        counter = tf.Variable(0.0, trainable=False)
        self.counter = lambda: counter

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses / (1.0 + self.counter()), outputs

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        tf.distribute.get_replica_context().merge_call(
            lambda strategy: strategy.extended.update(self.counter(), lambda v: v.assign_add(1.0))
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (maker(reduces(lambda add, g, n: add(add(g)))), "has moved 2 times as far: is its gra"),
        (
            maker(reduces(lambda add, g, n: g)),
            "differs between the 2 replicas: is its gradient not",
        ),
        (maker(reduces(lambda add, g, n: [x / n for x in add(g)])), "has moved 1/2 as far: is its"),
        (maker(ClipsBefore), "not a sum over examples, such as clipping before the reduce"),
        (maker(DividesByItsOwn), "2 times as far: .* divided by the examples of one replica"),
        (maker(CountsOne), "has moved 1/2 as far: is its gradient divided by the replicas"),
        (maker(PenaltyOfEachReplica), "differs by .*: is a part of the step not a sum"),
        (maker(MetricsOfOne), "accuracy is .*, not .*: does it count the examples of all replicas"),
        (maker(Drifts), "differs between the 2 replicas: .* is it updated with one replica's part"),
        (maker(rate=lambda n: RATE * n), "has moved 2 times as far"),
        (maker(seed=lambda n: n), "2 replicas do not equal one: after 1 step"),
        (maker(more=lambda: [layers.Dropout(0.5)]), "do not equal one with Dropout"),
        (
            maker(more=lambda: [layers.BatchNormalization()]),
            "normalizes over the examples of a rep",
        ),
    ],
    ids=[
        *("reduced twice", "not reduced", "averaged", "clipped before", "its own count"),
        *("counts one", "penalty of each replica", "metrics of one", "drifts"),
        *("rate by replicas", "other data", "dropout", "batch norm"),
    ],
)
def test_replicas(make, says):
    with pytest.raises(AssertionError, match=says):
        testing.check_replicas_equal_one(make, 2)


def test_an_all_reduce_that_repeats_another():
    class Twice(TrainStep):
        def reduce(self, loss, count, gradients, snapshot):
            loss, count, gradients = super().reduce(loss, count, gradients, snapshot)
            return loss, count, self.sum_gradients(gradients)

    with pytest.raises(AssertionError, match="a gradient is reduced twice$"):
        testing.check_reduced_once(maker(Twice), 2)


def test_noise():
    with pytest.raises(AssertionError, match="^all replicas draw the same random numbers: make"):
        testing.check_noise(maker(HidesNoise), 2)
    testing.check_noise(maker(more=lambda: [layers.Dropout(0.5)]), 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_state_that_no_checkpoint_has(replicas):
    with pytest.raises(AssertionError, match="differs after a resume at step .* must be an attrib"):
        testing.check_resumed(maker(HidesState), replicas)


def test_a_step_that_is_traced_again():
    with pytest.raises(AssertionError, match="^4 steps were traced 4 times: does the step depend"):
        testing.check_one_trace(maker(Traces))


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


class Unscaled(TrainStep):
    def backward(self, tape, loss, variables=None):
        return tape.gradient(loss, self.trainable_variables)


class Forgets(TrainStep):
    def backward(self, tape, loss, variables=None):
        first, *rest = super().backward(tape, loss, variables)
        return [tf.zeros_like(first), *rest]


@pytest.mark.parametrize(
    "make",
    [maker(optimizer=lambda rate: keras.optimizers.SGD(1e-7)), maker(Unscaled, loss_scale=True)],
    ids=["a small rate", "not scaled"],
)
def test_weights_that_do_not_move(make):
    with pytest.raises(AssertionError, match="no weight has moved by more than .* larger learning"):
        testing.check_replicas_equal_one(make, 2)


@pytest.mark.parametrize(
    "make", [maker(DecaysTwice), maker(Forgets)], ids=["another decay", "a gradient forgotten"]
)
def test_a_reference(make):
    testing.check_replicas_equal_one(make, 2)  # which are all wrong alike
    with pytest.raises(AssertionError, match=r"differs from the reference by .* after 4 steps"):
        testing.check_reference(make, plain)


class OneLoss(TrainStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return tf.reduce_mean(losses), outputs


class OtherOrder(TrainStep):
    def backward(self, tape, loss, variables=None):
        return super().backward(tape, loss, variables)[::-1]


@pytest.mark.parametrize("kind", [OneLoss, OtherOrder])
def test_what_ctl_refuses_by_itself(kind):
    with pytest.raises(UsageError):
        testing.check_step(maker(kind), replicas=[2])


def test_a_step_that_is_right():
    testing.check_step(maker(), reference=plain)
    noisy = maker(more=lambda: [layers.Dropout(0.5), layers.BatchNormalization()])
    testing.check_step(noisy, replicas=())
