"""Image classifiers, and a model of clicks, for the commands and the benchmarks.

An image classifier maps float32 images in [0, 1] of shape [batch, height, width, channels] to
float32 logits of shape [batch, classes], without softmax. The last layer computes in float32 under
any dtype policy, because a softmax over bfloat16 or float16 logits is too inexact. All layers are
built into Keras, so a saved ``.keras`` file loads without ctl.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import layers

from ctl.base.models import Models, as_model
from ctl.base.names import (
    CLICK_CATEGORIES,
    CLICK_NUMBERS,
    YOURS,
    check_model_name,
    is_function_name,
)
from ctl.errors import UsageError
from ctl.flags import defaults
from ctl.flags.imports import find


def convnet(image_shape: Sequence[int], num_classes: int) -> keras.Model:
    """One 3x3 convolution of 32 filters, max-pooling and 64 hidden units: 347,146 parameters for
    28x28x1 images and 10 classes.

    Raises:
        UsageError: the images are smaller than 4x4 pixels.
    """
    height, width, _ = image_shape
    if min(height, width) < 4:
        raise UsageError(
            f"the model convnet needs images of at least 4x4 pixels, these are {height}x{width}: "
            "choose dense"
        )
    inputs = keras.Input(image_shape, name="image")
    x = layers.Conv2D(32, 3, activation="relu")(inputs)
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, _logits(x, num_classes), name="convnet")


def dense(
    image_shape: Sequence[int],
    num_classes: int,
    mean: Sequence[float] = (),
    deviation: Sequence[float] = (),
) -> keras.Model:
    """One hidden layer of 128 units: 101,770 parameters for 28x28x1 images and 10 classes.

    Examples may have any shape. With ``mean`` and ``deviation``, those of each column of a table, a
    first layer standardizes the columns.
    """
    inputs = keras.Input(image_shape, name="image" if len(image_shape) == 3 else "features")
    x = layers.Flatten()(inputs)
    if mean:
        offset = [-m / d for m, d in zip(mean, deviation, strict=True)]
        scale = [1 / d for d in deviation]
        x = layers.Rescaling(scale, offset, dtype="float32", name="standardized")(x)
    x = layers.Dense(128, activation="relu")(x)
    return keras.Model(inputs, _logits(x, num_classes), name="dense")


def resnet20(image_shape: Sequence[int], num_classes: int) -> keras.Model:
    """ResNet-20 for small images: 269,722 trainable parameters for 32x32x3 images and 10 classes.

    He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2 with n = 3:
    post-activation blocks and shortcuts without parameters (option A). The model has no weight
    decay; the optimizer must apply the 1e-4 of the paper.
    """
    inputs = keras.Input(image_shape, name="image")
    x = _conv_norm(inputs, 16)
    x = layers.ReLU()(x)
    for filters in (16, 32, 64):
        for _ in range(3):
            x = _residual_block(x, filters)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, _logits(x, num_classes), name="resnet20")


def tiny_transformer(image_shape: Sequence[int], num_classes: int) -> keras.Model:
    """A small vision transformer: 406,410 parameters for 28x28x1 images and 10 classes.

    Two pre-LN blocks (Xiong et al. 2020) of width 128 with 4 heads over the patches of the image
    (Dosovitskiy et al. 2020), learned positions, dropout 0.1, mean over the patches. Patches are
    4x4 pixels, or larger so that there are at most 8x8 of them, because the cost of attention is
    quadratic in their number. Images are zero-padded at the bottom and right to whole patches.
    """
    width, heads, blocks = 128, 4, 2
    inputs = keras.Input(image_shape, name="image")
    x = _position_aware(_patches(inputs), width)
    x = layers.Dropout(0.1)(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        y = layers.Dense(width)(y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, _logits(x, num_classes), name="tiny_transformer")


def dlrm(
    table_rows: Sequence[int] = (defaults.TABLE_ROWS,),
    embedding_dim: int = defaults.EMBEDDING_DIM,
    bottom_units: Sequence[int] = defaults.BOTTOM_UNITS,
    top_units: Sequence[int] = defaults.TOP_UNITS,
) -> keras.Model:
    """DLRM for click data (`ctl.data.clicks`): from ``{"dense": float32 [n, 13], "ids": int64
    [n, 26]}`` to logits, float32 [n, 1].

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", 2019, arXiv:1906.00091. Numbers x become log(max(x, 0) + 1), and an MLP makes a vector
    of them. Each category has a table of vectors, in which its hash modulo the number of rows finds
    a row. The scalar products of all pairs of these 27 vectors, and the first vector itself, go
    through another MLP. Weights begin as in the authors' code: tables uniform within 1/sqrt(rows),
    kernels normal with the variance 2 / (inputs + outputs); but biases are 0.

    Args:
        table_rows: of each table, or of all.
        embedding_dim: length of the vectors.
        bottom_units: of the layers before the last of the first MLP.
        top_units: of the layers before the last of the second MLP.

    Raises:
        UsageError: there are neither 1 nor 26 ``table_rows``.
    """
    if len(table_rows) not in (1, CLICK_CATEGORIES):
        raise UsageError(
            f"table_rows has {len(table_rows)} numbers: give one for all tables, or one for each "
            f"of the {CLICK_CATEGORIES}"
        )
    dense = keras.Input([CLICK_NUMBERS], name="dense")
    ids = keras.Input([CLICK_CATEGORIES], dtype="int64", name="ids")
    rows = [*table_rows] * (CLICK_CATEGORIES // len(table_rows))

    def mlp(x: keras.KerasTensor, units: Sequence[int], name: str) -> keras.KerasTensor:
        for number, size in enumerate(units):
            x = layers.Dense(size, "relu", True, "glorot_normal", name=f"{name}_{number}")(x)
        return x

    x = keras.ops.log1p(keras.ops.maximum(dense, 0.0))
    x = mlp(x, [*bottom_units, embedding_dim], "bottom")
    vectors = [x]
    for number, (column, size) in enumerate(
        zip(keras.ops.unstack(ids, CLICK_CATEGORIES, axis=1), rows, strict=True), 1
    ):
        limit = size**-0.5
        start = keras.initializers.RandomUniform(-limit, limit)
        table = layers.Embedding(size, embedding_dim, start, name=f"table_{number}")
        vectors.append(table(keras.ops.mod(column, size)))
    together = keras.ops.stack(vectors, axis=1)
    products = layers.Dot(axes=2)([together, together])
    below = [i * len(vectors) + j for i in range(len(vectors)) for j in range(i)]
    pairs = keras.ops.take(layers.Flatten()(products), below, axis=1)
    y = mlp(layers.Concatenate()([x, pairs]), top_units, "top")
    inputs = {"dense": dense, "ids": ids}
    return keras.Model(inputs, _logits(y, 1), name="dlrm")


def make_model(
    name: str,
    image_shape: Sequence[int] | None,
    num_classes: int | None,
    mean: Sequence[float] = (),
    deviation: Sequence[float] = (),
    vocabulary_size: int | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> keras.Model:
    """Builds a model. Call it inside ``strategy.scope()``, because it creates variables.

    Args:
        name: one of `ctl.base.names.MODELS`, or a name of code (`ctl.base.names.code_name`). A
            function returns a `keras.Model`. It is called with ``(image_shape, num_classes)``, or
            without arguments if it has no parameters, or with ``vocabulary_size`` if that is its
            only one; then the model may be for data of any kind. So may a `keras.Model`, which is
            copied with its weights. A dict of models by name is what a step with several gets.
        image_shape: (height, width, channels), or the shape of other examples, such as (columns,);
            None if the data do not say it.
        num_classes: number of logits; None if the data do not say it.
        mean, deviation: of each column of a table, see `dense`.
        vocabulary_size: of text, whose tokens are below it; None for other data.
        sizes: arguments of `dlrm`, which needs nothing else.

    Raises:
        UsageError: the name is unknown, the function cannot be imported, the sizes are unknown or
            not positive, or the function does not return a Keras model; or, if it has parameters,
            not one from images to logits of shape [batch, num_classes]. A model cannot be copied,
            or computes in another precision than Keras's.
    """
    check_model_name(name)
    if is_function_name(name):
        if isinstance(model := find("model", name), keras.Model):
            return _with_outputs(name, _copied(name, model), vocabulary_size)
        parameters = inspect.signature(model).parameters
        if not parameters:
            return _with_outputs(name, _checked_type(name, as_model(model())), vocabulary_size)
        if [*parameters] == ["vocabulary_size"]:
            has_default = parameters["vocabulary_size"].default is not inspect.Parameter.empty
            if not vocabulary_size and not has_default:
                raise UsageError(
                    f"the data do not say the number of tokens, which the model {name} needs: give "
                    "the dataset a ctl.data.DatasetInfo with its vocabulary_size"
                )
            made = model(vocabulary_size) if vocabulary_size else model()
            return _with_outputs(name, _checked_type(name, as_model(made)), vocabulary_size)
    if name == "dlrm":
        return dlrm(**sizes or {})
    if image_shape is None or num_classes is None:
        raise UsageError(
            f"the data do not say the shape of their images and the number of classes, which the "
            f"model {name} needs: give --model={YOURS}, without parameters, or data with a "
            "ctl.data.DatasetInfo"
        )
    shape = tuple(int(size) for size in image_shape)
    if not shape or min(shape) < 1 or num_classes < 1:
        raise UsageError(
            f"a model needs examples of a shape, such as (height, width, channels), and at least "
            f"one class, got {shape} and {num_classes}"
        )
    if name == "dense":
        return dense(shape, num_classes, mean, deviation)
    if not is_function_name(name):
        if len(shape) != 3:
            raise UsageError(
                f"the model {name} takes images (height, width, channels), and these examples have "
                f"the shape {shape}: choose dense"
            )
        return globals()[name](shape, num_classes)  # a function above for each of `MODELS`
    model = as_model(find("model", name)(shape, num_classes))
    check_model(name, model, shape, num_classes)
    return model


def _copied(name: str, model: keras.Model) -> keras.Model:
    """A copy of ``model``, which was made before there was a strategy, with its weights."""
    made, wanted = model.dtype_policy.name, keras.config.dtype_policy().name
    if made != wanted:
        raise UsageError(
            f"the model {name!r} computes in {made}, not in {wanted}: give a function that makes it"
        )
    try:
        copy = keras.models.clone_model(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot copy the model {name!r}, whose config does not make it again: give its class, "
            "or a function that makes it"
        ) from error
    copy.set_weights(model.get_weights())
    return copy


def _with_outputs(name: str, model: keras.Model, vocabulary_size: Any) -> keras.Model:
    """``model``, unless it gives a number to fewer tokens than the text has."""
    shape: Any = getattr(model, "output_shape", None)
    is_of_tokens = vocabulary_size and isinstance(shape, tuple) and len(shape) == 3
    if is_of_tokens and (shape[2] or math.inf) < vocabulary_size:
        raise UsageError(
            f"the model {name!r} has {shape[2]} outputs for each token, and the text has "
            f"{vocabulary_size} tokens: make it by a function with the parameter vocabulary_size"
        )
    return model


def _logits(x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
    return layers.Dense(num_classes, dtype="float32", name="logits")(x)


def _conv_norm(x: keras.KerasTensor, filters: int, strides: int = 1) -> keras.KerasTensor:
    x = layers.Conv2D(filters, 3, strides, "same", use_bias=False, kernel_initializer="he_normal")(
        x
    )
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _residual_block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Two convolutions and a shortcut; the first block with more filters halves the image."""
    channels = x.shape[-1]
    strides = 1 if channels == filters else 2
    y = layers.ReLU()(_conv_norm(x, filters, strides))
    y = _conv_norm(y, filters)
    if channels != filters:
        # Option A: every second pixel, and zeros for the new channels.
        x = layers.MaxPooling2D(1, strides, padding="same")(x)
        x = keras.ops.pad(x, ((0, 0), (0, 0), (0, 0), (0, filters - channels)))
    return layers.ReLU()(layers.Add()([x, y]))


