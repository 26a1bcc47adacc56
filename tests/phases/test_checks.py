"""Mistakes in a subclass of the step are one line, not wrong numbers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, examples, make_loop, mlp, network
from keras import layers

from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.data.dataset import DatasetInfo
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.schedule import Cosine
from ctl.schedule.patience import EarlyStopping
from ctl.step import TrainStep


def test_arguments_of_another_kind():
    model, data = mlp(), InMemory(examples(4), global_batch_size=4)
    with pytest.raises(UsageError, match="^ctl.Evaluator takes a ctl.EvalStep, not a Seq"):
        Evaluator(model, data)
    with pytest.raises(UsageError, match=r"^ctl.Loop takes a ctl.TrainStep, not a Sequential: "):
        Loop(model, data)
    with pytest.raises(UsageError, match=r"^schedule is 0.1: give a function of the step"):
        Loop(TrainStep(model, "sgd"), data, schedule=0.1)


class Unseeded(TrainStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses * keras.random.uniform([]), outputs


class NotForXla(keras.constraints.Constraint):
    def __call__(self, weight):
        number = tf.strings.to_number(tf.strings.as_string(tf.reduce_sum(weight)))
        return weight + 0.0 * number


@pytest.mark.compiled_update
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"step_class": Unseeded},
            r"^Unseeded makes a variable while it is traced: .* call tf.random.stateless_normal",
        ),
        (
            {"model": lambda: network(layers.Dense(3, kernel_constraint=NotForXla()))},
            "^XLA cannot compile AsString: if the update has it, .* with jit_update=False; else",
        ),
    ],
    ids=["keras.random", "constraint"],
)
def test_what_tensorflow_refuses_is_one_line(mirrored, options, says):
    with pytest.raises(UsageError, match=says):
        make_loop(mirrored(2), **options).train(1)


def test_what_makes_a_variable_is_said_where_a_step_is_only_traced():
    with pytest.raises(UsageError, match="^Unseeded makes a variable while it is traced: "):
        make_loop(step_class=Unseeded).traced()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_summary_in_a_step_is_refused(replicas, mirrored, tmp_path):
    class Writes(TrainStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            tf.summary.scalar("mine", tf.reduce_mean(losses), self.global_step)
            return losses, outputs

    class Draws(EvalStep):
        def loss(self, batch):
            losses, outputs = super().loss(batch)
            tf.summary.histogram("spread", losses, 0)
            return losses, outputs

    says = r"^Writes calls tf.summary for 'mine': .* self.log\('mine', value\)"
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for accumulate_steps in (1, 2):
            loop = make_loop(
                mirrored(replicas), step_class=Writes, accumulate_steps=accumulate_steps
            )
            with pytest.raises(UsageError, match=says):
                loop.train(1)
        data = InMemory(examples(8), global_batch_size=8, training=False)
        with pytest.raises(UsageError, match="^Draws calls tf.summary for 'spread'"):
            Evaluator(Draws(mlp()), data).run()


@pytest.mark.parametrize(("model", "kind"), [(tf.Module(), "Module"), (mlp, "function")])
@pytest.mark.parametrize("step", [lambda model: TrainStep(model, "sgd"), EvalStep])
def test_a_model_that_is_not_of_keras_is_refused(step, model, kind):
    with pytest.raises(UsageError, match=f"^model is a {kind}: give an object of keras.Model"):
        step(model)


def test_overrides_that_take_other_arguments_are_refused():
    class Reduce(TrainStep):
        def reduce(self, loss, count, gradients, examples=None):
            raise AssertionError

    class Backward(TrainStep):
        def backward(self, tape, loss):
            raise AssertionError

    reason = (
        r"^Reduce.reduce\(\) must take \(loss, count, gradients, snapshot\) and return .* it "
        r"takes \(loss, count, gradients, examples\)$"
    )
    with pytest.raises(UsageError, match=reason):
        make_loop(step_class=Reduce)
    reason = r"^Backward.backward\(\) must take \(tape, loss, variables=None\) and return"
    with pytest.raises(UsageError, match=reason):
        make_loop(step_class=Backward)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_of_the_wrong_number_or_shape(jit_compile):
    class TooFew(TrainStep):
        def backward(self, tape, loss, variables=None):
            return super().backward(tape, loss, variables)[1:]

    class Reversed(TrainStep):
        def backward(self, tape, loss, variables=None):
            return super().backward(tape, loss, variables)[::-1]

    for kind, reason in (
        (TooFew, r"^TooFew computed 3 gradients for 4 trainable variables: "),
        (Reversed, r"^Reversed computed a gradient of shape \(5,\) for variable .* "),
    ):
        loop = make_loop(step_class=kind, jit_compile=jit_compile)
        with pytest.raises(UsageError, match=reason):
            loop.train(1)


def penalized(synchronized: bool) -> keras.Model:
    penalty = keras.regularizers.L2(0.1)
    dense = layers.Dense(5, activity_regularizer=penalty, kernel_regularizer="l2")
    return network(dense, layers.BatchNormalization(synchronized=synchronized))


@pytest.mark.slow
def test_losses_that_layers_of_another_replica_have_added(mirrored):
    """Two replicas were 0.04 off, in silence."""
    with pytest.raises(UsageError, match="^layers of the model add losses .*add_loss.* one repl"):
        make_loop(mirrored(2), model=lambda: penalized(True)).train(1)
    for replicas, synchronized in ((1, True), (2, False)):
        make_loop(mirrored(replicas), model=lambda s=synchronized: penalized(s)).train(1)


def test_an_optimizer_of_another_scope(mirrored):
    optimizer = keras.optimizers.Adam()
    says = r"^optimizer \w+ was not created in the strategy's scope: make it inside `with strat"
    with pytest.raises(UsageError, match=says):
        make_loop(mirrored(2), optimizer=lambda: optimizer)


@pytest.mark.parametrize("trainable", [True, False])
def test_layers_that_are_frozen_too_late(trainable):
    def model():
        made = mlp()
        made.layers[-1].trainable = not trainable
        return made

    loop = make_loop(model=model)
    loop.train(1)
    before = loop.step.model.get_weights()
    loop.step.model.layers[-1].trainable = trainable
    reason = (
        r"have changed since the step was built \(\S+/bias, \S+/kernel\): set layer.trainable .*"
        + ("make a new optimizer, step and loop" if trainable else r"use loop.train_only\(layers\)")
    )
    with pytest.raises(UsageError, match=reason):
        loop.train(2)
    np.testing.assert_equal(loop.step.model.get_weights(), before)


@pytest.mark.slow
def test_gradients_of_chosen_variables():
    """`backward` scales those of any tape and any variables alike."""

    class Halves(TrainStep):
        def backward(self, tape, loss, variables=None):
            first, second = self.trainable_variables[:2], self.trainable_variables[2:]
            return [*super().backward(tape, loss, first), *super().backward(tape, loss, second)]

        def loss_and_gradients(self, batch, divisor):
            with tf.GradientTape(persistent=True) as tape:
                loss, outputs = self.forward(batch)
                loss /= float(divisor)
            return loss, self.backward(tape, loss), outputs

    trained = [
        make_loop(step_class=kind, loss_scale=scale, seed=1)
        for kind in (TrainStep, Halves)
        for scale in (False, True)
    ]
    weights = []
    for loop in trained:
        loop.train(3)
        weights.append(loop.step.model.get_weights())
    for others in weights[1:]:
        for a, b in zip(weights[0], others, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_evaluation_has_metrics_of_its_own():
    metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
    model = mlp()
    data = InMemory(examples(32), global_batch_size=16, training=False)
    evaluator = Evaluator(EvalStep(model, metrics=[metric]), data)
    step = TrainStep(model, keras.optimizers.SGD(0.1), metrics=[metric])
    with pytest.raises(UsageError, match="^metric accuracy is in the training step and in the ev"):
        Loop(step, InMemory(examples(32), global_batch_size=16), evaluator=evaluator)


def test_an_evaluation_of_another_model_is_warned_of(warnings_of):
    trained, other = mlp(), mlp()
    data = InMemory(examples(32), global_batch_size=16, training=False)
    step = TrainStep(trained, keras.optimizers.SGD(0.1))
    Loop(
        step,
        InMemory(examples(32), global_batch_size=16),
        evaluator=Evaluator(EvalStep(trained), data),
    )
    assert not warnings_of()
    step = TrainStep(trained, keras.optimizers.SGD(0.1))
    Loop(
        step,
        InMemory(examples(32), global_batch_size=16),
        evaluator=Evaluator(EvalStep(other), data),
    )
    assert f"the evaluation is of model {other.name}, which has no variable of" in warnings_of()[0]


def test_a_class_has_one_label():
    def data(names, **options):
        info = DatasetInfo("folder", num_classes=CLASSES, class_names=names)
        return InMemory(examples(32), global_batch_size=16, info=info, **options)

    def make(trained, evaluated):
        model = mlp()
        evaluator = Evaluator(
            EvalStep(model), data(("a", "b")), others={"other": data(evaluated, training=False)}
        )
        return Loop(TrainStep(model, keras.optimizers.SGD(0.1)), data(trained), evaluator=evaluator)

    for alike in (("a", "b", "c"), ("a", "b"), (), ("x", "y", "z")):
        make(("a", "b", "c"), alike)
    with pytest.raises(UsageError, match="^class c has label 2 in folder and 1 in folder, which "):
        make(("a", "b", "c"), ("a", "c"))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_loss_that_trains_nothing(jit_compile):
    class Argmax(TrainStep):
        def loss(self, batch):
            features, labels = batch
            guess = tf.argmax(self.model(features), axis=-1)
            return tf.cast(guess != tf.cast(labels, guess.dtype), tf.float32)

    with pytest.raises(UsageError, match="^the loss of Argmax depends on no variable that trains,"):
        make_loop(step_class=Argmax, jit_compile=jit_compile).train(1)


def test_an_evaluation_on_other_inputs_is_said(caplog):
    class Scaled(TrainStep):
        def preprocess(self, features):
            return 0.5 * features

    class Evaluated(EvalStep):
        preprocess = Scaled.preprocess

    data = InMemory(examples(32), global_batch_size=16)
    for kind in (Evaluated, EvalStep):
        assert "is evaluated on other inputs" not in caplog.text
        model = mlp()
        Loop(Scaled(model, keras.optimizers.SGD()), data, evaluator=Evaluator(kind(model), data))
    line = Scaled.preprocess.__code__.co_firstlineno
    where = f"Scaled.preprocess is not EvalStep.preprocess (test_checks.py, line {line}), so the"
    assert where in caplog.text


def test_a_loss_that_does_not_scale_images_as_the_evaluation_does(caplog):
    class Bytes(TrainStep):
        eval_step = EvalStep

        def loss(self, batch):
            images, labels = batch
            return self.loss_fn(labels, self.model(tf.cast(images, tf.float32)))

    class Scales(TrainStep):
        def loss(self, batch):
            images, labels = batch
            return self.loss_fn(labels, self.model(self.preprocess(images)))

    class ScalesInAMethod(Scales):
        def loss(self, batch):
            self.log("one", 1.0)
            return self.scaled(batch)

        def scaled(self, batch):
            images, labels = batch
            return self.loss_fn(labels, self.model(self.preprocess(images)))

    class LogsBytes(Bytes):
        def loss(self, batch):
            self.log("seed", self.seed(1)[0])
            images, labels = batch
            return self.loss_fn(labels, self.model(tf.cast(images, tf.float32)))

    images = np.zeros([8, 4, 4, 1], np.uint8), np.zeros(8, np.int64)
    for kind in (Scales, ScalesInAMethod, Bytes, LogsBytes):
        caplog.clear()
        flat = [layers.Flatten(), layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input([4, 4, 1]), *flat])
        evaluator = Evaluator(EvalStep(model), images)
        Loop(kind(model, "sgd"), images, global_batch_size=4, evaluator=evaluator)
        warning = f"only one of {kind.__name__}.loss() and EvalStep.loss() calls self.preprocess()"
        assert (warning in caplog.text) == issubclass(kind, Bytes)
        if issubclass(kind, Bytes):
            line = kind.loss.__code__.co_firstlineno
            assert f"0 to 255 to 0 to 1 (test_checks.py, line {line}): unless" in caplog.text
        assert ("preprocess" in caplog.text) == issubclass(kind, Bytes)


def test_methods_of_other_tools_are_not_ignored(caplog):
    class Lightning(TrainStep):
        def training_step(self, batch, index):
            raise AssertionError

    class Own(keras.Sequential):
        def train_step(self, data):
            raise AssertionError

    data = InMemory(examples(32), global_batch_size=16)
    with pytest.raises(UsageError, match=r"^Lightning has training_step\(\), which ctl does not c"):
        Loop(Lightning(mlp(), "sgd"), data)
    assert "does not call" not in caplog.text
    Loop(TrainStep(Own([mlp()], name="own"), "sgd"), data)
    assert "model own has its own train_step(), which ctl does not call" in caplog.text


def test_an_evaluation_that_was_given_no_loss_does_not_take_another_in_silence(caplog):
    features, classes = examples(32)
    model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(CLASSES, "softmax")])
    evaluator = Evaluator(EvalStep(model), (features, classes))
    with pytest.raises(UsageError, match=r"ends in a softmax .*leave the activation out, or give"):
        Loop(
            TrainStep(model, "sgd"), (features, classes), global_batch_size=16, evaluator=evaluator
        )
    assert "means nothing" not in caplog.text  # the refusal says it
    remedy = "--loss=sparse_categorical_crossentropy (loss_fn= in Python, to ctl.EvalStep, too)"
    step = TrainStep(model, "sgd", "sparse_categorical_crossentropy")
    Loop(step, (features, classes), global_batch_size=16, evaluator=evaluator)
    evaluator.run()
    evaluator.run()
    said = [line for line in caplog.messages if line.startswith("the loss of the evaluation")]
    assert len(said) == 1 and "means nothing" in said[0] and remedy in said[0]
    one_hot = np.eye(CLASSES, dtype=int)[classes]  # as floats, they are probabilities
    with pytest.raises(UsageError, match=r"one-hot.*argmax.* or the loss that trains on them"):
        Evaluator(EvalStep(mlp()), (features, one_hot))
    alike = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    by_name = "sparse_categorical_crossentropy"
    for loss, name in (("poisson", "poisson"), (alike, ""), (by_name, "")):
        caplog.clear()
        model = mlp()
        evaluator = Evaluator(EvalStep(model), (features, classes))
        step = TrainStep(model, "sgd", loss)
        Loop(step, (features, classes), global_batch_size=16, evaluator=evaluator)
        assert ("the loss of the evaluation" in caplog.text) == bool(name)
        assert f"that of the training is {name}" in caplog.text or not name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"actions": [keras.callbacks.EarlyStopping()]}, r"give train\(callbacks=\[…\]\) these"),
        ({"eval_actions": [keras.callbacks.History()]}, r"give train\(callbacks=\[…\]\) these"),
        ({"actions": [EarlyStopping("loss", 2)]}, "needs evaluations: give it in eval_actions"),
        ({"schedule": Cosine}, "^schedule is Cosine: give a function of the step"),
        ({"schedule": lambda epoch, rate: rate}, "^schedule is <lambda>: give a function of the s"),
        ({"global_batch_size": "16"}, "^global_batch_size must be a whole number, not '16'$"),
        ({"global_batch_size": 16.0}, "^global_batch_size must be a whole number, not 16.0$"),
    ],
)
def test_arguments_of_loops_of_the_wrong_kind(options, says):
    with pytest.raises(UsageError, match=says):
        Loop(TrainStep(mlp(), "sgd"), examples(32), **({"global_batch_size": 8} | options))


@pytest.mark.parametrize(
    ("options", "labels", "says"),
    [
        ({"metrics": [keras.metrics.AUC]}, None, r"make an object of the class: AUC\(…\)$"),
        ({"class_weight": np.ones(3)}, None, "^class_weight must be a dict such as"),
        ({"loss_fn": "mse"}, "text", "^the labels are text, and the loss takes numbers"),
        ({}, "vector", "gives outputs .n., and the loss takes one for each class"),
    ],
)
def test_arguments_of_steps_of_the_wrong_kind(options, labels, says):
    features, classes = examples(32)
    model = mlp()
    if labels == "vector":
        inputs = keras.Input([FEATURES])
        model = keras.Model(inputs, keras.ops.sum(layers.Dense(3)(inputs), axis=-1))
    with pytest.raises(UsageError, match=says):
        step = TrainStep(model, "sgd", **options)
        data = features, classes.astype(str) if labels == "text" else classes
        Loop(step, data, global_batch_size=8).train(1)
