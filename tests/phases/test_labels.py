"""Labels that are no class of the model."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CLASSES,
    FEATURES,
    make_loop,
    mlp,
)

from ctl.control.evaluator import Evaluator
from ctl.data import GlobalBatches, InMemory, Streaming
from ctl.distributed import local_batch
from ctl.errors import DivergedError, UsageError
from ctl.loop import Loop
from ctl.phases import labels
from ctl.phases.base_step import EvalStep
from ctl.phases.losses import cross_entropy
from ctl.step import TrainStep


@pytest.mark.parametrize("given, right", [([4], True), ([], False), ([1], False), ([4, 1], True)])
@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_features_of_another_shape(given, right, kind):
    arrays = np.zeros([6, *given], np.float32), np.zeros([6, 1], np.int64)
    model = keras.Sequential([keras.Input([4], name="x"), keras.layers.Dense(2)], name="small")
    data = arrays if kind == "arrays" else tf.data.Dataset.from_tensor_slices(arrays).batch(2)
    step = TrainStep(model, "sgd")
    if right:
        Loop(step, data, global_batch_size=2)
        return
    with pytest.raises(UsageError, match=r"^model small takes features \[n, 4\], and the data "):
        Loop(step, data, global_batch_size=2)


@pytest.mark.parametrize("as_dict", [True, False])
def test_one_of_several_features_of_another_shape(as_dict):
    inputs = {"a": keras.Input([1], name="a"), "b": keras.Input([4], name="b")}
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs["a"] * inputs["b"]), name="two")

    def arrays(*shape):
        features = {"a": np.zeros(6, np.float32), "b": np.zeros([6, *shape], np.float32)}
        return (features if as_dict else (*features.values(),)), np.zeros(6, int)

    Loop(TrainStep(model, "sgd"), arrays(4), global_batch_size=2).train(1)
    says = r"^model two takes features b \[n, 4\], and the data have \[n, 5\]$"
    with pytest.raises(UsageError, match=says):
        Loop(TrainStep(model, "sgd"), arrays(5), global_batch_size=2)


@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
@pytest.mark.parametrize("text", [np.array([["red"]] * 6), np.array([["red"]] * 6, object)])
def test_features_that_are_text(kind, text):
    inputs = {"a": keras.Input([1], name="a"), "b": keras.Input([1], name="b")}
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs["a"] + inputs["b"]))
    arrays = {"a": np.zeros([6, 1], np.float32), "b": text}, np.zeros(6, int)
    data = arrays if kind == "arrays" else tf.data.Dataset.from_tensor_slices(arrays).batch(2)
    with pytest.raises(UsageError, match="^the features b are text, and the model takes float32"):
        Loop(TrainStep(model, "sgd"), data, global_batch_size=2)
    words = keras.Sequential([keras.Input([1], dtype="string"), keras.layers.StringLookup()])
    labels.check_features(words, GlobalBatches(tf.data.Dataset.from_tensors((text, [0] * 6))))


def test_features_of_inputs_without_names():
    """Keras calls the input keras_tensor, and takes no feature of this name. Of a dict of inputs,
    it takes the keys."""
    by_key = {"x": keras.Input([2]), "z": keras.Input([2])}
    outputs = keras.layers.Dense(2)(keras.layers.add([*by_key.values()]))
    zeros = {name: np.zeros([6, 2], np.float32) for name in "xz"}
    data = InMemory((zeros, np.zeros(6, int)), global_batch_size=2)
    labels.check_features(keras.Model(by_key, outputs), data)

    class Own(keras.Sequential):
        """Its call may take a dict; Keras knows no input of it before."""

    labels.check_features(Own([keras.Input([2]), keras.layers.Dense(2)]), data)
    with pytest.raises(
        UsageError, match="is a keras.Sequential, which takes one array, .* of x, z"
    ):
        labels.check_features(keras.Sequential([keras.Input([2]), keras.layers.Dense(2)]), data)
    inputs = [keras.Input([2]), keras.Input([2])]
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.add(inputs)), name="small")
    features = {"x": np.zeros([6, 2], np.float32), "z": np.zeros([6, 2], np.float32)}
    with pytest.raises(
        UsageError, match=r"^the inputs of model small .* keras.Input\(…, name='x'\)"
    ):
        Loop(TrainStep(model, "sgd"), (features, np.zeros(6, int)), global_batch_size=2)


@pytest.mark.parametrize("kind", [dict, list])
def test_features_of_other_names_than_the_inputs(kind):
    inputs = {"x": keras.Input([4], name="x"), "z": keras.Input([4], name="z")}
    outputs = keras.layers.Dense(2)(keras.layers.add([*inputs.values()]))
    model = keras.Model(inputs if kind is dict else [*inputs.values()], outputs, name="small")
    zeros = np.zeros([6, 4], np.float32)
    says = "^model small has the input z, and .* are x, zz: call them as the inputs, x, z$"
    with pytest.raises(UsageError, match=says):
        arrays = {"x": zeros, "zz": zeros}, np.zeros(6, np.int64)
        Loop(TrainStep(model, "sgd"), arrays, global_batch_size=2)


def test_features_without_batches():
    data = tf.data.Dataset.from_tensors((np.zeros(4, np.float32), np.zeros(1, np.int64)))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    with pytest.raises(UsageError, match=r"the data have \[4\]: make batches of them, with .batch"):
        Loop(TrainStep(model, "sgd"), data)


class TestLabels:
    """Labels that are no class of the model: seen where they are in memory, else in the step."""

    def made(self, labels, *, in_memory, step_class=TrainStep, streamed=False, **options):
        features = np.zeros([len(labels), FEATURES], np.float32)
        arrays = features, np.array(labels)
        data = (Streaming if streamed else InMemory)(arrays, global_batch_size=4)
        if not in_memory and not streamed:
            data = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        return make_loop(data=data, step_class=step_class, **options)

    @pytest.mark.parametrize(("wrong", "dtype"), [(-1, "int64"), (CLASSES, "uint8")])
    def test_in_memory(self, wrong, dtype):
        labels = np.array([0, CLASSES - 1, wrong, 1], dtype)
        reason = f"^label {labels[2]} of example 2 is out of range: .* 5 outputs, .* 0 to 4 .1 of 4"
        with pytest.raises(UsageError, match=reason):
            self.made(labels, in_memory=True)
        with pytest.raises(UsageError, match=reason):
            data = InMemory((np.zeros([4, FEATURES]), labels), global_batch_size=4, training=False)
            Evaluator(EvalStep(mlp()), data)

    def test_of_the_cross_entropy_of_keras(self):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with pytest.raises(UsageError, match="^label 5 of example 1 is out of range"):
            self.made([0, CLASSES, 1, 1], in_memory=True, loss_fn=loss_fn)
        with pytest.raises(UsageError, match=r"^labels of shape \[n, 5\] are one-hot"):
            self.made(np.eye(CLASSES), in_memory=True, loss_fn=loss_fn)

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_of_two_classes_by_keras(self, in_memory):
        def model():
            return keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1, "sigmoid")])

        def made(labels):
            options = {"model": model, "loss_fn": keras.losses.BinaryCrossentropy()}
            return self.made(labels, in_memory=in_memory, **options)

        with pytest.raises(UsageError, match="^labels.* are 1 to 2, and .* takes 0 and 1"):
            made([1, 2, 2, 1])
        made([0, 1, 1, 0])
        made(np.float32([0.1, 1, 1, 0]))

    @pytest.mark.parametrize("wrong", [CLASSES, 2**32 + 1])
    def test_in_the_step(self, wrong):
        loop = self.made([0, wrong, 1, 1], in_memory=False)
        with pytest.raises(
            UsageError, match=f"^label {wrong} is out of range: the model has 5 outputs, .* 4$"
        ):
            loop.train(1)

    @pytest.mark.parametrize(("replicas", "streamed"), [(1, True), (2, False)])
    def test_under_xla(self, mirrored, replicas, streamed):
        """It computes NaN where the CPU's kernel fails."""
        labels = [0] * 9 + [CLASSES + 2] + [0] * 6
        loop = self.made(
            labels,
            in_memory=False,
            streamed=streamed,
            jit_compile=True,
            strategy=mirrored(replicas),
            steps_per_loop=2,
        )
        with pytest.raises(
            UsageError,
            match="^label 7 of example . in the batch of step . is out of range: .* 0 to",
        ) as error:
            loop.train(4)
        assert streamed or "of example 1 in the batch of step 3 " in str(error.value)

    def test_a_check_that_waits_for_the_labels_has_not_failed(self):
        message = (
            "Received a label value of 3 which is outside the valid range of [0, 3).\n"
            "\t [[{{node while/SparseSoftmaxCrossEntropyWithLogits}}]]\n"
            "\t [[while/body/_1/ctl_one_loss_for_each_example/Reshape/_258]]"
        )
        with (
            pytest.raises(UsageError, match="^label 3 is out of range"),
            local_batch.translate_graph_checks(),
        ):
            raise tf.errors.InvalidArgumentError(None, None, message)

    def test_labels_that_mean_something_else(self):
        class Shifted(TrainStep):
            def loss(self, batch):
                features, labels = batch
                return super().loss((features, labels - 10))

            def update_metrics(self, batch, outputs):
                pass

        labels = [10, 11, 14, 12]
        assert self.made(labels, in_memory=True, step_class=Shifted).train(2)["loss"] > 0


