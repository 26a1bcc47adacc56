"""An error in code of the user's ends with the user's line, and shows no frame of a library."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl import EvalStep, Evaluator, Loop, TrainStep, UsageError
from ctl.base import tracebacks
from ctl.data import InMemory


class Head(keras.layers.Layer):
    wrong = ""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2))

    def call(self, inputs):
        if self.wrong == "trace":
            inputs = tf.reshape(inputs, [3, 5])  # in call, at trace time
        if self.wrong == "run":
            inputs = tf.debugging.check_numerics(inputs / 0.0, "broken")  # in call, at run time
        return inputs @ self.kernel


class Step(TrainStep):
    wrong = ""

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        if self.wrong == "trace":
            return losses @ outputs, outputs  # in loss, at trace time
        if self.wrong == "name":
            return losses * self.missing, outputs  # in loss, a name
        if self.wrong == "run":
            losses = helper(losses)
        return (losses[0] if self.wrong == "usage" else losses), outputs


def helper(losses):
    return tf.debugging.check_numerics(losses / 0.0, "broken")  # in loss, at run time


def fails(features):
    return features / {"a": 1}["b"]  # in map, in Python


def in_python(features, labels):
    return tf.ensure_shape(tf.numpy_function(fails, [features], tf.float32), [6]), labels


def in_tensorflow(features, labels):
    return tf.debugging.check_numerics(features / 0.0, "broken"), labels


def make_loop(strategy, loss="", call="", data=None):
    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), Head()])
        model.layers[0].wrong = call
        step = Step(model, keras.optimizers.SGD(0.1))
    step.wrong = loss
    arrays = np.ones([12, 6], np.float32), np.zeros([12], np.int64)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.map(data) if data else dataset
    return Loop(step, dataset.batch(4, drop_remainder=True), strategy=strategy)


CASES = {
    "loss, trace": ({"loss": "trace"}, ValueError, "Shape must be rank 2", "in loss, at trace"),
    "loss, name": ({"loss": "name"}, AttributeError, "has no attribute 'missing'", "a name"),
    "loss, run": ({"loss": "run"}, tf.errors.InvalidArgumentError, "broken", "in loss, at run"),
    "call, trace": ({"call": "trace"}, ValueError, "Exception enc", "in call, at trace"),
    "call, run": ({"call": "run"}, tf.errors.InvalidArgumentError, "broken", "in call, at run"),
    "map, Python": ({"data": in_python}, tf.errors.UnknownError, "KeyError: 'b'", "in Python"),
}


def shown(loop, kind, **how):
    """The error, and its frames below this test."""
    with pytest.raises(kind) as raised:
        loop.train(1, **how)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    return raised.value, frames[1:]


@pytest.mark.parametrize("how", ["graph", "two replicas", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_the_line_of_the_user_is_the_last(case, how, mirrored):
    wrong, kind, message, line = CASES[case]
    if how == "eager" and case.endswith("trace"):  # nothing is traced
        kind, message = tf.errors.InvalidArgumentError, ""
    loop = make_loop(mirrored(2 if how == "two replicas" else 1), **wrong)
    error, frames = shown(loop, kind, eager=how == "eager")
    assert line in frames[-1].line
    files = [Path(frame.filename).name for frame in frames]
    assert files == ["tracebacks.py", *["test_tracebacks.py"] * (len(files) - 1)]
    assert message in str(error).removeprefix("{{") and "in user code" not in str(error)
    assert "Detected at" not in str(error) and 'File "' not in str(error)
    assert error.args or isinstance(error, tf.errors.OpError)
    text = tracebacks.text_of(tracebacks.of_the_user(error))
    assert line in text and "raise shown" not in text


class OfKeys(TrainStep):
    def loss(self, batch):
        outputs = self.model(batch["imge"])  # in loss, a key
        return tf.reduce_sum(outputs, axis=1)


class OfKeysEvaluated(EvalStep):
    loss = OfKeys.loss


class OfAnotherDict(TrainStep):
    def loss(self, batch):
        return {"a": 1}["image"] * batch["label"]  # in loss, of another dict


def model_of_keys():
    return keras.Sequential([keras.Input([6]), keras.layers.Dense(2)])


KEYS = {"image": np.ones([12, 6], np.float32), "label": np.zeros([12], np.float32)}


@pytest.mark.parametrize("how", ["graph", "two replicas", "eager", "evaluation"])
def test_a_key_that_a_batch_does_not_have_is_named_beside_those_that_it_has(how, mirrored):
    strategy = mirrored(2 if how == "two replicas" else 1)
    with strategy.scope():
        step = OfKeys(model_of_keys(), "sgd")
    if how == "evaluation":
        data = InMemory(KEYS, global_batch_size=4, training=False)
        run = Evaluator(OfKeysEvaluated(model_of_keys()), data).run
    else:
        loop = Loop(step, KEYS, global_batch_size=4, strategy=strategy)
        run = functools.partial(loop.train, 1, eager=how == "eager")
    with pytest.raises(KeyError) as raised:
        run()
    assert str(raised.value) == "'imge' (there are, in the batch: 'image', 'label')"
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.filename == __file__ and last.line.endswith("# in loss, a key")


def of_keys(labels, outputs):
    return outputs["c"][:, 0] - labels["b"]  # in loss_fn, a key


class MeasuresKeys(TrainStep):
    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return losses, {"c": outputs["b"]}

    def update_metrics(self, batch, outputs):
        tf.reduce_mean(outputs["b"])


@pytest.mark.parametrize(
    ("kind", "loss_fn", "says"),
    [
        (TrainStep, of_keys, "'c' (there are, in labels: 'a', 'b'; outputs: 'b')"),
        (TrainStep, lambda y, p: p["a"][:, 0] - y["b"], "'a' (there are, in labels: 'a', 'b'; "),
        (
            MeasuresKeys,
            lambda y, p: p["b"][:, 0] - y["b"],
            "'b' (there are, in batch[1]: 'a', 'b'; outputs: 'c')",
        ),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_a_key_of_labels_and_outputs(kind, loss_fn, says, eager):
    layer = keras.Input([6])
    model = keras.Model(layer, {"b": keras.layers.Dense(1)(layer)})
    labels = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    loop = Loop(
        kind(model, "sgd", loss_fn), (np.ones([4, 6], np.float32), labels), global_batch_size=4
    )
    error, _ = shown(loop, KeyError, eager=eager)
    assert str(error).startswith(says)


def test_a_key_that_the_batch_has_is_of_another_dict():
    loop = Loop(OfAnotherDict(model_of_keys(), "sgd"), KEYS, global_batch_size=4)
    error, _ = shown(loop, KeyError)
    assert str(error) == "'image'"


def test_an_operation_in_the_data_has_no_frames(mirrored):
    """TensorFlow does not know where it was made."""
    loop = make_loop(mirrored(1), data=in_tensorflow)
    error, frames = shown(loop, tf.errors.InvalidArgumentError)
    assert len(frames) == 1 and "broken" in str(error) and "Detected at" not in str(error)


def test_an_error_of_ctl_has_no_frames_of_ctl(mirrored):
    error, frames = shown(make_loop(mirrored(1), loss="usage"), UsageError)
    assert len(frames) == 1 and str(error).startswith("loss() must return one loss per example")


def test_a_bug_keeps_its_frames_and_so_do_all_when_asked(mirrored, monkeypatch):
    loop = make_loop(mirrored(1))
    monkeypatch.setattr(loop.steps.step, "forward_backward", None)
    with pytest.raises(Exception) as raised:
        loop.train(1)
    assert any("loop.py" in f.filename for f in traceback.extract_tb(raised.value.__traceback__))
    loop = make_loop(mirrored(1), loss="trace")
    tf.debugging.disable_traceback_filtering()
    try:
        with pytest.raises(ValueError, match="in user code"):
            loop.train(1)
    finally:
        tf.debugging.enable_traceback_filtering()
