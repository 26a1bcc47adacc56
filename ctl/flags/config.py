"""Writes and reads ``config.json``, the flags of a run.

Imports no TensorFlow. The file is not trusted: only known flags are adopted, through their own
parsers and validators.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from ctl.checkpoint import durable
from ctl.errors import CheckpointError, UsageError
from ctl.flags.defaults import spelled_out

SCHEMA = 1
FILE = "config.json"

# Flags that may change when a run is resumed: they say how it runs and what it shows, not what it
# computes. The length may change only if the schedule does not depend on it.
_FREE = frozenset(
    (
        *("model_dir", "data_dir", "download", "resident_limit_mib", "epochs", "train_steps"),
        *("strategy", "replicas", "tpu", "cross_device_ops", "collective_timeout"),
        *("workers", "worker_index", "communication", "startup_timeout"),
        "worker_timeout",
        *("bytes_per_pack", "steps_per_loop", "evaluate_every", "checkpoint_every", "keep"),
        *("keep_best", "best_metric", "best_mode", "metrics", "keep_every_hours"),
        *("async_checkpoints", "log_every"),
        *("tensorboard", "profile_steps", "inspect_every", "export", "on_nan", "on_bad_record"),
        "check_replicas_every",
    )
)
_LENGTH = ("epochs", "train_steps")
_SCHEDULES_OF_A_LENGTH = ("cosine", "polynomial")


def write(
    model_dir: Path,
    names: list[str],
    values: flags.FlagValues = flags.FLAGS,
    chosen: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
) -> None:
    """Writes the flags ``names``, the values ``chosen`` for flags that leave a choice, the ``code``
    of the step (`ctl.control.code.identity`), and versions of packages. Deletes unfinished files of
    killed runs in ``model_dir``.

    Only for the run that holds the lock.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    versions = {"python": sys.version.split()[0]}
    for package in ("ctl", "tensorflow", "keras", "numpy", "tensorflow-datasets"):
        versions[package] = importlib.metadata.version(package)
    config = {
        "schema": SCHEMA,
        "command": sys.argv,
        "flags": {name: _stored(values[name]) for name in names},
        "chosen": dict(chosen or {}),
        "code": dict(code or {}),
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
    """The flags of the run in ``model_dir``; None if there is no run.

    Raises:
        UsageError: the file is damaged or of another version.
    """
    path = model_dir / FILE
    if not path.exists():
        return None
    try:
        config = durable.read_json(path)
        stored = config["flags"] if config["schema"] == SCHEMA else None
    except (durable.Damaged, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged: {error}; restore a copy of it or choose another --model_dir"
        ) from error
    if not isinstance(stored, dict):
        raise UsageError(f"{path} was not written by this version of ctl")
    return stored


def chosen(model_dir: Path, name: str, kind: type[int] | type[str]) -> Any:
    """The value that the run in ``model_dir`` chose for the flag ``name``, if it is a ``kind``.

    With another value, the run would not continue as it began: XLA, and rings of three or more,
    would add in another order, and its best checkpoint would be selected on two splits.

    Returns:
        The value; None if there is no run, no choice, or a choice of another type.
    """
    if read(model_dir) is None:
        return None
    of = durable.read_json(model_dir / FILE).get("chosen")
    value = of.get(name) if isinstance(of, dict) else None
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        return None
    return value


def check_resumable(stored: dict[str, Any], values: flags.FlagValues = flags.FLAGS) -> None:
    """Raises `UsageError` if flags that must not change differ from the ``stored`` ones.

    A default is equal to the same value spelled out. When to evaluate may change, unless the
    training depends on it.
    """
    free = _FREE
    if values.schedule in _SCHEDULES_OF_A_LENGTH:
        free = free - set(_LENGTH)
    if values.schedule == "plateau" or values.early_stop:
        free = free - {"evaluate_every"}
    now = {name: _stored(values[name]) for name in stored if name in values}
    before, after = spelled_out(stored), spelled_out(now)
    differ = [
        f"--{name} was {_show(stored[name])}, is {_show(value)}"
        for name, value in now.items()
        if name not in free and before[name] != after[name]
    ]
    if differ:
        raise UsageError(
            f"{values.model_dir} holds a run with other flags: {'; '.join(differ)}; use the same "
            "flags or another --model_dir"
        )


def _stored(flag: flags.Flag) -> Any:
    """The value of ``flag`` as JSON gives it back; as text where JSON has no such value."""

    def as_text(value: Any) -> str:
        return value.name if isinstance(value, enum.Enum) else str(value)

    return json.loads(json.dumps(flag.value, default=as_text))


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)[:80]


def adopt(
    stored: dict[str, Any], names: Iterable[str], values: flags.FlagValues = flags.FLAGS
) -> None:
    """Sets the flags ``names`` to their ``stored`` values, except flags on the command line.

    Raises:
        UsageError: a flag does not accept its stored value.
    """
    for name in names:
        if stored.get(name) is not None and not values[name].present:
            try:
                values[name].parse(_as_given(values[name], stored[name]))
            except flags.Error as error:
                raise UsageError(f"{FILE}: {error}") from error
    try:
        values.validate_all_flags()
    except flags.Error as error:
        raise UsageError(f"{FILE}: {error}") from error


def _as_given(flag: flags.Flag, value: Any) -> str | list[str]:
    """A stored ``value`` as ``flag`` takes it; raises `UsageError` for one of another kind."""
    is_list = isinstance(flag, flags.MultiFlag) or isinstance(flag.parser, flags.ListParser)
    parts = value if isinstance(value, list) and is_list else [value]
    if not all(isinstance(part, _JSON_SCALARS) for part in parts):
        raise UsageError(f"{FILE}: --{flag.name} cannot be {_show(value)}: give that flag")
    texts = [str(part) for part in parts]
    return texts if isinstance(flag, flags.MultiFlag) else ",".join(texts)


_JSON_SCALARS = (str, int, float, bool)
