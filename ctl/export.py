"""Exports a trained model as ``model.keras`` and as a SavedModel.

Both take float32 images in [0, 1] of shape [batch, height, width, channels] and return logits of
shape [batch, classes]. `ctl.step.scale_images` converts uint8 images.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import tensorflow as tf

from ctl.checkpoint import durable
from ctl.errors import CheckpointError

KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model"


def export_model(model: keras.Model, directory: Path) -> list[Path]:
    """Writes ``model`` with its current weights to ``directory``, replacing an earlier export.

    Returns:
        The paths of the Keras file and of the SavedModel.

    Raises:
        CheckpointError: the directory cannot be written. An earlier export is kept.
    """
    unfinished = durable.scratch(directory.parent, directory.name)
    try:
        unfinished.mkdir(parents=True)
        model.save(unfinished / KERAS_FILE)
        model.export(str(unfinished / SAVED_MODEL), verbose=False)
        durable.flush(unfinished)
        durable.publish(unfinished, directory)
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"cannot export to {directory}: {reason.partition(chr(10))[0][:200]}; free some space "
            "and run the same command again"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return [directory / KERAS_FILE, directory / SAVED_MODEL]
