"""Errors for checkpoints that cannot be written or restored: one line each, with the remedy."""

from __future__ import annotations

import errno
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
from ctl.errors import CheckpointError, UsageError

# A quota and a limit on file sizes have the same remedy as a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_SHOWN = 3  # differences in one message


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


def require_restored(directory: Path, unrestored: Saved | None) -> None:
    """Raises `UsageError` if a run would write among the checkpoints of another.

    Args:
        directory: of the checkpoints.
        unrestored: see `CheckpointManager`.
    """
    if unrestored:
        raise UsageError(
            f"{directory} has a run, up to step {unrestored.step}: continue it by restore(), or "
            "choose another directory"
        )


def check_options(
    directory: str | os.PathLike[str], keep: int, keep_best: int, keep_every_hours: float | None
) -> None:
    """Raises `UsageError` if an argument of `CheckpointManager` is out of range."""
    if "://" in os.fspath(directory):
        raise UsageError(
            f"Checkpoints need a POSIX file system, not {directory}; mount it or choose another "
            "--model_dir"
        )
    if keep < 1 or keep_best < 0 or (keep_every_hours is not None and keep_every_hours <= 0):
        raise UsageError(
            "A checkpoint manager needs keep >= 1, keep_best >= 0 and keep_every_hours > 0, "
            f"not {keep}, {keep_best} and {keep_every_hours}"
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
            _first(changed),
        )


def _first(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{'; '.join(texts[:_SHOWN])}{more}"


def require_fit(saved: Saved, variables: Mapping[str, list[tf.Variable]]) -> None:
    """Compares ``variables`` with those of ``saved``, and logs a warning where only names differ.

    Raises:
        CheckpointError: their number, shapes or dtypes differ.
    """
    differing, renamed = manifest.differences(saved.variables, bundle.specs(variables))
    if differing:
        raise CheckpointError(
            f"{saved.path} does not fit: {_first(differing)}; use the flags it was written with or "
            "choose another --model_dir"
        )
    if renamed:
        logging.warning("%s: %d other names, first %s", saved.path, len(renamed), renamed[0])
