"""Mistakes in steps, each with the words in which `ctl.testing.check_step` names its cause.

Those in `COMPOSED` call ``super()``, so that the methods of `right_steps` can make them, too.
"""

from __future__ import annotations

import types
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, FEATURES, accuracy, examples
from keras import layers
from right_steps import COUNT, RATE, Method, maker, model

import ctl
from ctl import testing
from ctl.base.actions import Every
from ctl.errors import UsageError
from ctl.step import TrainStep


class Mistake(NamedTuple):
    says: str
    kind: type
    options: dict = {}  # of `maker`


def changed(result, change):
    """What `loss` returned, with other losses."""
    losses, *outputs = result if isinstance(result, tuple) else (result,)
    losses = [change(one) for one in losses] if isinstance(losses, list) else change(losses)
    return (losses, *outputs) if outputs else losses


# Sums over replicas -------------------------------------------------------------------------------


class ReducesTwice(TrainStep):
    def sum_gradients(self, gradients):
        return super().sum_gradients(super().sum_gradients(gradients))


class ReducesAgain(TrainStep):
    def reduce(self, loss, count, gradients, snapshot):
        loss, count, gradients = super().reduce(loss, count, gradients, snapshot)
        return loss, count, self.sum_gradients(gradients)


class NeverReduces(TrainStep):
    def sum_gradients(self, gradients):
        return gradients


class Averages(TrainStep):
    def sum_gradients(self, gradients):
        replicas = self.strategy.num_replicas_in_sync
        return [g / replicas for g in super().sum_gradients(gradients)]


class NeverDivides(TrainStep):
    def reduce(self, loss, count, gradients, snapshot):
        total = count * self.strategy.num_replicas_in_sync
        return loss, total, self.sum_gradients(gradients)


class ClipsBefore(TrainStep):
    def backward(self, tape, loss, variables=None):
        return tf.clip_by_global_norm(super().backward(tape, loss, variables), 0.05)[0]