def of_keras(units, activation):
    return lambda: keras.Sequential(
        [keras.Input([FEATURES]), keras.layers.Dense(units, activation)]
    )


SPARSE = functools.partial(keras.losses.SparseCategoricalCrossentropy, reduction=None)


@pytest.mark.parametrize(
    ("loss_fn", "activation", "reason"),
    [
        (SPARSE(), None, r"probabilities \(from_logits=False\), and model .* has no activation"),
        (keras.losses.sparse_categorical_crossentropy, None, "give from_logits=True"),
        (SPARSE(from_logits=True), "softmax", r"takes logits .* ends in a softmax \(layer dense"),
        (SPARSE(from_logits=True), None, None),
        (SPARSE(), "softmax", None),
        (
            functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True),
            None,
            None,
        ),
        (keras.losses.MeanAbsoluteError(reduction=None), None, None),
    ],
)
def test_a_cross_entropy_of_keras_fits_the_last_layer(loss_fn, activation, reason):
    """``from_logits=False`` on logits trains nothing: the loss stays at 2.3."""
    if reason is None:
        make_loop(model=of_keras(CLASSES, activation), loss_fn=loss_fn)
        return
    with pytest.raises(UsageError, match=reason):
        make_loop(model=of_keras(CLASSES, activation), loss_fn=loss_fn)


