"""Exports of models that do not declare their inputs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import CLASSES, FEATURES, make_loop, precision

from ctl.checkpoint.export import SAVED_MODEL, check_exportable, export_model
from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.step import TrainStep


@keras.saving.register_keras_serializable("tests")
class Tokens(keras.Model):
    """Declares no inputs: they are numbers of tokens."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = keras.layers.Embedding(1000, 4)
        self.logits = keras.layers.Dense(2, dtype="float32")

    def call(self, tokens):
        return self.logits(keras.ops.mean(self.embedding(tokens), axis=1))


def test_a_model_serves_what_it_was_trained_on(tmp_path):
    """Keras would take the dtype of the computation, in which 257 is 256."""
    tokens = np.random.default_rng(0).integers(0, 1000, [64, 3]).astype("int32")
    labels = (tokens[:, 0] % 2).astype("int64")

    def made():
        model = Tokens()
        model(tokens[:1])
        return model

    with precision("mixed_bfloat16"):
        loop = make_loop(model=made, data=InMemory((tokens, labels), global_batch_size=16))
        loop.train(2)
        model = loop.step.model
        export_model(model, tmp_path / "export", loop.step.input_specs)
        loaded = tf.saved_model.load(str(tmp_path / "export" / SAVED_MODEL))
        np.testing.assert_allclose(loaded.serve(tokens), model(tokens), rtol=1e-2, atol=1e-2)


def test_inputs_that_are_no_tensors_have_no_specs():
    class Pair(TrainStep):
        def preprocess(self, features):
            return features, None

    class First(keras.Model):
        def __init__(self):
            super().__init__()
            self.logits = keras.layers.Dense(CLASSES)

        def call(self, inputs):
            return self.logits(inputs[0])

    def made():
        model = First()
        model((np.zeros([1, FEATURES], "float32"), None))
        return model

    loop = make_loop(model=made, step_class=Pair)
    loop.train(1)
    assert loop.step.input_specs is None


def test_a_model_that_keras_cannot_describe_is_refused():
    class Opaque(keras.Model):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def call(self, features):
            return self.backbone(features)

    with pytest.raises(UsageError, match="^cannot export model opaque: .* add get_config"):
        check_exportable(Opaque(keras.layers.Dense(2)))


def test_files_go_with_the_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"trained")
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    written = export_model(model, tmp_path / "export", assets=[tmp_path / "tokenizer.model"])
    assert written[-1] == tmp_path / "export/assets/tokenizer.model"
    assert written[-1].read_bytes() == b"trained"
