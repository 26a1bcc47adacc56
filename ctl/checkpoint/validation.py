"""Errors for checkpoints that cannot be written or restored: one line each, with the remedy."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from ctl.base.differences import differences
from ctl.checkpoint import bundle, manifest
from ctl.checkpoint.manifest import Saved
from ctl.errors import CheckpointError

# A quota and a limit on file sizes have the same remedy as a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_WHAT = {"step": "the variables of the step's own", "memory": "what evaluations have left"}
_RESIZED = (
    ", one value for each replica: resume on as many, or make the variable with on_resize='sum' or "
    "'zero'"
)


def failure(directory: Path, doing: str, error: Exception, needed: int = 0) -> CheckpointError:
    """Returns the error for an operation that failed in ``directory``.

    Args:
        directory: where the checkpoints are.
        doing: the operation, as it continues "Cannot".
        error: the exception of Python or TensorFlow.
        needed: bytes that the operation writes.
    """
    # TensorFlow keeps the text of an errno, not its number.
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0]
    if any(os.strerror(number) in reason for number in _FULL):
        needed = max(needed, 2**20)  # The manifest and the file system need a little too.
        free = shutil.disk_usage(directory).free
        missing = needed - free if needed > free else needed
        return CheckpointError(
            f"No space left to {doing} ({needed / 2**20:.1f} MiB): {directory}; "
            f"free {missing / 2**20:.1f} MiB or choose another --model_dir"
        )
    if os.strerror(errno.ENOENT) in reason and not directory.exists():
        reason = "the directory is gone"
    return CheckpointError(
        f"Cannot {doing}: {directory}: {reason}; make it writable or choose another --model_dir"
    )


def require_fingerprint(
    saved: Saved, fingerprint: Mapping[str, Any] | None, soft_keys: Collection[str]
) -> None:
    """Compares the fingerprint of ``saved``, and logs a warning where keys in ``soft_keys`` differ.

    Raises:
        CheckpointError: other keys differ, so ``saved`` is of another run.
    """
    if fingerprint is None or saved.fingerprint is None:
        return
    old, new, absent = saved.fingerprint, fingerprint, "(absent)"
    differing = {
        key: f"{key} was {old.get(key, absent)!r}, is {new.get(key, absent)!r}"
        for key in sorted({*old, *new})
        if old.get(key, absent) != new.get(key, absent)
    }
    soft = [text for key, text in differing.items() if key in soft_keys]
    hard = [text for key, text in differing.items() if key not in soft_keys]
    if hard:
        raise CheckpointError(
            f"{saved.path} is of another run: {'; '.join(hard)}; use the same flags or choose "
            "another --model_dir"
        )
    if soft:
        logging.warning("%s: %s", saved.path, "; ".join(soft))


def require_code(saved: Saved, code: Mapping[str, Any] | None, versions: Mapping[str, str]) -> None:
    """Compares the step, its sources, the settings of its layers, the modules that both runs have
    imported (see `CheckpointManager.code`), and ``versions`` of packages. Logs a warning where
    something else than the class differs: it may have been mended, or moved to another machine.

    Raises:
        CheckpointError: ``saved`` is of another class, unless that was only moved.
    """
    if code is None or saved.code is None:
        return
    old, new = saved.code["step"], code["step"]
    same_source = saved.code["source"] == code["source"]
    if old != new and not same_source:
        raise CheckpointError(
            f"{saved.path} was written by the step {old}, not by {new}: use that class, or choose "
            "another --model_dir"
        )
    now = {"modules": {}, "model": {}, **code}
    then = {**now, **saved.code}  # which lacks both in the first versions
    changed = [
        f"{name} was {json.dumps(was)}, is {json.dumps(is_)}"
        for name, (was, is_) in differences([then["model"], now["model"]]).items()
    ]
    if not same_source:
        changed.append(f"the source of the step {new}, of its layers or of its loss")
    changed += [
        f"the source of the module {name}"
        for name, source in now["modules"].items()
        if source != then["modules"].get(name, source)
    ]
    known = saved.fingerprint or {}  # what it has was compared with it
    changed += [
        f"the version of {package} was {saved.versions[package]}, is {version}"
        for package, version in versions.items()
        if package not in known and saved.versions.get(package, version) != version
    ]
    if changed:
        logging.warning(
            "%s was written by other code: %s; the run continues with the present code",
            saved.path,
            first_three(changed),
        )


def require_fit(saved: Saved, variables: Mapping[str, list[tf.Variable]]) -> None:
    """Compares ``variables`` with those of ``saved`` by their place in the list of each key, and
    logs a warning where only names differ.

    Raises:
        CheckpointError: their number, shapes or dtypes differ.
    """
    old = saved.variables
    differing, renamed = [], []
    for key, ours in bundle.specs(variables).items():
        theirs = old.get(key)
        if theirs is None:
            why = f", {_WHAT[key]}" if key in _WHAT else ""
            differing.append(f"it has no {key!r}{why}, only {', '.join(old) or 'nothing'}")
            continue
        if len(theirs) != len(ours):
            differing.append(f"it has {len(theirs)} variables in {key!r} instead of {len(ours)}")
        for i, (a, b) in enumerate(itertools.zip_longest(theirs, ours)):
            if a is None:
                differing.append(f"{key}[{i}] {_describe(b)} is missing")
            elif b is None:
                differing.append(f"{key}[{i}] {_describe(a)} is extra")
            elif a["dtype"] != b["dtype"] or not _fits(a["shape"], b["shape"]):
                text = f"{key}[{i}] is {_describe(a)} instead of {_describe(b)}"
                differing.append(text + (_RESIZED if key == "replicas" else ""))
            elif manifest.unnumbered(a["name"]) != manifest.unnumbered(b["name"]):
                renamed.append(f"{key}[{i}] is {a['name']} instead of {b['name']}")
    if differing:
        raise CheckpointError(
            f"{saved.path} does not fit: {first_three(differing)}; use the flags it was written "
            "with or choose another --model_dir"
        )
    if renamed:
        logging.warning("%s: %d other names, first %s", saved.path, len(renamed), renamed[0])


def first_three(texts: Sequence[str]) -> str:
    """The first three of ``texts``, and how many more there are."""
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        w in (None, s) for s, w in zip(shape, wanted, strict=True)
    )


def _describe(variable: Mapping[str, Any]) -> str:
    return f"{variable['name']} {variable['dtype']}{variable['shape']}"
