"""The only place that writes and reads ``config.json``: the flags that a run was started with.

Imports no TensorFlow. What is read is untrusted: only known flags are taken, through their own
parsers and validators.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from ctl.checkpoint import durable
from ctl.errors import CheckpointError, UsageError

SCHEMA = 1
FILE = "config.json"

# Flags that may change when a run is resumed: how it runs and what it shows, not what is computed.
# The length may, too, where the schedule does not depend on it.
_FREE = frozenset(
    (
        *("model_dir", "data_dir", "download", "resident_limit_mib", "epochs", "train_steps"),
        *("strategy", "replicas", "tpu", "cross_device_ops", "collective_timeout"),
        *("workers", "worker_index", "communication", "startup_timeout"),
        "worker_timeout",
        *("bytes_per_pack", "steps_per_loop", "evaluate_every", "checkpoint_every", "keep"),
        *("keep_best", "best_metric", "keep_every_hours", "async_checkpoints", "log_every"),
        *("tensorboard", "profile_steps", "inspect_every", "export", "on_nan"),
    )
)
_LENGTH = ("epochs", "train_steps")
_SCHEDULES_OF_A_LENGTH = ("cosine", "polynomial")


def write(
    model_dir: Path,
    names: list[str],
    values: flags.FlagValues = flags.FLAGS,
    chosen: Mapping[str, Any] | None = None,
) -> None:
    """Writes the flags ``names`` as they are, what was ``chosen`` where a flag said so, and the
    versions of what computes, and deletes what runs that were killed left unfinished in
    ``model_dir``. Only for the run that has the lock.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    versions = {"python": sys.version.split()[0]}
    for package in ("ctl", "tensorflow", "keras", "numpy", "tensorflow-datasets"):
        versions[package] = importlib.metadata.version(package)
    config = {
        "schema": SCHEMA,
        "command": sys.argv,
        "flags": {name: values[name].value for name in names},
        "chosen": dict(chosen or {}),
        "versions": versions,
    }
    try:
        durable.sweep(model_dir)
        durable.write_json(model_dir / FILE, config, via=model_dir)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {model_dir / FILE}: {error.strerror}; make room, or choose another "
            "--model_dir"
        ) from error


def read(model_dir: Path) -> dict[str, Any] | None:
    """The flags of the run in ``model_dir``; None where there is none.

    Raises:
        UsageError: the file is not what `write` wrote.
    """
    path = model_dir / FILE
    if not path.exists():
        return None
    try:
        config = durable.read_json(path)
        stored = config["flags"] if config["schema"] == SCHEMA else None
    except (durable.Damaged, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}; move it away to start anew") from error
    if not isinstance(stored, dict):
        raise UsageError(f"{path} was not written by this version of ctl")
    return stored


def chosen(model_dir: Path, name: str, kind: type) -> Any:
    """What the run in ``model_dir`` has chosen for the flag ``name``: it would not resume bit for
    bit with another choice, since XLA, and rings of three and more, add in another order. None
    where there is none of this ``kind``.
    """
    if read(model_dir) is None:
        return None
    of = durable.read_json(model_dir / FILE).get("chosen")
    value = of.get(name) if isinstance(of, dict) else None
    return value if type(value) is kind and value >= 0 else None


def check_resumable(stored: dict[str, Any], values: flags.FlagValues = flags.FLAGS) -> None:
    """Raises `UsageError` naming the flags that contradict those the run was started with."""
    free = _FREE
    if values.schedule in _SCHEDULES_OF_A_LENGTH:
        free = free - set(_LENGTH)
    differ = [
        f"--{name} was {_show(value)}, is {_show(values[name].value)}"
        for name, value in stored.items()
        if name in values and name not in free and value != values[name].value
    ]
    if differ:
        raise UsageError(
            f"{values.model_dir} holds a run with other flags: {'; '.join(differ)}; use the same "
            "flags or another --model_dir"
        )


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)[:80]


def adopt(
    stored: dict[str, Any], names: Iterable[str], values: flags.FlagValues = flags.FLAGS
) -> None:
    """Sets those of the flags ``names`` that the command line left at their default as in the run.

    Raises:
        UsageError: a stored value is not one that the flag takes.
    """
    for name in names:
        value = stored.get(name)
        if not values[name].present and isinstance(value, _JSON_SCALARS):
            try:
                values[name].parse(str(value))
            except flags.Error as error:
                raise UsageError(f"{FILE}: {error}") from error
    try:
        values.validate_all_flags()
    except flags.Error as error:
        raise UsageError(f"{FILE}: {error}") from error


_JSON_SCALARS = (str, int, float, bool)
