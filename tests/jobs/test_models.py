"""ctl.jobs.models: sizes, shapes, dtypes, training, saving, and the mistakes of a user's own
model."""

from __future__ import annotations

import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.base import names
from ctl.errors import UsageError
from ctl.jobs import models, named
from ctl.step import TrainStep


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


IMAGE_MODELS = [name for name in names.MODELS if name != "dlrm"]  # that is in test_dlrm.py


def images(shape, count=8):
    return np.random.default_rng(0).random((count, *shape), dtype=np.float32)


def trainable(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        # Conv 3*3*1*32+32, 13*13*32 values to 64, 64 to 10.
        ("convnet", (28, 28, 1), 320 + (5408 + 1) * 64 + 65 * 10),
        ("dense", (28, 28, 1), 785 * 128 + 129 * 10),
        # 19 convolutions without bias, a scale and an offset for each channel, one dense layer.
        (
            "resnet20",
            (32, 32, 3),
            9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
            + 2 * (7 * 16 + 6 * 32 + 6 * 64)
            + 65 * 10,
        ),
        # Projection, 49 positions, two blocks (attention, MLP, two norms), norm, logits.
        (
            "tiny_transformer",
            (28, 28, 1),
            16 * 128
            + 49 * 128
            + 2 * (4 * 129 * 128 + 129 * 512 + 513 * 128 + 4 * 128)
            + 2 * 128
            + 129 * 10,
        ),
    ],
)
def test_parameter_counts(name, shape, parameters):
    assert trainable(models.make_model(name, shape, 10)) == parameters


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3), (9, 6, 2)])
def test_logits_of_any_image(name, shape):
    model = models.make_model(name, shape, 7)
    logits = model(images(shape, 3))
    assert logits.shape == (3, 7)
    assert logits.dtype == tf.float32
    assert (logits.numpy() < 0).any(), "logits, not probabilities"


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("mixed", ["mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_under_a_mixed_policy(name, mixed, policy):
    policy(mixed)
    model = models.make_model(name, (16, 16, 1), 3)
    assert model.layers[1].compute_dtype == mixed.removeprefix("mixed_")
    assert model(images((16, 16, 1))).dtype == tf.float32
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_trains(name):
    keras.utils.set_random_seed(1)
    model = models.make_model(name, (8, 8, 1), 2)
    # The class is where the image is bright: for the transformer, a matter of positions.
    y = np.arange(16) % 2
    x = images((8, 8, 1), 16) / 2
    x[y == 0, :4] += 0.5
    x[y == 1, 4:] += 0.5
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients)
        return value, gradients

    losses = []
    for _ in range(40):
        value, gradients = step()
        losses.append(float(value))
    assert all(gradient is not None for gradient in gradients)
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_save_and_load(name, tmp_path):
    model = models.make_model(name, (9, 9, 3), 4)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.01)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x = images((9, 9, 3))
    np.testing.assert_array_equal(loaded(x).numpy(), model(x).numpy())


