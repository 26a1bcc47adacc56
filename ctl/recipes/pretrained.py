"""Fine-tunes an image classifier of KerasHub, for instance on a folder of images per class::

    python -m ctl.train --model_dir=/tmp/flowers --dataset=./flowers --image_shape=224,224,3 \\
        --model=ctl.recipes.pretrained:image_classifier --preset=resnet_18_imagenet \\
        --learning_rate=1e-4

The model contains what the preset does to images, so it takes images in [0, 1] of any size. Its
layers are those of Keras and KerasHub. Needs ``pip install 'ctl[hub]'``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import keras
from absl import flags
from keras import layers

from ctl import UsageError

flags.DEFINE_string(
    "preset",
    None,
    "Pretrained image classifier: a name of KerasHub, such as resnet_18_imagenet, which is "
    "downloaded; hf://USER/MODEL; or a folder that save_to_preset has written.",
)


def image_classifier(image_shape: Sequence[int], num_classes: int) -> keras.Model:
    """The classifier of ``--preset``, from float images in [0, 1] to float32 logits. Its last layer
    is new. Gray images get three channels.

    Raises:
        UsageError: there is no ``--preset``, or no KerasHub; the preset cannot be read, or does not
            say how it prepares images.
    """
    preset = flags.FLAGS.preset
    if not preset:
        raise UsageError("ctl.recipes.pretrained needs --preset=NAME or --preset=FOLDER")
    if preset.startswith((".", "/", "~")) and not Path(preset).expanduser().is_dir():
        raise UsageError(
            f"--preset={preset} is no folder: give one that save_to_preset has written"
        )
    try:
        import keras_hub
    except ImportError as error:
        raise UsageError(f"--preset needs KerasHub ({error}): pip install 'ctl[hub]'") from error
    try:
        classifier = keras_hub.models.ImageClassifier.from_preset(
            os.path.expanduser(preset),
            num_classes=num_classes,
            activation="linear",
            dtype=keras.config.dtype_policy().name,
        )
    except Exception as error:  # of a file, of the network, or of KerasHub
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read --preset={preset}: {reason:.300}") from error
    converter = getattr(classifier.preprocessor, "image_converter", None)
    if converter is None:
        raise UsageError(f"--preset={preset} does not say how it prepares images: choose another")
    inputs = keras.Input(image_shape, name="image")
    x = inputs
    if image_shape[-1] == 1 and classifier.inputs[0].shape[-1] == 3:
        x = layers.Concatenate()([x, x, x])
    if converter.image_size:
        x = layers.Resizing.from_config(converter.resizing.get_config())(x)
    scale = [255.0 * each for each in _per_channel(converter.scale, 1.0)]
    x = layers.Rescaling(scale, _per_channel(converter.offset, 0.0), dtype="float32")(x)
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(classifier(x)))


def _per_channel(value: float | Sequence[float] | None, default: float) -> list[float]:
    value = default if value is None else value
    return [float(each) for each in (value if isinstance(value, Sequence) else [value])]
