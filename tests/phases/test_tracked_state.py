"""What is assigned to a step is the step's: saved, restored, and checked like its model."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, examples, make_loop, mlp
from keras import layers

from ctl import testing
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.step import TrainStep


def small(name: str) -> keras.Model:
    parts = [layers.Dense(6, "tanh"), layers.Dropout(0.3), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([FEATURES]), *parts], name=name)


def taught(strategy, **options):
    model = functools.partial(small, "student")
    return make_loop(strategy, model=model, step_class=MeanTeacher, **options)


class MeanTeacher(TrainStep):
    """Tarvainen and Valpola 2017, arXiv:1703.01780, with noise on the features of the student."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        teacher = small("teacher")
        teacher.trainable = False
        self.kept = {"teachers": [teacher], "noise": keras.random.SeedGenerator(5)}
        self.updates = tf.Variable(0, trainable=False, name="updates")

    def loss(self, batch):
        features, labels = batch
        features = self.preprocess(features)
        target = self.kept["teachers"][0](features)
        features += keras.random.normal(features.shape, stddev=0.1, seed=self.kept["noise"])
        outputs = self.model(features, training=True)
        distance = tf.reduce_mean((outputs - target) ** 2, axis=1)
        return self.loss_fn(labels, outputs) + distance, outputs

    def apply(self, gradients, finite=None):
        super().apply(gradients, finite)
        tf.distribute.get_replica_context().merge_call(self._follow)

    def _follow(self, strategy):
        pairs = zip(self.kept["teachers"][0].variables, self.model.variables, strict=True)
        for mine, student in pairs:
            if mine.dtype == "float32":
                strategy.extended.update(
                    mine.value,
                    lambda v, new: v.assign(0.5 * v + 0.5 * new),
                    args=(student.value,),
                )
        strategy.extended.update(self.updates, lambda v: v.assign_add(1))


@pytest.mark.slow
def test_a_mean_teacher_resumes_bit_for_bit():
    loops = []

    def make(strategy, checkpoints):
        loops.append(taught(strategy, checkpoints=checkpoints))
        return loops[-1]

    testing.check_resumed(make, 2, steps=6)
    for loop in (loops[0], loops[-1]):  # the first has no pause
        assert int(loop.step.updates.numpy()) == 6
        assert len([v for group in loop.step.state().values() for v in group]) > 20


def test_replicas_draw_other_noise(mirrored):
    loop = taught(mirrored(2))
    draw = tf.function(
        lambda: mirrored(2).run(lambda: keras.random.normal([3], seed=loop.step.kept["noise"]))
    )
    first, second = mirrored(2).experimental_local_results(draw())
    assert np.abs(first - second).max() > 1e-3


class Adversarial(TrainStep):
    """Trains a second model with an optimizer of its own."""

    def __init__(self, *args, build=True, **options):
        super().__init__(*args, **options)
        self.critic = small("critic")
        self.critic_optimizer = keras.optimizers.Adam(0.1)
        if build:
            self.critic_optimizer.build(self.critic.trainable_variables)


def test_a_second_model_and_its_optimizer_are_saved(mirrored, tmp_path):
    first = make_loop(mirrored(2), step_class=Adversarial, directory=tmp_path)
    step = first.step
    for variable in [*step.critic.trainable_variables, *step.critic_optimizer.variables]:
        variable.assign(np.ones(variable.shape) * 7)
    first.save(wait=True)
    first.checkpoints.close()
    second = make_loop(mirrored(2), step_class=Adversarial, directory=tmp_path)
    second.restore()
    for variable in [*second.step.critic.variables, *second.step.critic_optimizer.variables]:
        if "seed" not in variable.path:
            assert (variable.numpy() == 7).all(), variable.path


