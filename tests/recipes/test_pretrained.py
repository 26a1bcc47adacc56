"""A classifier of KerasHub, from a folder that it has written."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from ctl.errors import UsageError
from ctl.recipes import pretrained

SIZE = 16

flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(SIZE, SIZE, 3),
    )
    converter = keras_hub.layers.ResNetImageConverter(
        image_size=(SIZE, SIZE), scale=[0.01, 0.02, 0.03], offset=[0.1, 0.2, 0.3]
    )
    classifier = keras_hub.models.ResNetImageClassifier(
        backbone,
        num_classes=5,
        activation="softmax",
        preprocessor=keras_hub.models.ResNetImageClassifierPreprocessor(converter),
    )
    path = tmp_path_factory.mktemp("hub") / "preset"
    classifier.save_to_preset(str(path))
    return str(path), classifier


@pytest.mark.parametrize("shape", [(SIZE, SIZE, 3), (20, 30, 3), (20, 30, 1)])
def test_gives_what_the_preset_gives(preset, shape):
    path, classifier = preset
    images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype("uint8")
    with flagsaver.flagsaver(preset=path):
        model = pretrained.image_classifier(shape, 5)
    backbone = len(classifier.backbone.weights)
    for mine, theirs in zip(model.weights[:backbone], classifier.weights[:backbone], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    model.set_weights(classifier.get_weights())  # those of the last layer are new
    rgb = np.repeat(images, 3 // shape[-1], axis=-1).astype("float32")  # uint8: KerasHub rounds
    prepared = classifier.preprocessor(rgb)
    found = keras.ops.softmax(model(images / np.float32(255), training=False))
    np.testing.assert_allclose(found, classifier(prepared, training=False), atol=1e-5)


def test_has_as_many_classes_as_the_data(preset):
    with flagsaver.flagsaver(preset=preset[0]):
        assert pretrained.image_classifier((SIZE, SIZE, 3), 7).output_shape == (None, 7)


@pytest.mark.parametrize("value, said", [(None, "needs --preset"), ("./nowhere", "is no folder")])
def test_what_is_missing_is_said(value, said):
    with flagsaver.flagsaver(preset=value), pytest.raises(UsageError, match=said):
        pretrained.image_classifier((SIZE, SIZE, 3), 7)
