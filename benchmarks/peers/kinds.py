"""Small models of many kinds with random examples, for `kinds_worker.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

_COUNT = 2048  # examples
_RANDOM = np.random.default_rng(0)


class Kind(NamedTuple):
    """A model with logits, its examples in arrays, and how many of them make a batch."""

    model: keras.Model
    features: Any
    labels: np.ndarray
    batch: int


def _tokens(length: int, vocabulary: int) -> np.ndarray:
    return _RANDOM.integers(0, vocabulary, (_COUNT, length)).astype("int32")


def _inputs(features: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        name: keras.Input(array.shape[1:], dtype=str(array.dtype), name=name)
        for name, array in features.items()
    }


def _kind(features: Any, model: keras.Model, batch: int, classes: int = 2) -> Kind:
    count = len(keras.tree.flatten(features)[0])
    return Kind(model, features, _RANDOM.integers(0, classes, count).astype("int32"), batch)


def _mlp(*hidden: keras.Layer) -> Kind:
    features = _RANDOM.normal(size=(_COUNT, 784)).astype("float32")
    return _kind(features, keras.Sequential([*hidden, layers.Dense(2)]), 64)


def _recommender() -> Kind:
    embedded = [layers.Embedding(1000, 32), layers.Flatten()]
    dense = [layers.Dense(64, "relu"), layers.Dense(32, "relu"), layers.Dense(2)]
    return _kind(_tokens(2, 1000), keras.Sequential([*embedded, *dense]), 256)


class _GraphConvolution(layers.Layer):
    """A layer of the user's, as graph networks have."""

    def __init__(self, units: int):
        super().__init__()
        self.dense = layers.Dense(units)

    def build(self, shapes: Any) -> None:
        self.dense.build(shapes[0])

    def compute_output_shape(self, shapes: Any) -> Any:
        return (*shapes[0][:-1], self.dense.units)

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        return keras.ops.relu(keras.ops.matmul(edges, self.dense(nodes)))


def _gnn() -> Kind:
    nodes = _RANDOM.normal(size=(_COUNT, 32, 16)).astype("float32")
    edges = (_RANDOM.random((_COUNT, 32, 32)) < 0.1).astype("float32")
    features = {"nodes": nodes, "edges": edges}
    inputs = _inputs(features)
    hidden = inputs["nodes"]
    for _ in range(3):
        hidden = _GraphConvolution(32)([hidden, inputs["edges"]])
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden))
    return _kind(features, keras.Model(inputs, outputs), 32)


def _attended(hidden: Any) -> Any:
    """A block of a transformer, with 4 heads."""
    width = hidden.shape[-1]
    normalized = layers.LayerNormalization()(hidden)
    hidden += layers.MultiHeadAttention(4, width // 4)(normalized, normalized)
    normalized = layers.LayerNormalization()(hidden)
    return hidden + layers.Dense(width)(layers.Dense(2 * width, "gelu")(normalized))


def _tab_transformer() -> Kind:
    numbers = _RANDOM.normal(size=(_COUNT, 6)).astype("float32")
    features = {"words": _tokens(8, 400), "numbers": numbers}
    inputs = _inputs(features)
    hidden = _attended(_attended(layers.Embedding(400, 32)(inputs["words"])))
    hidden = layers.Concatenate()([layers.Flatten()(hidden), inputs["numbers"]])
    outputs = layers.Dense(2)(layers.Dense(64, "relu")(hidden))
    return _kind(features, keras.Model(inputs, outputs), 64)


def _transformer() -> Kind:
    features = _tokens(64, 1000)
    inputs = keras.Input((64,), dtype="int32")
    hidden = _attended(_attended(layers.Embedding(1000, 64)(inputs)))
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden))
    return _kind(features, keras.Model(inputs, outputs), 32)


def _of_text(*hidden: keras.Layer) -> Kind:
    model = keras.Sequential([layers.Embedding(5000, 32), *hidden, layers.Dense(2)])
    return _kind(_tokens(64, 5000), model, 32)


def _text_cnn() -> Kind:
    return _of_text(layers.Conv1D(64, 5, activation="relu"), layers.GlobalMaxPooling1D())


def _mobilenet_v3() -> Kind:
    features = _RANDOM.random((512, 32, 32, 3)).astype("float32")
    model = keras.applications.MobileNetV3Small(
        input_shape=(32, 32, 3),
        weights=None,
        classes=10,
        classifier_activation=None,
        include_preprocessing=False,
    )
    return _kind(features, model, 32, classes=10)


KINDS: dict[str, Callable[[], Kind]] = {
    "mlp": lambda: _mlp(layers.Dense(128, "gelu"), layers.LayerNormalization()),
    "mlp_dropout": lambda: _mlp(layers.Dense(128, "relu"), layers.Dropout(0.2)),
    "recommender": _recommender,
    "gnn": _gnn,
    "tab_transformer": _tab_transformer,
    "transformer": _transformer,
    "lstm": lambda: _of_text(layers.LSTM(64)),
    "bilstm": lambda: _of_text(layers.Bidirectional(layers.LSTM(32))),
    "gru": lambda: _of_text(layers.GRU(32)),
    "text_cnn": _text_cnn,
    "mobilenet_v3": _mobilenet_v3,
}


def make(name: str) -> Kind:
    """A built model of this kind, whose weights are those of seed 1."""
    keras.utils.set_random_seed(1)
    kind = KINDS[name]()
    kind.model(keras.tree.map_structure(lambda array: array[:1], kind.features))
    return kind