def test_what_nobody_trains_is_refused(mirrored):
    class Temperature(TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.temperature = tf.Variable(1.0, name="temperature")

    with pytest.raises(UsageError, match="^variable temperature.* but no optimizer trains it"):
        make_loop(step_class=Temperature)
    with pytest.raises(UsageError, match="^variable .*kernel.* but no optimizer trains it"):
        make_loop(step_class=Adversarial, build=False)


def test_what_was_created_out_of_scope_is_refused(mirrored):
    outside = tf.Variable(1.0, trainable=False, name="outside")

    class Step(TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.outside = [outside]

    with pytest.raises(UsageError, match="^variable outside.* was not created in the strategy's"):
        make_loop(mirrored(2), step_class=Step)


def test_a_loop_without_the_strategy_of_its_model_is_refused(mirrored):
    for strategy in (mirrored(2), tf.distribute.OneDeviceStrategy("/cpu:0")):
        with strategy.scope():
            step = TrainStep(mlp(), "sgd")
        words = f"scope of a {type(strategy).__name__}: give strategy= to ctl.Loop and ctl.Evaluat"
        with pytest.raises(UsageError, match=words):
            Loop(step, InMemory(examples(32), global_batch_size=16))


@pytest.mark.slow
def test_a_variable_that_differs_between_replicas_is_refused(mirrored):
    class Counts(TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            none = tf.VariableAggregation.NONE
            self.seen = tf.Variable(0.0, trainable=False, name="seen", aggregation=none)

        def loss(self, batch):
            replica = tf.distribute.get_replica_context()
            mine = replica.strategy.experimental_local_results(self.seen)
            for number, variable in enumerate(mine):
                with tf.control_dependencies([]):
                    mine_now = tf.equal(replica.replica_id_in_sync_group, number)
                    variable.assign_add(tf.where(mine_now, tf.reduce_sum(batch[0]), 0.0))
            return super().loss(batch)

    with pytest.raises(UsageError, match="^variable seen.* differs between replicas"):
        make_loop(mirrored(2), step_class=Counts).train(2)


class Measured(TrainStep):
    """Counts examples in a metric of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.size = keras.metrics.Sum(name="examples_seen")

    def loss(self, batch):
        self.size.update_state(tf.cast(tf.shape(batch[0])[0], tf.float32))
        return super().loss(batch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"jit_compile": True}], ids=str)
def test_a_metric_of_ones_own_is_logged_and_reset(mirrored, options):
    loop = make_loop(mirrored(2), model=mlp, step_class=Measured, **options)
    assert loop.train(2)["examples_seen"] == 2 * loop.dataset.global_batch_size
    loop.step.reset_metrics()
    assert loop.train(3)["examples_seen"] == loop.dataset.global_batch_size


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_metric_of_ones_own_on_a_replica_without_examples(mirrored, replicas):
    """Of a batch of one example, the second replica has none, and computes with one of zeros."""
    data = tf.data.Dataset.from_tensor_slices(examples(9)).batch(8)
    loop = make_loop(mirrored(replicas), step_class=Measured, data=data)
    assert loop.train(2)["examples_seen"] == 9


def test_a_metric_of_ones_own_where_replicas_share_variables():
    cpus = tf.config.list_logical_devices("CPU")[:2]
    strategy = tf.distribute.experimental.CentralStorageStrategy([c.name for c in cpus])
    with pytest.raises(
        UsageError, match="^metric examples_seen is an attribute of the step, whose"
    ):
        make_loop(strategy, step_class=Measured)


def test_a_generator_of_tensorflow_is_refused():
    class Draws(TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.generator = tf.random.Generator.from_seed(1)

    with pytest.raises(UsageError, match="tf.random.Generator, .* use keras.random.SeedGenerator"):
        make_loop(step_class=Draws)


def test_a_skipped_step_undoes_a_variable_of_the_step(mirrored):
    class Remembers(TrainStep):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            mean = tf.VariableAggregation.NONE
            self.last = tf.Variable(0.0, trainable=False, name="last", aggregation=mean)
            self.other = tf.Variable(0.0, trainable=False, name="last", aggregation=mean)

        def loss(self, batch):
            losses, outputs = super().loss(batch)
            self.last.assign(tf.reduce_max(batch[0]))
            return losses, outputs

    features, labels = examples(16)
    features[:] = 1.0
    features[8:] = np.nan
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(8, drop_remainder=True)
    loop = make_loop(mirrored(2), step_class=Remembers, data=data, on_nan="skip")
    assert loop.train(2)["skipped_steps"] == 1
    assert float(loop.step.last.numpy()) == 1.0


class WithVariable(layers.Layer):
    """With a variable of TensorFlow, as before Keras 3."""

    def __init__(self, trainable: bool):
        super().__init__(name="own")
        self.parts = {"scale": tf.Variable(1.0, trainable=trainable, name="scale")}

    def call(self, inputs):
        self.parts["scale"].assign_add(0.0 if self.parts["scale"].trainable else 1.0)
        return inputs * self.parts["scale"]


def with_variable(trainable: bool) -> keras.Model:
    parts = [WithVariable(trainable), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input([FEATURES]), *parts])


class OfVariables(keras.Model):
    """Without a weight of Keras."""

    def __init__(self):
        super().__init__(name="own")
        self.w = tf.Variable(tf.ones([FEATURES, CLASSES]), name="w")

    def call(self, features):
        return features @ self.w


@pytest.mark.parametrize("model", [lambda: with_variable(True), OfVariables])
def test_a_trainable_variable_of_tensorflow_in_a_layer_is_refused(model):
    """Keras does not train it, and no gradient of it would be missed."""
    with pytest.raises(UsageError, match="^layer own has a tf.Variable, .*, which Keras"):
        make_loop(model=model)


def test_a_variable_of_tensorflow_in_a_layer_is_saved(tmp_path):
    loop = make_loop(model=lambda: with_variable(False), directory=tmp_path)
    loop.train(3)
    loop.save()
    loop.checkpoints.close()
    before = loop.step.model.layers[0].parts["scale"].numpy()
    restored = make_loop(model=lambda: with_variable(False), directory=tmp_path)
    restored.restore()
    assert restored.step.model.layers[0].parts["scale"].numpy() == before > 3.0