def with_operations(last):
    inputs = keras.Input([FEATURES])
    return lambda: keras.Model(inputs, last(keras.layers.Dense(CLASSES)(inputs)))


def cast_softmax(logits):
    return keras.layers.Activation("linear", dtype="float32")(keras.layers.Softmax()(logits))


class OfTheUser(keras.losses.Loss):
    def call(self, labels, outputs):
        return cross_entropy(labels, outputs)

    def get_config(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (with_operations(keras.ops.softmax), SPARSE()),
        (with_operations(cast_softmax), SPARSE()),
        (with_operations(keras.ops.log_softmax), cross_entropy),
        (of_keras(CLASSES, None), OfTheUser(reduction=None)),
    ],
    ids=["ops", "float32", "log", "own"],
)
def test_what_ends_in_an_operation_is_right(model, loss_fn):
    make_loop(model=model, loss_fn=loss_fn)


@pytest.mark.parametrize("last", [keras.ops.softmax, keras.layers.Softmax()])
def test_what_ends_in_a_softmax_is_refused_by_a_loss_of_logits(last):
    for loss_fn in (cross_entropy, SPARSE(from_logits=True)):
        with pytest.raises(UsageError, match=r"ends in a softmax \(layer softmax"):
            make_loop(model=with_operations(last), loss_fn=loss_fn)


def of_ids(**options) -> keras.Model:
    rows = keras.layers.Embedding(5, 3, name="words")
    layers = keras.Input([2], dtype="int32"), rows, keras.layers.Flatten()
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)], **options)


class OwnModel(keras.Model):
    """ctl cannot see which of its inputs are ids."""

    def __init__(self):
        super().__init__()
        self.inner = of_ids()
        self.build([None, 2])

    def call(self, ids):
        return self.inner(ids)


