"""Losses by the names and the objects of Keras, against `Model.fit` and Keras's own numbers."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.base.names import KERAS_LOSSES, LOSSES
from ctl.errors import UsageError
from ctl.phases import losses

RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(32, 4)).astype("float32")
CLASSES = RANDOM.integers(0, 3, 32)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
BINARY = (CLASSES > 0).astype("float32")


def model(outputs=3, activation=None):
    keras.utils.set_random_seed(0)
    last = keras.layers.Dense(outputs, activation)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), last])


def batches(labels, *weights):
    return tf.data.Dataset.from_tensor_slices((FEATURES, labels, *weights)).batch(8)


CATEGORICAL = keras.losses.CategoricalCrossentropy


@pytest.mark.parametrize(
    ("loss", "theirs", "outputs", "activation", "labels"),
    [
        ("sparse_categorical_crossentropy", None, 3, "softmax", CLASSES[:, None]),
        ("categorical_crossentropy", CATEGORICAL(from_logits=True), 3, None, ONE_HOT),
        ("binary_crossentropy", None, 1, "sigmoid", BINARY),
        ("mae", None, 1, None, BINARY),
        (keras.losses.Huber(0.2), None, 3, None, ONE_HOT),
    ],
)
def test_a_training_has_the_numbers_of_fit(loss, theirs, outputs, activation, labels):
    ours, data = model(outputs, activation), batches(labels)
    loop = ctl.Loop(
        ctl.TrainStep(ours, "sgd", loss, metrics=["accuracy"]),
        data,
        evaluator=ctl.Evaluator(ctl.EvalStep(ours, loss, ["accuracy"]), data),
    )
    results = loop.train_and_evaluate(4, evaluate_every=4)
    plain = model(outputs, activation)
    plain.compile("sgd", theirs or loss, metrics=["accuracy"], run_eagerly=True)
    plain.fit(data, verbose=0)
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    expected = plain.evaluate(data, verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    if activation or outputs > 1:  # of others, Keras compares with 1/2
        assert results["accuracy"] == pytest.approx(expected["accuracy"])


def squared(labels, outputs):
    return tf.reduce_mean(tf.square(labels - outputs), axis=-1)


class Squared(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return squared(y_true, y_pred)


@pytest.mark.parametrize(
    ("loss", "labels", "shape", "warns"),
    [
        (squared, BINARY, [1], False),
        (squared, BINARY[:, None], [1], False),
        (squared, BINARY[:, None], [], False),
        (squared, ONE_HOT, [3, 1], False),
        (squared, ONE_HOT[..., None], [3], False),
        (squared, ONE_HOT, [3], False),
        (Squared(), BINARY[:, None], [1], False),
        (Squared(), BINARY, [1], True),  # broadcast by Keras, too
        (keras.losses.sparse_categorical_crossentropy, CLASSES, [3], False),
        (keras.losses.sparse_categorical_crossentropy, CLASSES[:, None], [3], False),
    ],
)
def test_a_function_gets_labels_and_outputs_in_one_rank_as_in_fit(
    loss, labels, shape, warns, caplog
):
    def made():
        made = model(int(np.prod(shape)), None)
        made.add(keras.layers.Reshape(shape))
        return made

    ours, plain = made(), made()
    ctl.Loop(ctl.TrainStep(ours, "sgd", loss), batches(labels)).train(4)
    plain.compile("sgd", loss)
    plain.fit(batches(labels), verbose=0)
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert caplog.text.count(losses.BROADCASTS) == warns


def test_a_loss_of_all_pairs_is_refused():
    loss = lambda labels, outputs: (labels - outputs[:, 0]) ** 2  # noqa: E731
    with pytest.raises(UsageError, match="labels and outputs in one rank"):
        ctl.Loop(ctl.TrainStep(model(1), "sgd", loss), batches(BINARY)).train(1)


@pytest.mark.parametrize("name", KERAS_LOSSES)
def test_the_table_is_that_of_keras(name):
    kind = getattr(keras.losses, KERAS_LOSSES[name])
    found = keras.losses.get(name)
    assert name == kind.__name__ or found is keras.losses.get(kind().fn.__name__)
    one = losses.per_example(name, model(3, "softmax"))
    labels = {"SparseCategoricalCrossentropy": CLASSES}.get(KERAS_LOSSES[name], ONE_HOT)
    outputs = np.abs(RANDOM.normal(size=(32, 3))).astype("float32")
    outputs /= outputs.sum(axis=1, keepdims=True)
    if KERAS_LOSSES[name] == "CTC":
        return
    values = one(tf.constant(labels), tf.constant(outputs))
    assert values.shape == (32,)
    np.testing.assert_allclose(tf.reduce_mean(values), kind()(labels, outputs), rtol=1e-5)


def test_an_object_has_one_loss_for_each_example():
    given = keras.losses.MeanSquaredError()
    one = losses.per_example(given)
    assert given.reduction == "sum_over_batch_size" and one.reduction == "none"
    assert losses.per_example(one) is one
    labels, outputs = RANDOM.normal(size=(2, 6, 4, 3)).astype("float32")
    values = losses.of_each(one, tf.constant(labels), tf.constant(outputs))
    assert values.shape == (6,)
    assert float(tf.reduce_mean(values)) == pytest.approx(float(given(labels, outputs)), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "given", "warns"),
    [
        ("mse", {}, True),
        (keras.losses.Huber(), {}, True),
        (["mse"], {}, True),
        ("mse", {"loss_fn": "mse"}, False),
        ("sparse_categorical_crossentropy", {}, False),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), {}, False),
    ],
)
def test_a_compiled_loss_is_not_dropped_in_silence(caplog, loss, given, warns):
    compiled = model(1)
    compiled.compile("sgd", loss)
    ctl.TrainStep(compiled, "sgd", **given)
    ctl.EvalStep(compiled, **given)
    assert caplog.text.count("give loss_fn=model.loss") == 2 * warns


def test_a_loss_of_the_users_own_keeps_its_code():
    class Cubed(keras.losses.Loss):
        def call(self, labels, outputs):
            return tf.reduce_mean(tf.abs(labels - outputs) ** 3, axis=-1)

    loop = ctl.Loop(ctl.TrainStep(model(), "sgd", Cubed()), batches(ONE_HOT))
    expected = np.mean(np.abs(ONE_HOT[:8] - model().predict(FEATURES[:8], verbose=0)) ** 3)
    assert loop.train(1)["loss"] == pytest.approx(expected, rel=1e-5)


def test_weights_count_as_in_fit():
    weights = RANDOM.uniform(0.5, 2.0, 32).astype("float32")
    ours, plain = model(), model()
    data = batches(ONE_HOT, weights)
    ctl.Loop(ctl.TrainStep(ours, "sgd", "mae"), data).train(4)
    plain.compile("sgd", "mae", run_eagerly=True)
    plain.fit(data, verbose=0)
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def ending_in(last):
    inputs = keras.Input([4])
    return lambda: keras.Model(inputs, last(keras.layers.Dense(3)(inputs)))


def test_what_a_model_ends_in():
    nested = keras.Sequential([keras.Input([4]), model(3, "softmax")])
    assert losses.gives_logits(model()) is True
    assert losses.gives_logits(model(1, "sigmoid")) is losses.gives_logits(nested) is False
    for last in (keras.ops.softmax, keras.ops.sigmoid, keras.layers.Softmax()):
        assert losses.gives_logits(ending_in(last)()) is False
    for last in (keras.ops.log_softmax, keras.layers.ReLU(), keras.layers.Activation("linear")):
        assert losses.gives_logits(ending_in(last)()) is None


@pytest.mark.parametrize(
    ("loss", "made", "labels", "says"),
    [
        ("msee", model, ONE_HOT, "^unknown loss_fn 'msee': did you mean 'mse'"),
        ("MSE", model, ONE_HOT, "^unknown loss_fn 'MSE': did you mean 'mse'"),
        ("dice", model, ONE_HOT, "^unknown loss_fn 'dice': .*the choices are cross_entropy, "),
        (
            "sparse_categorical_crossentropy",
            ending_in(keras.ops.log_softmax),
            CLASSES,
            r"last layer of model .* does not say .*: give .*SparseCategoricalCrossentropy\(from",
        ),
        (keras.losses.Huber(reduction="sum"), model, ONE_HOT, "^loss_fn has reduction='sum', and"),
        (
            keras.losses.Huber(reduction="mean_with_sample_weight"),
            model,
            ONE_HOT,
            "leave reduction out .and give weighting='sum_of_weights'",
        ),
        ("mae", model, CLASSES, r"^labels of shape \(None,\) do not fit outputs of .*each output$"),
        (
            "categorical_crossentropy",
            model,
            CLASSES,
            "each output .sparse_categorical_crossentropy takes classes",
        ),
    ],
)
def test_what_is_refused(loss, made, labels, says):
    with pytest.raises(UsageError, match=says):
        ctl.Loop(ctl.TrainStep(made(), "sgd", loss), batches(labels)).train(1)


@pytest.mark.parametrize(
    "loss",
    ["mae", "mse", keras.losses.mean_absolute_error, lambda y, z: tf.abs(tf.cast(y, z.dtype) - z)],
)
def test_masked_places_are_refused(loss):
    layers = [keras.Input([4]), keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.Dense(2)]
    data = tf.data.Dataset.from_tensors((np.eye(4, dtype="int64"), np.zeros([4, 4, 2])))
    loop = ctl.Loop(ctl.TrainStep(keras.Sequential(layers), "sgd", loss), data)
    with pytest.raises(UsageError, match="^the outputs of the model have a mask, .*override loss"):
        loop.train(1)


def test_a_class_that_is_ignored_is_refused_and_weight_0_is_what_keras_does():
    options = {"from_logits": True, "ignore_class": 9}
    of_function = functools.partial(keras.losses.sparse_categorical_crossentropy, **options)
    for loss in (keras.losses.SparseCategoricalCrossentropy(**options), of_function):
        with pytest.raises(UsageError, match="^loss_fn has ignore_class=9, .*, and give such exam"):
            ctl.TrainStep(model(), "sgd", loss)
    theirs, ours = model(), model()
    ours.set_weights(theirs.get_weights())
    theirs.compile("sgd", keras.losses.SparseCategoricalCrossentropy(**options))
    theirs.train_on_batch(FEATURES, np.where(CLASSES == 1, 9, CLASSES))
    weights = (CLASSES != 1).astype("float32")
    assert 0 < weights.sum() < len(weights)
    step = ctl.TrainStep(ours, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ctl.Loop(step, (FEATURES, CLASSES, weights), global_batch_size=len(FEATURES)).train(1)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("kind", [keras.losses.Dice, keras.losses.Tversky])
def test_losses_of_whole_batches_need_axes(kind):
    with pytest.raises(UsageError, match=rf"^loss_fn {kind.__name__} sums .*axis=\(1, 2, 3\)\)"):
        ctl.TrainStep(model(), "sgd", kind())
    theirs, ours = model(activation="softmax"), model(activation="softmax")
    theirs.compile("sgd", kind(axis=1))
    theirs.train_on_batch(FEATURES, ONE_HOT)
    step = ctl.TrainStep(ours, "sgd", kind(axis=1))
    ctl.Loop(step, (FEATURES, ONE_HOT), global_batch_size=len(FEATURES)).train(1)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


PLACES = RANDOM.integers(0, 2, size=(32, 6, 6)).astype("float32")
IMAGES = RANDOM.normal(size=(32, 6, 6, 1)).astype("float32")
KINDS = [
    "binary_crossentropy",
    keras.losses.BinaryCrossentropy(),
    "mae",
    "mse",
    keras.losses.Huber(),
]


@pytest.mark.parametrize(
    ("loss", "shape"), [*zip(KINDS, [(32, 6, 6, 1), (32, 6, 6)] * 3, strict=False)]
)
def test_masks_of_images_may_lack_the_last_axis(loss, shape):
    """As in fit, which drops that of the outputs."""

    def made():
        keras.utils.set_random_seed(0)
        convolution = keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")
        return keras.Sequential([keras.Input([6, 6, 1]), convolution])

    check_equals_fit(made, loss, IMAGES, PLACES.reshape(shape))


@pytest.mark.parametrize(
    ("loss", "labels"),
    [*zip(KINDS, [BINARY[:, None], BINARY] * 3, strict=False), ("mse", BINARY[:, None])],
)
def test_outputs_may_have_no_last_axis(loss, labels):
    def made():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([4])
        outputs = keras.layers.Dense(1, "sigmoid")(inputs)
        return keras.Model(inputs, keras.ops.squeeze(outputs, -1))

    if isinstance(loss, str) and loss.startswith("binary"):
        loss = keras.losses.BinaryCrossentropy()  # the last layer does not say what it gives
    check_equals_fit(made, loss, FEATURES, labels)


def check_equals_fit(made, loss, features, labels):
    theirs, ours = made(), made()
    theirs.compile("sgd", loss)
    theirs.train_on_batch(features, labels)
    step = ctl.TrainStep(ours, "sgd", loss)
    ctl.Loop(step, (features, labels), global_batch_size=len(features)).train(1)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        (tf.nn.softmax, "cross_entropy"),
        (keras.ops.softmax, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        (tf.sigmoid, "binary_cross_entropy"),
    ],
)
def test_an_activation_of_tensorflow_is_known(activation, loss):
    for last in (
        [keras.layers.Dense(3, activation)],
        [keras.layers.Dense(3), keras.layers.Activation(activation)],
        [keras.layers.Dense(3), keras.layers.Lambda(activation)],
    ):
        step = ctl.TrainStep(keras.Sequential([keras.Input([4]), *last]), "sgd", loss)
        labels = CLASSES if loss != "binary_cross_entropy" else ONE_HOT
        with pytest.raises(UsageError, match="takes logits.* activation .*out"):
            ctl.Loop(step, (FEATURES, labels), global_batch_size=8)


def test_a_softmax_over_places_is_taken():
    inputs = keras.Input([5, 4])
    scores = keras.layers.Dense(1)(inputs)
    for weights in (
        keras.ops.softmax(scores, axis=1),
        keras.layers.Softmax(axis=1)(scores),
        keras.layers.Lambda(tf.nn.softmax, arguments={"axis": 1})(scores),
    ):
        step = ctl.TrainStep(keras.Model(inputs, weights), "sgd", "mse")
        data = RANDOM.normal(size=(8, 5, 4)).astype("float32"), np.ones([8, 5, 1], "float32")
        ctl.Loop(step, data, global_batch_size=8).train(1)


@pytest.mark.parametrize("labels", [(32, 6, 6), (32, 6, 6, 1)])
def test_dice_of_masks(labels):
    def made():
        keras.utils.set_random_seed(0)
        convolution = keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")
        return keras.Sequential([keras.Input([6, 6, 1]), convolution])

    theirs, ours = made(), made()
    theirs.compile("sgd", keras.losses.Dice(axis=(1, 2, 3)))
    theirs.train_on_batch(IMAGES, PLACES[..., None])
    step = ctl.TrainStep(ours, "sgd", keras.losses.Dice(axis=(1, 2, 3)))
    ctl.Loop(step, (IMAGES, PLACES.reshape(labels)), global_batch_size=32).train(1)
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_a_functional_model_that_does_more_in_call():
    class More(keras.Model):
        def __init__(self):
            inputs = keras.Input([4])
            super().__init__(inputs, keras.layers.Dense(1)(inputs))

        def call(self, inputs):
            return keras.ops.sigmoid(super().call(inputs))

    assert losses.gives_logits(More()) is None
    step = ctl.TrainStep(More(), "sgd", keras.losses.BinaryCrossentropy())
    ctl.Loop(step, (FEATURES, BINARY), global_batch_size=8).train(1)


class Subclassed(keras.Model):
    def __init__(self, outputs, activation=None):
        super().__init__()
        self.dense = keras.layers.Dense(outputs, activation)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.slow
def test_subclassed_models_end_as_their_calls_do():
    sparse = keras.losses.SparseCategoricalCrossentropy
    for made, loss, says in (
        (Subclassed(3, "softmax"), "cross_entropy", "ends in a softmax or sigmoid, and the loss"),
        (Subclassed(3, "softmax"), sparse(from_logits=True), "ends in a softmax or sigmoid"),
        (Subclassed(1, "sigmoid"), "binary_cross_entropy", "ends in a softmax or sigmoid"),
        (Subclassed(1), "cross_entropy", "has 1 output, whose softmax is always 1"),
    ):
        labels = CLASSES if loss != "binary_cross_entropy" else BINARY
        loop = ctl.Loop(ctl.TrainStep(made, "sgd", loss), (FEATURES, labels), global_batch_size=8)
        with pytest.raises(UsageError, match=says):
            loop.train(1)
    for made, loss, labels in (
        (Subclassed(3, "softmax"), sparse(), CLASSES),
        (Subclassed(3), "cross_entropy", CLASSES),
        (Subclassed(1), "binary_cross_entropy", BINARY),
    ):
        step = ctl.TrainStep(made, "sgd", loss)
        ctl.Loop(step, (FEATURES, labels), global_batch_size=8).train(1)


def test_names_of_losses_of_the_user_mean_nothing():
    def cross_entropy(labels, outputs):
        return -tf.reduce_sum(labels * tf.nn.log_softmax(outputs), axis=-1)

    step = ctl.TrainStep(model(), "sgd", cross_entropy, metrics=["categorical_accuracy"])
    ctl.Loop(step, (FEATURES, ONE_HOT), global_batch_size=8).train(1)


def test_labels_of_several_columns_need_as_many_outputs():
    for loss in (keras.losses.mean_squared_error, keras.losses.huber, "mae"):
        step = ctl.TrainStep(model(1), "sgd", loss)
        with pytest.raises(UsageError, match="do not fit outputs of shape"):
            ctl.Loop(step, (FEATURES, ONE_HOT), global_batch_size=8).train(1)


def test_dice_takes_no_logits():
    step = ctl.TrainStep(model(), "sgd", keras.losses.Dice(axis=1))
    with pytest.raises(UsageError, match="Dice takes probabilities, and model .* give it a sigmoi"):
        ctl.Loop(step, (FEATURES, ONE_HOT), global_batch_size=8)


def test_labels_may_be_rounded():
    labels = BINARY * np.float32(1.0000001) - np.float32(1e-9)
    step = ctl.TrainStep(model(1), "sgd", "binary_cross_entropy")
    ctl.Loop(step, (FEATURES, labels), global_batch_size=8).train(1)


def test_a_softmax_of_one_output_is_refused():
    for loss in ("binary_crossentropy", "mse"):
        step = ctl.TrainStep(model(1, "softmax"), "sgd", loss)
        with pytest.raises(UsageError, match="ends in a softmax of 1 output .* give it a sigmoid"):
            ctl.Loop(step, (FEATURES, BINARY), global_batch_size=8)


def test_names_of_ctl_go_on():
    assert [losses.per_example(name).__name__ for name in LOSSES] == list(LOSSES)
    assert losses.per_example("mse") is losses.mean_squared_error


def test_classes_may_be_a_column():
    """As `keras.datasets.cifar10` has them."""
    flat, column = model(), model()
    for one, labels in ((flat, CLASSES), (column, CLASSES[:, None])):
        data = ctl.data.InMemory((FEATURES, labels), global_batch_size=8)
        ctl.Loop(ctl.TrainStep(one, "sgd", metrics=["accuracy"]), data).train(3)
    for one, other in zip(flat.get_weights(), column.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("labels", [CLASSES, CLASSES[:, None], ONE_HOT, CLASSES.tolist()])
def test_labels_may_be_arrays(labels):
    """As at a prompt, where nothing has made tensors of them."""
    logits = FEATURES[:, :3]
    wanted = keras.losses.sparse_categorical_crossentropy(CLASSES, logits, from_logits=True)
    np.testing.assert_allclose(ctl.losses.cross_entropy(labels, logits), wanted, rtol=1e-5)


def test_losses_of_several_outputs_are_one_function():
    inputs = keras.Input([3])
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    with pytest.raises(UsageError, match="^loss_fn is a dict: give one function as loss_fn"):
        ctl.TrainStep(model, "sgd", {"a": "mse", "b": "mse"})
    labels = {"a": np.ones([4, 1], "float32"), "b": np.zeros([4, 1], "float32")}
    data = np.eye(4, 3), labels
    for given in ({}, {"loss_fn": "mse"}, {"loss_fn": keras.losses.MeanSquaredError()}):
        with pytest.raises(UsageError, match=f"^model {model.name} has 2 outputs: give one funct"):
            ctl.Loop(ctl.TrainStep(model, "sgd", **given), data, global_batch_size=4)
    with pytest.raises(UsageError, match="^metrics is a dict: for metrics of several outputs"):
        ctl.TrainStep(model, "sgd", "mse", metrics={"a": ["mae"]})
    with pytest.raises(UsageError, match="^metric mae takes one output, and model .* has 2: in a"):
        step = ctl.TrainStep(model, "sgd", lambda labels, outputs: 0.0, metrics=["mae"])
        ctl.Loop(step, data, global_batch_size=4)

    def both(labels, outputs):
        a, b = (tf.square(labels[name] - outputs[name])[:, 0] for name in "ab")
        return a + 0.5 * b

    loop = ctl.Loop(ctl.TrainStep(model, "sgd", both), data, global_batch_size=4)
    first = model(np.eye(4, 3))
    want = np.mean(both(labels, first))
    assert loop.train(1)["loss"] == pytest.approx(float(want), rel=1e-6)
