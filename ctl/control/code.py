"""Which code decides what a step does: the name of its class, and hashes of sources.

Workers compare them before the first step, and a checkpoint records them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ctl
from ctl import replicas
from ctl.step import TrainStep

_NOT_OF_THE_USER = ("ctl", "keras", "tensorflow")


def identity(step: TrainStep) -> dict[str, str]:
    """What a checkpoint records of the code: ``step``, see `class_name`; ``source``, see
    `of_step`."""
    return {"step": class_name(step), "source": of_step(step)}


def class_name(step: TrainStep) -> str:
    """The class of ``step`` as ``package.module:MyStep``, as ``--step`` names it. A script is
    named by its file, so that it may be imported later."""
    kind = type(step)
    if kind is TrainStep:
        return "ctl:TrainStep"
    module = kind.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", None) or module).stem
    return f"{module}:{kind.__qualname__}"


def of_step(step: TrainStep) -> str:
    """Hash of the sources of the step's own classes, and of the layers and the loss that are
    neither ctl's nor Keras's. ``step`` is built."""
    loss_fn = getattr(step.loss_fn, "func", step.loss_fn)  # of a `functools.partial`
    loss: Any = loss_fn if hasattr(loss_fn, "__code__") else type(loss_fn)
    own = [kind for kind in type(step).__mro__ if kind not in TrainStep.__mro__]
    others = [*(type(layer) for layer in replicas.layers_of(step.parts.layer)), loss]
    theirs = [c for c in others if str(c.__module__).partition(".")[0] not in _NOT_OF_THE_USER]
    return hash_of(_source(c) for c in dict.fromkeys([*own, *theirs]))


@functools.cache
def of_ctl() -> str:
    """The version of ctl, and a hash of its sources."""
    package = Path(ctl.__file__).parent
    files = sorted(package.rglob("*.py"))
    names = [f.relative_to(package).as_posix().encode() for f in files]
    return f"{ctl.__version__} {hash_of([*names, *(f.read_bytes() for f in files)])}"


def hash_of(parts: Iterable[bytes]) -> str:
    """Twelve hexadecimal digits that differ if a part does."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


@functools.cache  # what runs, not what the file has become meanwhile
def _source(code: Any) -> bytes:
    try:
        return inspect.getsource(code).encode()
    except Exception:  # typed in at a prompt, or the file has changed and cannot be parsed
        return code.__qualname__.encode()