class TestIds:
    """Ids outside of an Embedding. XLA takes the nearest row."""

    def made(self, ids, *, in_memory=False, strategy=None, **options):
        arrays = np.array(ids, np.int32), np.zeros(len(ids), np.int64)
        data = InMemory(arrays, global_batch_size=4)
        if not in_memory:
            data = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        return make_loop(strategy, data=data, **{"model": of_ids} | options)

    good = ((0, 4),) * 4
    bad = (*good, (1, 2), (3, 99), (0, 0), (4, 4))

    def test_in_memory(self):
        with pytest.raises(UsageError, match="^id 99 in example 5 is outside of layer wor.* 4$"):
            self.made(self.bad, in_memory=True)

    def test_of_inputs_by_name(self):
        """Keras gives a model with a list of inputs those of a dict by name."""
        one, other = (keras.Input([], dtype="int32", name=name) for name in ("user", "item"))
        embed = keras.layers.Embedding
        model = keras.Model([one, other], [embed(99, 2)(one), embed(5, 2, name="few")(other)])
        features = {"item": np.array([4, 0], np.int32), "user": np.array([98, 7], np.int32)}
        labels.check_ids(model, InMemory((features, features["item"]), global_batch_size=2))
        features["item"][1] = 5
        with pytest.raises(UsageError, match="^id 5 in feature item of example 1 is outs.* few"):
            labels.check_ids(model, InMemory((features, features["item"]), global_batch_size=2))

    def test_of_a_stream_under_xla(self, mirrored):
        loop = self.made(self.bad, strategy=mirrored(2), jit_compile=True)
        loop.train(1)
        assert "call" not in vars(loop.step.model.layers[0])
        where = "example 1 in the batch of step 2"
        with pytest.raises(UsageError, match=f"^id 99 in {where} is outside of layer words"):
            loop.train(2)

    def test_of_another_model_under_xla(self):
        loop = self.made(self.bad, model=OwnModel, jit_compile=True)
        with pytest.raises(DivergedError, match="the loss is nan at step 2"):
            loop.train(2)

    def test_without_xla(self):
        where = "example 1 in the batch of step 2"
        with pytest.raises(UsageError, match=f"^index 99 in {where} is outside of a table of 5 r"):
            self.made(self.bad).train(2)

    def test_of_several_features(self):
        """Of a model that is not functional, nothing is known before it fails."""

        class TwoTables(keras.Model):
            def __init__(self):
                super().__init__()
                self.of_user = keras.layers.Embedding(9, CLASSES)
                self.of_item = keras.layers.Embedding(5, CLASSES)

            def call(self, ids):
                return self.of_user(ids["user"]) + self.of_item(ids["item"])

        features = {"user": np.array([1, 2, 8, 3], np.int32), "item": np.array([0, 1, 2, 6])}
        data = InMemory((features, np.zeros(4, np.int64)), global_batch_size=2)
        place = "in feature item of example 3"
        with pytest.raises(UsageError, match=f"^index 6 {place} is outside of a table of 5 rows"):
            make_loop(data=data, model=TwoTables).train(2)
        evaluator = Evaluator(EvalStep(TwoTables()), data)
        with pytest.raises(UsageError, match=f"^index 6 {place} is outside of a table of 5 rows"):
            evaluator.run()

    def test_those_inside_have_the_same_bits(self, monkeypatch):
        losses = []
        for looked_up in (labels._looked_up, lambda call, rows, ids: call(ids)):
            monkeypatch.setattr(labels, "_looked_up", looked_up)
            loop = self.made(self.good * 4, jit_compile=True, seed=1)
            losses.append([loop.train(4)["loss"], loop.step.model.get_weights()[0].tobytes()])
        assert losses[0] == losses[1]