@pytest.mark.slow
def test_saved_models_load_without_ctl(tmp_path):
    for name in names.MODELS:  # dlrm takes no shape
        models.make_model(name, (9, 9, 3), 4).save(tmp_path / f"{name}.keras")
    code = (
        "import sys, pathlib, keras; sys.modules['ctl'] = None\n"
        "loaded = [keras.models.load_model(path) for path in pathlib.Path().glob('*.keras')]\n"
        f"assert sorted(model.name for model in loaded) == {sorted(names.MODELS)}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_positions_and_dropout_of_the_transformer():
    def logits(x, training=False):
        return model(x, training=training).numpy()

    model = models.tiny_transformer((8, 8, 1), 3)
    x = images((8, 8, 1), 1)
    swapped = np.concatenate([x[:, 4:], x[:, :4]], axis=1)  # The same patches elsewhere.
    assert np.abs(logits(x) - logits(swapped)).max() > 1e-4
    assert np.abs(logits(x, training=True) - logits(x, training=True)).max() > 1e-4
    np.testing.assert_array_equal(logits(x), logits(x))


def test_patches_hold_neighbouring_pixels():
    x = keras.Input((8, 8, 2))
    patches = keras.Model(x, models._patches(x))(images((8, 8, 2), 1)).numpy()
    expected = images((8, 8, 2), 1)[0, 4:, :4].reshape(-1)  # Second row, first column.
    np.testing.assert_array_equal(patches[0, 2], expected)
    big = models.tiny_transformer((224, 224, 3), 2)
    assert big.get_layer("patches_and_positions").output.shape[1] == 64


def test_built_in_a_strategy_scope(mirrored):
    with mirrored(2).scope():
        model = models.make_model("resnet20", (8, 8, 1), 3)
    assert len(model.trainable_variables[0].value.values) == 2


def test_image_too_small():
    with pytest.raises(UsageError, match="convnet needs images of at least 4x4 pixels.*3x5"):
        models.make_model("convnet", (3, 5, 1), 2)
    for name in ("dense", "resnet20", "tiny_transformer"):
        assert models.make_model(name, (1, 1, 1), 2).output_shape == (None, 2)


@pytest.mark.parametrize(("shape", "classes"), [((), 10), ((28, 0, 1), 10), ((8, 8, 1), 0)])
def test_impossible_data(shape, classes):
    with pytest.raises(UsageError, match="such as \\(height, width, channels\\), and at least one"):
        models.make_model("dense", shape, classes)


def test_examples_that_are_no_images():
    with pytest.raises(
        UsageError, match=r"convnet takes images .* have the shape \(28, 28\): choose d"
    ):
        models.make_model("convnet", (28, 28), 10)
    assert models.make_model("dense", (28, 28), 10).count_params() == 101_770


def test_columns_are_standardized():
    mean, deviation = (1e6, -2.0), (1e4, 0.5)
    model = models.make_model("dense", (2,), 3, mean, deviation)
    standardized = keras.Model(model.input, model.get_layer("standardized").output)
    rows = np.float32([[1e6, -2], [1.02e6, -1]])
    np.testing.assert_allclose(standardized(rows), [[0, 0], [2, 2]], atol=1e-4)


def test_every_name_has_a_model():
    made = [
        f
        for f in vars(models).values()
        if inspect.isfunction(f) and f.__module__ == models.__name__
    ]
    takes = ["image_shape", "num_classes"]
    named = [f.__name__ for f in made if [*inspect.signature(f).parameters][:2] == takes]
    assert sorted(named) == sorted(IMAGE_MODELS) and models.dlrm in made
    for name in (*names.MODELS, "a:b", "my.package.module:make_it", "../my models/a-b.py:make"):
        names.check_model_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "did you mean 'resnet20'"),
        (
            "transfromer",
            "the choices are convnet, dense, dlrm, resnet20, tiny_transformer, or package",
        ),
        ("mine.py", "--model=mine.py names no function of that file: give mine.py:FUNCTION"),
        ("a:b:c", "unknown model"),
        ("a.:b", "unknown model"),
        ("a:1b", "unknown model"),
        ("", "unknown model"),
    ],
)
def test_unknown_names(name, message):
    for make in (names.check_model_name, lambda name: models.make_model(name, (8, 8, 1), 2)):
        with pytest.raises(UsageError, match=message):
            make(name)