def _patches(images: keras.KerasTensor) -> keras.KerasTensor:
    """[batch, height, width, channels] to [batch, patches, values per patch]."""
    _, height, width, channels = images.shape
    size = max(4, -(-max(height, width) // 8))
    rows, columns = -(-height // size), -(-width // size)
    x = layers.ZeroPadding2D(((0, rows * size - height), (0, columns * size - width)))(images)
    x = layers.Reshape((rows, size, columns, size, channels))(x)
    x = layers.Permute((1, 3, 2, 4, 5))(x)
    return layers.Reshape((rows * columns, size * size * channels))(x)


def _position_aware(tokens: keras.KerasTensor, width: int) -> keras.KerasTensor:
    """Projects every token to ``width`` and adds a learned bias for its position."""
    return layers.EinsumDense(
        "bnp,pd->bnd",
        output_shape=(tokens.shape[1], width),
        bias_axes="nd",
        bias_initializer=keras.initializers.RandomNormal(stddev=0.02),
        name="patches_and_positions",
    )(tokens)


def check_model(name: str, model: object, shape: tuple[int, ...], num_classes: int) -> None:
    """Raises `UsageError` unless ``model`` maps images of ``shape`` to ``num_classes`` logits.

    Calls the model on a symbolic input, which builds it if necessary and computes nothing. Several
    models are the step's to call.
    """
    if isinstance(model, Models):
        return
    try:
        output = _checked_type(name, model)(keras.Input(shape, name="image"))
    except (TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if inputs := getattr(model, "inputs", None):
            reason = f"it takes {', '.join(str(tuple(one.shape[1:])) for one in inputs)}"
        raise UsageError(
            f"the model {name!r} does not take images of shape {shape}: {reason}"
        ) from error
    got = tuple(output.shape) if isinstance(output, keras.KerasTensor) else type(output).__name__
    if not isinstance(got, tuple) or got[1:] != (num_classes,):
        raise UsageError(
            f"the model {name!r} must return logits of shape (batch, {num_classes}), got {got}"
        )


def _checked_type(name: str, model: object) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"the model {name!r} must be a function that returns a keras.Model, "
            f"it returned {type(model).__name__}"
        )
    return model