@pytest.mark.parametrize("loss", [labels.BINARY, labels.CROSS_ENTROPY])
def test_a_first_batch_that_is_checked_changes_no_order(loss):
    """A shuffle draws other seeds each time it is read."""
    model = keras.Sequential([keras.Input([]), keras.layers.Reshape([1]), keras.layers.Dense(2)])

    def order(check, wrong=0.0):
        shape = [12, 2] if loss == labels.BINARY else [12]
        arrays = np.arange(12), np.full(shape, 1.0 + wrong, np.float32)
        own = tf.data.Dataset.from_tensor_slices(arrays).shuffle(12, seed=1).batch(4)
        data = GlobalBatches(own, training=False)
        if check:
            labels.check_labels(loss, model, data)
        return [batch[0].numpy().tolist() for _ in range(2) for batch in data.batches()]

    assert order(True) == order(False)
    with pytest.raises(UsageError, match="in the first batch"):
        order(True, wrong=4.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([2637.0, 7000.0, 12040.0], "mean 7225.7 and the standard deviation 3842.1"),
        (
            [2001, 2002, 2003],
            "train on (label - 2002) / 0.8165, or, with Adam, try --learning_rate=0.9",
        ),
        ([-1.0, 0.5, 3.0], None),
        ([1.0, 1.1, 1.2], None),
        ([np.nan, 2000.0], None),
    ],
)
def test_labels_of_a_regression_that_are_not_standardized(caplog, values, says):
    features = np.zeros([len(values), 2], np.float32)
    labels.warn_of_scale(InMemory((features, np.array(values)), global_batch_size=2))
    assert caplog.text.count("WARNING") == bool(says)
    assert says is None or says in caplog.text


FIRST = {
    "an Embedding": (lambda: keras.layers.Embedding(9, 2), "takes ids, and ctl divides uint8 f"),
    "Rescaling": (lambda: keras.layers.Rescaling(1 / 255), "scales features of 0 to 255, and so"),
    "to -1 and 1": (lambda: keras.layers.Rescaling(1 / 127.5, -1), "scales features of 0 to 255"),
    "Normalization": (
        lambda: keras.layers.Normalization(mean=99.0, variance=9.0),
        "scales features of 0 to 255, and so does ctl",
    ),
    "of 0 to 1": (lambda: keras.layers.Rescaling(2.0, -1.0), None),
    "Dense": (lambda: keras.layers.Dense(2), None),
}


@pytest.mark.parametrize("kind", FIRST)
def test_bytes_are_scaled_once(kind, warnings_of):
    make, says = FIRST[kind]
    images = np.arange(32, dtype=np.uint8).reshape(8, 2, 2) % 9
    last = [keras.layers.Flatten(), keras.layers.Dense(3)]

    def loop(features, dtype=None):
        model = keras.Sequential([keras.Input([2, 2], dtype=dtype), make(), *last])
        step = TrainStep(model, keras.optimizers.SGD(0.1))
        return Loop(step, (features, np.zeros(8, int)), global_batch_size=4)

    if says is None:
        loop(images).train(1)
    else:
        with pytest.raises(UsageError, match=says):
            loop(images)
    loop(images.astype("float32")).train(1)  # as the message says
    if kind == "an Embedding":
        loop(images, "int32").train(1)
    assert not warnings_of()


def scaling(kind: str) -> keras.Model:
    """A model that scales images, not as its first layer."""
    scale, flip = keras.layers.Rescaling(1 / 255), keras.layers.RandomFlip("horizontal")
    last = [keras.layers.Flatten(), keras.layers.Dense(3)]
    inputs = keras.Input([4, 4, 1])
    if kind == "after a layer":
        return keras.Sequential([inputs, flip, keras.layers.ZeroPadding2D(), scale, *last])
    if kind == "after a model":
        return keras.Sequential([inputs, keras.Sequential([flip]), scale, *last])
    if kind == "in a model":
        return keras.Sequential([inputs, keras.Sequential([flip, scale]), *last])
    scaled = {
        "by an operation": lambda: inputs / 255.0,
        "by a product": lambda: keras.ops.cast(inputs, "float32") * (1 / 255),
        "in a functional model": lambda: keras.Model(inputs, scale(flip(inputs)))(flip(inputs)),
        "not": lambda: flip(inputs) * 2.0 / 3.0,
        "later": lambda: scale(keras.layers.Conv2D(1, 2)(flip(inputs))),
    }[kind]()
    return keras.Model(inputs, last[1](last[0](scaled)))


@pytest.mark.parametrize(
    "kind",
    [
        *("after a layer", "after a model", "in a model", "by an operation", "by a product"),
        *("in a functional model", "not", "later"),
    ],
)
def test_bytes_that_a_later_layer_would_scale_again(kind):
    images = np.zeros([8, 4, 4, 1], np.uint8)
    step = TrainStep(scaling(kind), "sgd")
    if kind in ("not", "later"):
        Loop(step, (images, np.zeros(8, int)), global_batch_size=4)
        return
    with pytest.raises(UsageError, match="scales features of 0 to 255, and so does"):
        Loop(step, (images, np.zeros(8, int)), global_batch_size=4)