USER_MODULE = """
import keras

def good(image_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes)])

class Subclassed(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(classes)

    def call(self, x):
        return self.dense(self.flatten(x))

def subclassed(image_shape, num_classes):
    return Subclassed(num_classes)

def nothing(image_shape, num_classes):
    pass

def wrong_classes(image_shape, num_classes):
    return good(image_shape, num_classes + 1)

def unflattened(image_shape, num_classes):
    return keras.Sequential([keras.layers.Dense(num_classes)])

def two_outputs(image_shape, num_classes):
    x = keras.Input(image_shape)
    y = keras.layers.Dense(num_classes)(keras.layers.Flatten()(x))
    return keras.Model(x, [y, y])

def other_images(image_shape, num_classes):
    return keras.Sequential([keras.Input((5, 5, 1)), *good(image_shape, num_classes).layers])

def broken(image_shape, num_classes):
    return 1 / 0

def of_any_data():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])

def any_nothing():
    pass

made = of_any_data()
made.set_weights([weights + 1.0 for weights in made.get_weights()])
made.layers[0].trainable = False

def of_text(vocabulary_size):
    layers = [keras.layers.Embedding(vocabulary_size, 2), keras.layers.Dense(vocabulary_size)]
    return keras.Sequential([keras.Input([None], dtype="int32"), *layers])

def of_bytes(vocabulary_size=256):
    return of_text(256)

def of_nine_tokens():
    return of_text(9)

class Odd(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

odd = keras.Sequential([keras.Input([3]), Odd(abs)])
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_models", None)


@pytest.mark.parametrize("function", ["good", "subclassed"])
def test_users_own_model(user_module, function):
    model = models.make_model(f"users_models:{function}", (4, 4, 1), 3)
    assert trainable(model) == 17 * 3, "built"
    assert model(images((4, 4, 1))).shape == (8, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_models:missing", "users_models has no class or function 'missing'"),
        ("users_models:nothing", "returns a keras.Model, it returned NoneType"),
        ("users_models:wrong_classes", r"logits of shape \(batch, 3\), got \(None, 4\)"),
        ("users_models:unflattened", r"logits of shape \(batch, 3\), got \(None, 4, 4, 3\)"),
        ("users_models:two_outputs", r"logits of shape \(batch, 3\), got list"),
        ("users_models:other_images", r"does not take images of shape \(4, 4, 1\): it takes \("),
    ],
)
def test_users_mistakes_are_one_line(user_module, name, message):
    with pytest.raises(UsageError, match=message) as caught:
        models.make_model(name, (4, 4, 1), 3)
    assert "\n" not in str(caught.value)


def test_a_function_without_parameters_is_for_data_of_any_kind(user_module):
    model = models.make_model("users_models:of_any_data", None, None)
    assert model.output_shape == (None, 2)
    with pytest.raises(UsageError, match="returns a keras.Model, it returned NoneType"):
        models.make_model("users_models:any_nothing", None, None)
    for name in ("dense", "users_models:good"):
        with pytest.raises(UsageError, match=f"do not say .* which the model {name} needs"):
            models.make_model(name, (4, 4, 1), None)


def test_a_model_of_text_has_an_output_for_each_token(user_module):
    def made(name, size):
        return models.make_model(f"users_models:{name}", None, None, vocabulary_size=size)

    assert made("of_text", 31).output_shape == (None, None, 31)
    assert made("of_bytes", None).output_shape == (None, None, 256)
    assert made("of_nine_tokens", 5).output_shape == (None, None, 9)
    with pytest.raises(UsageError, match="has 9 outputs for each token, and the text has 31 tok"):
        made("of_nine_tokens", 31)
    with pytest.raises(UsageError, match="data do not say the number of tokens, which the model"):
        made("of_text", None)
    named.check_calls(TrainStep, "users_models:of_text", "cross_entropy", None)


def test_a_model_is_copied_into_the_scope_with_its_weights(user_module, mirrored):
    strategy = mirrored(2)
    with strategy.scope():
        copies = [models.make_model("users_models:made", None, None) for _ in range(2)]
    made = sys.modules["users_models"].made
    assert copies[0].variables[0] is not copies[1].variables[0]
    for copy in copies:
        assert all(map(np.array_equal, copy.get_weights(), made.get_weights()))
        assert not copy.trainable_variables
        assert strategy.extended.variable_created_in_scope(copy.variables[0].value)


def test_a_model_that_cannot_be_copied(user_module, policy):
    with pytest.raises(UsageError, match="copy the model 'users_models:odd', .*: give its class, "):
        models.make_model("users_models:odd", None, None)
    policy("mixed_bfloat16")
    with pytest.raises(UsageError, match="computes in float32, not in mixed_bfloat16"):
        models.make_model("users_models:made", None, None)


def test_an_error_inside_the_users_function_keeps_its_traceback(user_module):
    with pytest.raises(ZeroDivisionError):
        models.make_model("users_models:broken", (4, 4, 1), 3)