class DividesByItsOwn(TrainStep):
    def loss_and_gradients(self, batch, divisor):
        return super().loss_and_gradients(batch, divisor // self.strategy.num_replicas_in_sync)


class CountsOne(TrainStep):
    def count(self, batch):
        return 1


class Mean(TrainStep):
    def forward(self, batch):
        loss, outputs = super().forward(batch)
        return loss / batch[0].shape[0], outputs


class PenaltyOfEachReplica(TrainStep):
    def forward(self, batch):
        loss, outputs = super().forward(batch)
        return loss + tf.reduce_sum(self.trainable_variables[0] ** 2), outputs


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
        strategy.extended.update(
            self.trainable_variables[0],
            lambda v, n: v.assign_add(tf.fill(v.shape, n)),
            args=(number,),
        )


# Losses of one replica's part ---------------------------------------------------------------------


class ByTheShare(TrainStep):
    def loss(self, batch):
        return changed(super().loss(batch), lambda x: x / tf.cast(tf.shape(x)[0], tf.float32))


class OneLoss(TrainStep):
    def loss(self, batch):
        return changed(super().loss(batch), tf.reduce_mean)


class Maximum(TrainStep):
    def loss(self, batch):
        largest = lambda losses: tf.stop_gradient(tf.reduce_max(tf.abs(losses)))  # noqa: E731
        return changed(super().loss(batch), lambda losses: losses / largest(losses))


class TopK(TrainStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        least = tf.math.top_k(losses, losses.shape[0] // 4).values[-1]
        return tf.where(losses >= least, losses, 0.0), outputs


class Normalized(TrainStep):
    def preprocess(self, features):
        mean, variance = tf.nn.moments(features, axes=[0])
        return (features - mean) / tf.sqrt(variance + 1e-3)


class Broadcasts(TrainStep):
    """The values of the model are [n, 1], the targets [n]."""

    def loss(self, batch):
        features, labels = batch
        outputs = self.model(self.preprocess(features), training=True)
        targets = tf.cast(labels, tf.float32)
        return tf.reduce_mean((outputs[:, :1] - targets) ** 2, axis=-1), outputs


# What Python does once ----------------------------------------------------------------------------


class UsesNumpy(TrainStep):
    def loss(self, batch):
        return changed(super().loss(batch), lambda losses: losses * np.exp(-losses))


class DrawsInNumpy(TrainStep):
    def loss(self, batch):
        factor = np.random.uniform(0.5, 1.5)
        return changed(super().loss(batch), lambda losses: losses * factor)


class DrawsInTensorFlow(TrainStep):
    def loss(self, batch):
        draw = lambda losses: tf.random.uniform(tf.shape(losses))  # noqa: E731
        return changed(super().loss(batch), lambda losses: losses * draw(losses))


class DrawsAlike(TrainStep):
    """Its seed generator is where nobody looks."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        generator = keras.random.SeedGenerator(5)
        self.draw = lambda shape: keras.random.uniform(shape, 0.5, 1.5, seed=generator)

    def loss(self, batch):
        return changed(super().loss(batch), lambda losses: losses * self.draw(losses.shape))


class Counts(TrainStep):
    calls = 0

    def loss(self, batch):
        self.calls += 1
        return changed(super().loss(batch), lambda losses: losses / self.calls)


class CountsInSteps(TrainStep):
    """Every third step is another, by a counter that Python increments once."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = 0

    def loss(self, batch):
        self.calls += 1
        factor = 0.1 if self.calls % 30 == 0 else 1.0
        return changed(super().loss(batch), lambda losses: factor * losses)


class KeepsATensor(TrainStep):
    last = None

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        change = 0.0 if self.last is None else tf.reduce_mean(self.last)
        self.last = losses
        return losses + change, outputs


class HidesState(TrainStep):
    """Trains less and less, by a counter that no checkpoint has."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        counter = tf.Variable(0.0, trainable=False)
        self.counter = lambda: counter

    def loss(self, batch):
        return changed(super().loss(batch), lambda losses: losses / (1.0 + self.counter()))

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        tf.distribute.get_replica_context().merge_call(
            lambda strategy: strategy.extended.update(self.counter(), lambda v: v.assign_add(1.0))
        )


class ByAnAction(TrainStep):
    """An action changes a value at each step, which the loss reads."""

    def attach(self, loop):
        super().attach(loop)
        loop.actions.append(Every(lambda status: self.change(status.step), steps=1))

    def loss(self, batch):
        return changed(super().loss(batch), lambda losses: losses * self.read())


class OfAnAttribute(ByAnAction):
    rate = 1.0

    def change(self, step):
        self.rate = 1.0 / (1 + step)

    def read(self):
        return self.rate


class OfAClass(ByAnAction):
    rate = 1.0

    def change(self, step):
        OfAClass.rate = 1.0 / (1 + step)

    def read(self):
        return OfAClass.rate


config = types.ModuleType("config")
config.rate = 1.0


class OfAModule(ByAnAction):
    def change(self, step):
        config.rate = config.rate / (1 + step)

    def read(self):
        return config.rate


class OfAnArray(ByAnAction):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rates = np.ones(BATCH, np.float32)

    def change(self, step):
        self.rates /= 1 + step

    def read(self):
        return self.rates[0]


class CachesAFunction(OfAnAttribute):
    """The step is traced again, and finds the old function."""

    @tf.function
    def weighted(self, losses):
        return losses * self.rate

    def loss(self, batch):
        losses, outputs = TrainStep.loss(self, batch)
        return self.weighted(losses), outputs


class CachesAPass(TrainStep):
    """Two passes that differ by a Python value, which the function reads in the first alone."""

    @tf.function
    def weighted(self, losses):
        return losses * self.weight

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        self.weight = 1.0
        one = self.weighted(losses)
        self.weight = 0.5
        return one + self.weighted(losses), outputs


# Phases that are left out -------------------------------------------------------------------------


class AppliesNever(TrainStep):
    def apply(self, gradients, finite=None):
        pass


class AppliesTwice(TrainStep):
    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        super().apply(gradients, finite)


class SecondOptimizer(TrainStep):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.second = keras.optimizers.SGD(RATE)
        self.second.build(self.model.trainable_variables)

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        self.second.apply(gradients, self.model.trainable_variables)


class ReturnsNothing(TrainStep):
    def loss(self, batch):
        super().loss(batch)


class ClipsToNothing(TrainStep):
    def clip(self, gradients):
        super().clip(gradients)


class BackwardToNothing(TrainStep):
    def backward(self, tape, loss, variables=None):
        super().backward(tape, loss, variables)


class OtherOrder(TrainStep):
    def backward(self, tape, loss, variables=None):
        return super().backward(tape, loss, variables)[::-1]


class ForgetsWeights(TrainStep):
    def loss(self, batch):
        return super().loss(batch[:2])


class NeverAccumulates(TrainStep):
    def forward_backward(self, batch, count):
        divisor = count * self.strategy.num_replicas_in_sync
        loss, gradients, outputs = self.loss_and_gradients(batch, divisor)
        self.update_metrics_of(batch, outputs)
        return loss, gradients


class Unscaled(TrainStep):
    def backward(self, tape, loss, variables=None):
        return tape.gradient(loss, self.trainable_variables)


class UnreadOption(TrainStep):
    sharpness: float = ctl.option(0.1, "Of nothing.")


class RawImages(TrainStep):
    def loss(self, batch):
        features, labels = batch
        outputs = self.model(features, training=True)
        return self.loss_fn(labels, outputs), outputs


class InInference(TrainStep):
    def loss(self, batch):
        features, labels = batch
        outputs = self.model(self.preprocess(features))
        return self.loss_fn(labels, outputs), outputs


class InHalf(TrainStep):
    def loss(self, batch):
        return changed(super().loss(batch), lambda losses: tf.cast(losses, tf.float16))


class UnseededShuffle(TrainStep):
    """Of its data."""


def shuffled() -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(examples(COUNT)).shuffle(COUNT).repeat()
    return dataset.batch(BATCH, drop_remainder=True)


def raw() -> tuple:
    random = np.random.default_rng(3)
    return random.integers(0, 256, [COUNT, FEATURES]).astype(np.uint8), examples(COUNT)[1]


def with_weights() -> tuple:
    return *examples(COUNT), np.linspace(0.5, 1.5, COUNT).astype(np.float32)


def small_rate(net: keras.Model) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1e-7)


WRONG = {
    "reduced twice": Mistake("a gradient is reduced twice", ReducesTwice),
    "reduced again": Mistake("a gradient is reduced twice", ReducesAgain),
    "never reduced": Mistake("differs between the 2 replicas: is its gradient not", NeverReduces),
    "averaged": Mistake("moved 1/2 as far: is its gradient divided by the replicas", Averages),
    "never divided": Mistake("NeverDivides.reduce.. does not divide by the count", NeverDivides),
    "clipped before": Mistake("such as clipping before the reduce", ClipsBefore),
    "its own count": Mistake("divided by the examples of one replica", DividesByItsOwn),
    "counts one": Mistake("moved 1/2 as far: is its gradient divided by the replicas", CountsOne),
    "a mean": Mistake("divided by the examples of one replica", Mean),
    "penalty of each": Mistake("a part of the step not a sum over examples", PenaltyOfEachReplica),
    "metrics of one": Mistake(
        "accuracy is .* not .* count the examples of all replicas",
        MetricsOfOne,
        {"metrics": [accuracy]},
    ),
    "drifts": Mistake("differs between the 2 replicas: .* one replica's part", Drifts),
    "by the share": Mistake("divided by the examples of one replica", ByTheShare),
    "one loss": Mistake("must return one loss per example", OneLoss),
    "maximum": Mistake("Maximum.loss.. gives an example another loss among other", Maximum),
    "top k": Mistake("TopK.loss.. gives an example another loss among other", TopK),
    "batch statistics": Mistake("another loss among other examples", Normalized),
    "broadcast": Mistake(r"\[n, 1\] - \[n\] became \[n, n\]", Broadcasts),
    "numpy": Mistake("NumPy", UsesNumpy),
    "np.random": Mistake("draws from np.random or random when it is traced", DrawsInNumpy),
    "tf.random": Mistake("draws from tf.random .RandomUniform", DrawsInTensorFlow),
    "drawn alike": Mistake("seed generator", DrawsAlike),
    "counter": Mistake("Counts.calls changes when the step is traced", Counts),
    "counter of steps": Mistake("CountsInSteps.calls changes when .* traced", CountsInSteps),
    "tensor on self": Mistake("KeepsATensor.last keeps a tensor of the trace", KeepsATensor),
    "hidden state": Mistake("differs after a resume .* must be an attribute of the", HidesState),
    "changed attribute": Mistake("a Python value that changes .*OfAnAttribute.rate", OfAnAttribute),
    "changed class": Mistake("an attribute of a module or class", OfAClass),
    "changed module": Mistake("an attribute of a module or class", OfAModule),
    "changed array": Mistake("an array, an attribute of a module", OfAnArray),
    "cached function": Mistake("weighted is a tf.function, and keeps what it", CachesAFunction),
    "cached pass": Mistake("weighted is a tf.function, and keeps what it traced", CachesAPass),
    "applied never": Mistake("global step is 0: does AppliesNever call self.apply", AppliesNever),
    "applied twice": Mistake("global step is 2: does AppliesTwice call self.apply", AppliesTwice),
    "second optimizer": Mistake(
        "SecondOptimizer calls apply.. of optimizer sgd.* itself", SecondOptimizer
    ),
    "no loss": Mistake("loss.. returned None", ReturnsNothing),
    "no gradients": Mistake("clip.. returned NoneType", ClipsToNothing),
    "no backward": Mistake("backward.. returned NoneType", BackwardToNothing),
    "other order": Mistake("return them in the order of", OtherOrder),
    "no weights": Mistake("does not use the weights", ForgetsWeights, {"arrays": with_weights()}),
    "never accumulates": Mistake(
        "accumulate_steps=2 has no effect: NeverAccumulates.forward_backward.. must cut",
        NeverAccumulates,
        {"accumulate_steps": 2},
    ),
    "unscaled": Mistake("depends on the loss scale: Unscaled must", Unscaled, {"loss_scale": True}),
    "unread option": Mistake("no code of UnreadOption names its option sharpness", UnreadOption),
    "uint8": Mistake("features in uint8, and the evaluation scales", RawImages, {"arrays": raw()}),
    "in inference": Mistake(
        "without training=True, so its layer dropout.* works as in an evaluation",
        InInference,
        {"network": lambda: model(layers.Dropout(0.5))},
    ),
    "in half": Mistake("computes losses in 16 bits", InHalf),
    "shuffle": Mistake(
        "other batches each time it is called: give their shuffle a seed",
        UnseededShuffle,
        {"arrays": shuffled},
    ),
    "small rate": Mistake("no weight has moved by .* larger", TrainStep, {"optimizer": small_rate}),
    "batch norm": Mistake(
        "normalizes over the examples of a replica",
        TrainStep,
        {"network": lambda: model(layers.BatchNormalization())},
    ),
    "dropout": Mistake(
        "do not equal one with Dropout",
        TrainStep,
        {"network": lambda: model(layers.Dropout(0.5))},
    ),
}


# Mistakes that every method can make, and those in its `loss`.
COMPOSED = (
    *("reduced twice", "averaged", "clipped before", "applied never", "applied twice"),
    *("by the share", "maximum", "np.random", "tf.random", "drawn alike", "counter"),
    *("counter of steps", "hidden state", "changed attribute", "changed module", "in half"),
)


def wrong(name: str, **options):
    """The ``make`` of the mistake ``name``."""
    return maker(WRONG[name].kind, **(WRONG[name].options | options))


def composed(name: str, method: Method, **options):
    """The ``make`` of ``method`` with the mistake ``name`` of `COMPOSED`."""
    kind = type(WRONG[name].kind.__name__, (WRONG[name].kind, method.kind), {})
    if method.kind is TrainStep:
        kind = WRONG[name].kind
    return maker(kind, method.arrays, **(method.options | options))


def check_wrong(make, name: str) -> None:
    """`ctl.testing.check_step` must find the mistake ``name`` in ``make``, in one line."""
    with pytest.raises(Exception, match=WRONG[name].says) as raised:
        testing.check_step(make, replicas=[2], steps=3)
    if name == "numpy":  # TensorFlow says it
        assert raised.type is NotImplementedError
    else:
        assert raised.type in (AssertionError, UsageError)
        assert "\n" not in str(raised.value)
