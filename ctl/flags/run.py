"""The flags of a run of `ctl.train`: its directory, its length, and what changes on a resume."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

from absl import flags

from ctl.base import names
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, define_path, group, grouped_flags

flags.disclaim_key_flags()  # They belong to the command that calls a group.


def define_run_flags(training: bool = True) -> None:
    """Defines the directory, the length and the seed of a run; with ``training``, how it goes on.
    A ``training`` needs the directory."""
    with group("Run"):
        define_path(
            "model_dir",
            None,
            "Directory of the run: checkpoints, logs, TensorBoard, exported model. The same "
            "command with the same directory resumes the run." + (" Required." if training else ""),
        )
        flags.DEFINE_float("epochs", None, "Passes over the training data (default: 12).")
        flags.DEFINE_integer(
            "train_steps",
            None,
            "Number of global batches to train on, instead of --epochs.",
            lower_bound=1,
        )
        flags.DEFINE_integer(
            "seed",
            0,
            "Seed of the initial weights, the order of the data and dropout.",
            lower_bound=0,
            upper_bound=2**32 - 1,
        )
        if training:
            _define_resume_flags()
    check_flags(["model_dir"], functools.partial(_check_model_dir, required=training))
    check_flags(["epochs", "train_steps"], _check_length)


def _define_resume_flags() -> None:
    flags.DEFINE_boolean(
        "extend",
        False,
        "Continue a run for more --epochs or --train_steps if its schedule depends on the length. "
        "From the current step on, the rates are those of the longer training.",
    )
    flags.DEFINE_list(
        "change",
        [],
        "Names of flags that may differ from the run when it resumes, e.g. "
        "learning_rate,clip_norm. They change from the current step on.",
    )
    flags.DEFINE_boolean(
        "dry_run",
        False,
        "Print what the run would do and exit: data, model, all-reduce, memory, and the time of "
        "an epoch, measured over ten steps. Writes no file and downloads nothing.",
    )
    flags.DEFINE_boolean(
        "precompile",
        False,
        "Compile with XLA, fill the cache, and exit. Writes no other file and downloads nothing.",
    )
    check_flags(["change"], _check_change)


def _check_change(change: list[str]) -> None:
    for name in change:
        names.check_name("flag in --change", name.lstrip("-"), grouped_flags())


def _check_model_dir(model_dir: str | None, *, required: bool) -> None:
    if not model_dir:
        if not required:
            return
        raise UsageError("--model_dir is required: the directory of the run, e.g. /tmp/ctl-run")
    if "://" in model_dir:
        raise UsageError(f"--model_dir={model_dir}: mount it, runs need a POSIX file system")
    path = Path(model_dir)
    try:
        if path.is_symlink() and not path.exists():
            raise UsageError(f"--model_dir={model_dir}: a link to a path that is missing")
        while not path.exists():
            path = path.parent
    except OSError as error:
        raise UsageError(f"--model_dir={model_dir}: {error.strerror}") from error
    if not path.is_dir():
        raise UsageError(f"--model_dir={model_dir}: {path} is a file, not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--model_dir={model_dir}: no permission to write in {path}")


def _check_length(epochs: float | None, train_steps: int | None) -> None:
    if epochs is not None and train_steps is not None:
        raise UsageError("--epochs and --train_steps say the same thing: give one of them")
    if epochs is not None and not (math.isfinite(epochs) and epochs > 0):
        raise UsageError(f"--epochs={epochs} must be a number above 0")