def test_bytes_of_a_model_that_does_not_show_its_graph(warnings_of):
    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.last = keras.layers.Embedding(9, 2), keras.layers.Dense(3)

        def call(self, ids):
            return self.last(keras.ops.mean(self.table(ids), axis=1))

    for dtype in ("uint8", "int32"):
        ids = np.ones([8, 5], dtype)
        Loop(TrainStep(Words(), "sgd"), (ids, np.zeros(8, int)), global_batch_size=4)
    (said,) = warnings_of()
    assert re.match(
        r"features of model words\w* are uint8.*: if layer embedding\w* takes them", said
    )


def test_bytes_that_are_no_images_are_warned_of(warnings_of):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    table = np.arange(32, dtype=np.uint8).reshape(8, 4)
    Loop(TrainStep(model, "sgd"), (table, np.zeros(8, int)), global_batch_size=4)
    assert warnings_of()[0].startswith(f"features of model {model.name} are uint8, of shape")


@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_labels_of_one_column_for_each_class(kind):
    """Probabilities are taken, also as floats that are one-hot; other numbers are named."""
    random = np.random.default_rng(0)
    shares = random.uniform(0.1, 1, [8, 3]).astype("float32")
    shares /= shares.sum(axis=1, keepdims=True)
    several = np.array([[1, 1, 0]] * 8, "float32")
    numbers = random.normal(size=(8, 3)).astype("float32")

    def loop(labels):
        arrays = np.zeros([8, 4], np.float32), labels
        data = arrays if kind == "arrays" else tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        return Loop(TrainStep(model, "sgd"), data, global_batch_size=4)

    loop(shares).train(1)
    loop(np.eye(3, dtype="float32")[[0, 1, 2, 0, 1, 2, 0, 1]]).train(1)
    with pytest.raises(UsageError, match="no probabilities .*: for several .* --loss=binary_cross"):
        loop(several)
    with pytest.raises(UsageError, match="no probabilities .*: for numbers, give --loss=mean_squa"):
        loop(numbers)
    if kind == "arrays":
        with pytest.raises(UsageError, match="several classes in one example.*binary_crossentropy"):
            loop(several.astype(int))
    missing = shares.copy()
    missing[5] = np.nan
    if kind == "arrays":
        with pytest.raises(UsageError, match="^the label of example 5 is NaN"):
            loop(missing)


def test_images_as_labels(warnings_of):
    images = np.arange(8 * 4, dtype=np.uint8).reshape(8, 2, 2, 1) * 7
    model = keras.Sequential([keras.Input([2, 2, 1]), keras.layers.Conv2D(1, 1)])
    Loop(TrainStep(model, "sgd", "mse"), (images, images), global_batch_size=4)
    assert "the labels are uint8 images, as the features" in warnings_of()[0]
    model = keras.Sequential([keras.Input([2, 2, 1]), keras.layers.Conv2D(1, 1)])
    with pytest.raises(UsageError, match="binary_cross_entropy takes 0 and 1.*: divide them by 25"):
        step = TrainStep(model, "sgd", "binary_cross_entropy")
        Loop(step, (images, images), global_batch_size=4)


def test_layers_of_0_to_255_are_warned_of(warnings_of):
    for options in ({}, {"value_range": (0, 1)}):
        bright = keras.layers.RandomBrightness(0.2, name="bright", **options)
        layers = [keras.Input([2, 2, 1]), bright, keras.layers.Flatten(), keras.layers.Dense(3)]
        data = np.ones([8, 2, 2, 1], np.uint8), np.zeros(8, int)
        Loop(TrainStep(keras.Sequential(layers), "sgd"), data, global_batch_size=4)
        assert len(warnings_of()) == 1
    assert warnings_of()[0].startswith("layer bright takes images of 0 to 255 (its value_range)")


def test_images_that_a_backbone_standardizes_itself():
    inputs = keras.Input([4, 4, 3])
    standardized = keras.applications.resnet50.preprocess_input(inputs)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(standardized))
    step = TrainStep(keras.Model(inputs, outputs), "sgd")
    with pytest.raises(UsageError, match="scales features of 0 to 255, and so does"):
        Loop(step, (np.zeros([8, 4, 4, 3], np.uint8), np.zeros(8, int)), global_batch_size=4)
