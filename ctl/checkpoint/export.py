"""Exports a trained model as ``model.keras`` and as a SavedModel; of several models, each in a
directory of its name.

Both take what `TrainStep.preprocess` returns: float32 images in [0, 1] of shape [batch, height,
width, channels], unless it is overridden. `ctl.phases.base_step.scale_images` converts uint8
images. Those of `ctl.jobs.models` return logits of shape [batch, classes].
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl.base import durable, stores
from ctl.base.models import Models, by_name
from ctl.errors import CheckpointError, UsageError

KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model"
DATA_FILE = "training_data.json"
ASSETS = "assets"


def check_exportable(model: keras.Model) -> None:
    """Raises `UsageError` if Keras cannot describe ``model`` in a file."""
    for name, one in by_name(model).items():
        try:
            keras.saving.serialize_keras_object(one)
        except Exception as error:  # it calls the user's get_config
            said = str(error).strip().partition("\n")[0][:200]
            raise UsageError(
                f"cannot export model {name or one.name}: {said}; add get_config() to it, or give "
                "--noexport"
            ) from error


def export_model(
    model: keras.Model | Models,
    directory: str | os.PathLike[str],
    input_specs: Any = None,
    found: Mapping[str, Any] | None = None,
    assets: Sequence[Path] = (),
) -> list[Path]:
    """Writes ``model`` with its current weights to ``directory``, replacing an earlier export.

    Args:
        model: built. Of several models (``step.model``), each gets a directory of its name.
        directory: to write.
        input_specs: `tf.TensorSpec` of each input, for a model that does not declare them. By
            default, Keras takes them from the shapes that it has met, and from the model's dtype.
        found: what files of the user's hold, see `ctl.data.Files.schema`: who calls the model needs
            the order of columns and classes.
        assets: files that who calls the model needs, too, such as a tokenizer: they are copied.

    Returns:
        The paths of each Keras file and SavedModel, of what was ``found``, if anything was, and of
        the copies of ``assets``.

    Raises:
        CheckpointError: the directory cannot be written. An earlier export is kept.
    """
    written = []
    directory = Path(directory)
    unfinished = durable.scratch(directory.parent, directory.name)
    try:
        for name, one in by_name(model).items():
            declared = getattr(one, "inputs", None) or input_specs is None
            signature = {} if declared else {"input_signature": [input_specs]}
            (unfinished / name).mkdir(parents=True, exist_ok=True)
            with _plain(one):
                one.save(unfinished / name / KERAS_FILE)
                one.export(str(unfinished / name / SAVED_MODEL), verbose=False, **signature)
            written += [Path(name, KERAS_FILE), Path(name, SAVED_MODEL)]
        if found:
            written.append(Path(DATA_FILE))
            durable.write_json(unfinished / DATA_FILE, found, via=unfinished)
        for asset in assets:
            (unfinished / ASSETS).mkdir(exist_ok=True)
            shutil.copyfile(asset, unfinished / ASSETS / asset.name)
            written.append(Path(ASSETS, asset.name))
        durable.flush(unfinished)
        durable.publish(unfinished, directory)
    except (OSError, tf.errors.OpError) as error:
        raise CheckpointError(
            f"cannot export to {directory}: {durable.reason_of(error)}; fix that and run the "
            "same command again"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return [directory / name for name in written]


@contextlib.contextmanager
def _plain(model: keras.Model) -> Iterator[None]:
    """While inside, embeddings that are trained by rows are as Keras made them, see
    `ctl.phases.sparse_rows`."""
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            if plain := getattr(vars(layer).get("call"), "plain", None):
                stack.enter_context(plain())
        yield


def found_beside(model: str | os.PathLike[str]) -> dict[str, Any]:
    """What the training data of an exported ``model`` hold, see `export_model`. Not trusted. Empty
    if that is not beside it.

    Raises:
        UsageError: the file is damaged.
    """
    if stores.is_url(model):
        parent, _, last = os.fspath(model).rstrip("/").rpartition("/")
        model = stores.local(parent) / last if last.endswith(".keras") else stores.local(model)
    path = Path(model) if exported_models(model) else Path(model).parent
    path /= DATA_FILE
    try:
        found = durable.read_json(path) if path.exists() else {}
    except durable.Damaged as error:
        raise UsageError(f"{path} is damaged: {error}: export the model again") from error
    return found if isinstance(found, dict) else {}


def exported_models(directory: str | os.PathLike[str]) -> list[Path]:
    """The Keras files of an export of several models, which are in directories of their names. None
    if ``directory`` is something else, such as a run with its export."""
    if Path(directory, "checkpoints").exists():
        return []
    return sorted(Path(directory).glob(f"*/{KERAS_FILE}"))


def load_model(
    path: str | os.PathLike[str] | None, flag: str, like: keras.Model | None = None
) -> keras.Model:
    """Loads a ``.keras`` file, uncompiled; or all models of an export of several, by name, from its
    directory. Messages name the ``flag`` that gives ``path``.

    Raises:
        UsageError: there is no such file, it holds no model, or one whose inputs and outputs have
            other shapes than those of ``like``.
    """
    if path is None:
        raise UsageError(f"--{flag} is missing: give the .keras file of a trained model")
    path = stores.local(path, whole=True)
    try:
        if files := exported_models(path):
            return Models({f.parent.name: keras.saving.load_model(f, compile=False) for f in files})
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:  # Keras raises many kinds for a file that is damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UsageError(
            f"--{flag}={path} is not a Keras model that can be loaded: {reason}"
        ) from error
    if like is not None:
        if not all(hasattr(one, "input_shape") for one in (model, like)):
            raise UsageError(f"--{flag}={path}: both models must be functional or sequential")
        (takes, gives), (wanted_in, wanted_out) = (
            (one.input_shape, one.output_shape) for one in (model, like)
        )
        if (takes, gives) != (wanted_in, wanted_out):
            raise UsageError(
                f"--{flag}={path} takes {takes} and returns {gives}, but the model {like.name} "
                f"takes {wanted_in} and returns {wanted_out}"
            )
    return model
