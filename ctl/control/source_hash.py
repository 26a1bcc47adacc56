"""What decides what a step does: the name of its class, hashes of sources, settings of its layers.

Workers compare them before the first step, and a checkpoint records them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctl.base import __version__
from ctl.control.model_config import model_config
from ctl.distributed import replicas
from ctl.step import TrainStep

_PACKAGE = Path(__file__).parents[1]
_NOT_OF_THE_USER = ("ctl", "keras", "tensorflow")
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_OF_AUTOGRAPH = "__autograph_generated_file"  # what TensorFlow makes of the user's functions


def identity(step: TrainStep) -> dict[str, Any]:
    """What a checkpoint records of the code: ``step``, see `class_name`; ``source``, see `of_step`;
    ``modules``, see `of_modules`; ``model``, see `model_config`. ``step`` is built."""
    return {
        "step": class_name(step),
        "source": of_step(step),
        "modules": of_modules(),
        "model": model_config(step),
    }


def class_name(step: TrainStep) -> str:
    """The class of ``step`` as ``package.module:MyStep``, as ``--step`` names it. A script is
    named by its file, so that it may be imported later."""
    kind = type(step)
    if kind is TrainStep:
        return "ctl:TrainStep"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{_name(kind.__module__, file)}:{kind.__qualname__}"


def of_step(step: TrainStep) -> str:
    """Hash of the sources of the step's own classes, and of the layers and the loss that are
    neither ctl's nor Keras's. ``step`` is built."""
    loss_fn = getattr(step.loss_fn, "func", step.loss_fn)  # of a `functools.partial`
    loss: Any = loss_fn if hasattr(loss_fn, "__code__") else type(loss_fn)
    own = [kind for kind in type(step).__mro__ if kind not in TrainStep.__mro__]
    others = [*(type(layer) for layer in replicas.layers_of(step.tracked.layer)), loss]
    theirs = [c for c in others if str(c.__module__).partition(".")[0] not in _NOT_OF_THE_USER]
    return hash_of(_source(c) for c in dict.fromkeys([*own, *theirs]))


def of_modules() -> dict[str, str]:
    """Hashes of the sources of the user's modules that this process has imported, by their names.
    What is installed or typed in at a prompt is not among them."""
    others = tuple(f"{folder}{os.sep}" for folder in (Path(os.__file__).parent, _PACKAGE))
    found = {}
    for name, module in list(sys.modules.items()):
        # Not by an attribute: that would load a module that is to be loaded when it is used.
        file = vars(module).get("__file__") if type(module) is types.ModuleType else None
        if (
            isinstance(file, str)
            and not any(folder in file for folder in _INSTALLED)
            and not file.startswith(others)
            and file.endswith(".py")
            and name.partition(".")[0] not in _NOT_OF_THE_USER
            and not name.startswith(_OF_AUTOGRAPH)
            and (content := _of_file(file))
        ):
            found[_name(name, file)] = content
    return found


@functools.cache
def of_ctl() -> str:
    """The version of ctl, and a hash of its sources."""
    files = sorted(_PACKAGE.rglob("*.py"))
    names = [f.relative_to(_PACKAGE).as_posix().encode() for f in files]
    return f"{__version__} {hash_of([*names, *(f.read_bytes() for f in files)])}"


def hash_of(parts: Iterable[bytes]) -> str:
    """Twelve hexadecimal digits that differ if a part does."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def _name(module: str, file: str | None) -> str:
    """A module's name; that of a script is the name of its file."""
    return Path(file).stem if module in ("__main__", "__mp_main__") and file else module


@functools.cache  # what runs, not what the file has become meanwhile
def _of_file(path: str) -> str | None:
    try:
        return hash_of([Path(path).read_bytes()])
    except OSError:  # deleted, or the process has changed its directory
        return None


@functools.cache  # as `_of_file`
def _source(code: Any) -> bytes:
    try:
        return inspect.getsource(code).encode()
    except Exception:  # typed in at a prompt, or the file has changed and cannot be parsed
        return code.__qualname__.encode()
