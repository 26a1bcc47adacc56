"""The identity of a step: the name of its class, hashes of its sources, settings of its layers.

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
from ctl.control.model_config import global_settings, model_config
from ctl.distributed import replicas
from ctl.step import TrainStep

_PACKAGE = Path(__file__).parents[1]
_NOT_OF_THE_USER = ("ctl", "keras", "tensorflow")
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_OF_AUTOGRAPH = "__autograph_generated_file"  # modules that AutoGraph makes of the user's functions


def identity(step: TrainStep) -> dict[str, Any]:
    """Returns what a checkpoint records of the code of a built ``step``: ``step`` (`class_name`),
    ``source`` (`of_step`), ``modules`` (`of_modules`), ``model`` (`model_config`) and ``settings``
    (`global_settings`)."""
    return {
        "step": class_name(step),
        "source": of_step(step),
        "modules": of_modules(),
        "model": model_config(step),
        "settings": global_settings(),
    }


def class_name(step: TrainStep) -> str:
    """Returns the class of ``step`` as ``--step`` names it: ``package.module:MyStep``. A script is
    named by its file, so that it may be imported later."""
    kind = type(step)
    if kind is TrainStep:
        return "ctl:TrainStep"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{_name(kind.__module__, file)}:{kind.__qualname__}"


def of_step(step: TrainStep) -> str:
    """Returns a hash of the sources of a built ``step``: its classes below `TrainStep`, and its
    layers and loss, unless they are of ctl, Keras or TensorFlow."""
    loss_fn = getattr(step.loss_fn, "func", step.loss_fn)  # of a `functools.partial`
    loss: Any = loss_fn if hasattr(loss_fn, "__code__") else type(loss_fn)
    steps = [kind for kind in type(step).__mro__ if kind not in TrainStep.__mro__]
    parts = [*(type(layer) for layer in replicas.layers_of(step.tracked.layer)), loss]
    parts = [p for p in parts if str(p.__module__).partition(".")[0] not in _NOT_OF_THE_USER]
    return hash_of(_source(code) for code in dict.fromkeys([*steps, *parts]))


def of_modules() -> dict[str, str]:
    """Returns hashes of the sources of the user's modules that this process has imported, by name.
    Installed modules and code that was typed at a prompt are left out."""
    excluded = tuple(f"{folder}{os.sep}" for folder in (Path(os.__file__).parent, _PACKAGE))
    hashes = {}
    for name, module in list(sys.modules.items()):
        # With `vars`, because `getattr` would load a lazy module.
        file = vars(module).get("__file__") if type(module) is types.ModuleType else None
        if (
            isinstance(file, str)
            and not any(folder in file for folder in _INSTALLED)
            and not file.startswith(excluded)
            and file.endswith(".py")
            and name.partition(".")[0] not in _NOT_OF_THE_USER
            and not name.startswith(_OF_AUTOGRAPH)
            and (content := _of_file(file))
        ):
            hashes[_name(name, file)] = content
    return hashes


@functools.cache
def of_ctl() -> str:
    """Returns the version of ctl, and a hash of its sources."""
    files = sorted(_PACKAGE.rglob("*.py"))
    names = [f.relative_to(_PACKAGE).as_posix().encode() for f in files]
    return f"{__version__} {hash_of([*names, *(f.read_bytes() for f in files)])}"


def hash_of(parts: Iterable[bytes]) -> str:
    """Returns twelve hexadecimal digits that change with any part."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def _name(module: str, file: str | None) -> str:
    """Returns the name of a module; for a script, the name of its file."""
    return Path(file).stem if module in ("__main__", "__mp_main__") and file else module


@functools.cache  # hashes the code that runs, even if the file changes later
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
