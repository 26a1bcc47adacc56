"""Writes and reads ``config.json``, the flags of a run.

Imports no TensorFlow. The file is not trusted: only known flags are adopted, through their own
parsers and validators.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags, logging

from ctl.base import durable
from ctl.base.best import known_mode, usual_mode
from ctl.base.names import TOKENIZERS, UNKNOWN, loss_of, suffix
from ctl.errors import CheckpointError, UsageError
from ctl.flags.defaults import early_stop_parts, spelled_out
from ctl.flags.durations import OF_A_LENGTH
from ctl.flags.parsing import imported_flags

SCHEMA = 1
FILE = "config.json"
FLAGFILE = "flags.txt"
_TOKENIZER = "tokenizer"  # and its end: a copy of `--tokenizer`

# Flags that may change when a run is resumed: they say how it runs and what it shows, not what it
# computes while the loss is finite. The length may change only if the schedule is not of a length.
_FREE = frozenset(
    (
        *("model_dir", "data_dir", "data_cache", "download", "resident_limit_mib"),
        *("epochs", "train_steps"),
        "tokenizer",  # its content counts, see `check_tokenizer`
        *("strategy", "replicas", "tpu", "cross_device_ops", "collective_timeout"),
        *("workers", "worker_index", "communication", "startup_timeout"),
        "worker_timeout",
        *("bytes_per_pack", "steps_per_loop", "evaluate_every", "checkpoint_every", "keep"),
        "keep_trying",
        *("keep_best", "best_metric", "best_mode", "restore_best_weights"),
        *("metrics", "keep_every_hours"),
        *("async_checkpoints", "log_every", "log_also", "also_evaluate"),
        *("tensorboard", "mlflow", "wandb", "profile_steps", "inspect_every", "export"),
        *("on_nan", "on_bad_record", "check_replicas_every", "xla_cache"),
    )
)
_LENGTH = ("epochs", "train_steps")

# Flags of one command, not of the run.
_OF_A_COMMAND = frozenset(("change", "extend", "dry_run", "precompile", "eager"))

# What runs did that are older than a flag.
BEFORE_FLAGS = {"weighting": "sum_of_weights"}

# Why `--change` cannot change a flag. It can change all others.
_ORDER = "where the run is in its data follows from it"
_STATE = "the checkpoints hold its variables"
_START = "only a run that begins uses it"
_FIXED = {
    **dict.fromkeys(("dataset", "train_split", "num_examples", "global_batch_size"), _ORDER),
    **dict.fromkeys(("seed", "shuffle_block", "image_shape", "features", "labels"), _ORDER),
    **dict.fromkeys(("oversample", "record_schema", "missing"), _ORDER),
    "augment": "the checkpoints name the data with it",
    **dict.fromkeys(("model", "num_classes", "step", "optimizer", "ema_decay", "freeze"), _STATE),
    **dict.fromkeys(("table_rows", "embedding_dim", "bottom_units", "top_units"), _STATE),
    "precision": "the checkpoints hold the loss scale of float16",
    **dict.fromkeys(("init_from", "reinit"), _START),
    "eval_split": "its evaluations would not compare",
    "plateau_metric": "the checkpoints hold the best value of the other metric",
}


def write(
    model_dir: Path,
    names: list[str],
    values: flags.FlagValues = flags.FLAGS,
    chosen: Mapping[str, Any] | None = None,
    code: Mapping[str, Any] | None = None,
    step: int | None = None,
    found: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> None:
    """Writes the flags ``names``, the values ``chosen`` for flags that leave a choice, the ``code``
    of the step (`ctl.control.source_hash.identity`), what was ``found`` in files of the user's, the
    hash of the tokenizer, and versions of packages. If the run resumes at ``step``, flags that have
    changed are added to its ``history``, and a number of ``workers`` that has changed to its
    ``workers``. Also writes the flags as a file for ``--flagfile``, and keeps a copy of the
    tokenizer. Deletes unfinished files of killed runs in ``model_dir``.

    Only for the run that holds the lock.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    versions = {"python": sys.version.split()[0]}
    for package in ("ctl", "tensorflow", "keras", "numpy", "tensorflow-datasets"):
        versions[package] = importlib.metadata.version(package)
    before = _read(model_dir)
    history = before.get("history")
    history = history if isinstance(history, list) else []  # a run of old may have none
    if step is not None and (changed := changes(before.get("flags", {}), values)):
        history.append({"step": step, "time": time.time(), "changed": changed})
    names = [name for name in names if name not in _OF_A_COMMAND]
    config = {
        "schema": SCHEMA,
        "command": sys.argv,
        "flags": {name: _stored(values[name]) for name in names},
        "history": history,
        "workers": _workers(before, step or 0, workers),
        "chosen": dict(chosen or {}),
        "data": dict(found or {}),
        # The checkpoints hold the settings of its layers.
        "code": {name: value for name, value in (code or {}).items() if name != "model"},
        "versions": versions,
    }
    tokenizer = values["tokenizer"].value if "tokenizer" in values else None
    try:
        durable.sweep(model_dir)
        if tokenizer:
            content = Path(tokenizer).read_bytes()
            kept = _TOKENIZER + suffix(tokenizer)
            config["tokenizer"] = {"file": kept, "sha256": hashlib.sha256(content).hexdigest()}
            durable.write_bytes(model_dir / kept, content, via=model_dir)
        durable.write_text(model_dir / FLAGFILE, _flagfile(names, values), via=model_dir)
        durable.write_json(model_dir / FILE, config, via=model_dir)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {model_dir / FILE}: {error.strerror}; make room, or choose another "
            "--model_dir"
        ) from error


def _workers(before: Mapping[str, Any], step: int, workers: int) -> list[dict[str, Any]]:
    """How many workers have trained from which steps on, up to now: ``before`` and ``workers``."""
    found = before.get("workers")  # a run of old has none
    found = found if isinstance(found, list) else []
    found = [entry for entry in found if isinstance(entry, dict) and "count" in entry]
    if found and found[-1]["count"] == workers:
        return found
    if found:
        logging.info(
            "from step %d on, the number of workers is %d (was %s)",
            *(step, workers, found[-1]["count"]),
        )
    return [*found, {"step": step, "time": time.time(), "count": workers}]


def workers_of(model_dir: Path) -> int:
    """How many workers have trained the run in ``model_dir``, when it was started last; 1 if it
    does not say so."""
    found = _read(model_dir).get("workers")
    last = found[-1] if isinstance(found, list) and found else None
    count = last.get("count") if isinstance(last, dict) else None
    return count if type(count) is int and count > 0 else 1


def _flagfile(names: Iterable[str], values: flags.FlagValues) -> str:
    """The flags that were given as lines of a flagfile, the others as comments: to give a default
    may mean another thing than to leave it out, see `ctl.flags.defaults`."""
    given: list[str] = []
    others: list[str] = []
    for name in names:
        lines = (values[name].serialize() or f"--{name}=").splitlines()
        (given if values[name].present else others).extend(lines)
    head = "# The same run: python -m ctl.train --flagfile=flags.txt"
    return "\n".join([head, *given, "", "# Defaults:", *(f"# {line}" for line in others), ""])


def read(model_dir: Path) -> dict[str, Any] | None:
    """The flags of the run in ``model_dir``; None if there is no run.

    Raises:
        UsageError: the file is damaged or of another version.
    """
    return _read(model_dir).get("flags")


def _read(model_dir: Path) -> dict[str, Any]:
    """All that the file holds; empty if there is no run. Raises as `read`."""
    path = model_dir / FILE
    if not path.exists():
        return {}
    try:
        config = durable.read_json(path)
        stored = config["flags"] if config["schema"] == SCHEMA else None
    except (durable.Damaged, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged: {error}; restore it from a backup or choose another --model_dir"
        ) from error
    if not isinstance(stored, dict):
        raise UsageError(f"{path} was not written by this version of ctl")
    return config


def chosen(model_dir: Path, name: str, kind: type[int] | type[str]) -> Any:
    """The value that the run in ``model_dir`` chose for the flag ``name``, if it is a ``kind``.

    With another value, the run would not continue as it began: XLA, and rings of three or more,
    would add in another order, and its best checkpoint would be selected on two splits.

    Returns:
        The value; None if there is no run, no choice, or a choice of another type.
    """
    of = _read(model_dir).get("chosen")
    value = of.get(name) if isinstance(of, dict) else None
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        return None
    return value


def found(model_dir: Path) -> dict[str, Any]:
    """What the run in ``model_dir`` found in files of the user's, see `ctl.data.Files.schema`. Not
    trusted. Empty if there is no run, or it has other data."""
    of = _read(model_dir).get("data")
    return of if isinstance(of, dict) else {}


def check_found(model_dir: Path, now: Mapping[str, Any]) -> None:
    """Raises `UsageError` if files of the user's, of which ``now`` says what they hold, have other
    columns, classes or sizes than those that the run in ``model_dir`` began with."""
    before = found(model_dir)
    names = "features", "labels", "classes", "words", "missing", "image_shape"
    for name in names if before else ():
        was, is_now = (shown(of.get(name) or []) for of in (before, now))
        if was != is_now:
            raise UsageError(
                f"{model_dir} holds a run with other data: the {name} were {was}, and "
                f"are {is_now}: use the same files, or another --model_dir"
            )


def kept_tokenizer(model_dir: Path) -> Path | None:
    """The copy that the run in ``model_dir`` has of its ``--tokenizer``; None if it has none."""
    of = _read(model_dir).get("tokenizer")
    name = of.get("file") if isinstance(of, dict) else None
    return model_dir / name if name in [_TOKENIZER + end for end in TOKENIZERS] else None


def check_tokenizer(model_dir: Path, values: flags.FlagValues = flags.FLAGS) -> None:
    """Raises `UsageError` if ``--tokenizer`` is not that of the run in ``model_dir``: other tokens
    mean nothing to its model."""
    kept = kept_tokenizer(model_dir)
    if not kept and not values.tokenizer:
        return
    if not kept:
        raise UsageError(f"{model_dir} holds a run without a tokenizer: leave out --tokenizer")
    before = str(_read(model_dir)["tokenizer"].get("sha256"))
    now = values.tokenizer and hashlib.sha256(Path(values.tokenizer).read_bytes()).hexdigest()
    if before != now:
        said = f"{values.tokenizer} has the SHA-256 {now[:12]}" if now else "none is given"
        raise UsageError(
            f"{model_dir} holds a run with a tokenizer of the SHA-256 {before[:12]}, and {said}: "
            f"give the copy that it keeps, --tokenizer={kept}"
        )


def changes(
    stored: Mapping[str, Any], values: flags.FlagValues = flags.FLAGS
) -> dict[str, tuple[Any, Any]]:
    """The flags that decide what a run computes and differ from the ``stored`` ones: their stored
    values and those of now, by name. A default is equal to the same value spelled out. One that is
    not given is equal to itself, even if another flag changes what it means."""
    found = _different(stored, values)
    return {name: was for name, was in found.items() if name not in _FREE - {*_LENGTH}}


def _different(stored: Mapping[str, Any], values: flags.FlagValues) -> dict[str, tuple[Any, Any]]:
    now = {name: _stored(values[name]) for name in stored if name in values}
    before, after = spelled_out(stored), spelled_out(now)
    # Before there was a rule, "off" was the default. What began so stays off: `jit.keep`.
    if before.get("jit_compile") == "off" and not values["jit_compile"].present:
        after["jit_compile"] = "off"
    return {
        name: (stored[name], value)
        for name, value in now.items()
        if before[name] != after[name] and stored[name] != value
    }


def check_resumable(stored: dict[str, Any], values: flags.FlagValues = flags.FLAGS) -> None:
    """Raises `UsageError` if flags that must not change differ from the ``stored`` ones.

    ``--change`` names flags that may; ``--extend`` allows a longer training under a schedule that
    depends on the length. When to evaluate may change, unless the training depends on it.
    """
    if "weighting" in values and "weighting" not in stored:  # it goes on as it began
        adopt(BEFORE_FLAGS, [*BEFORE_FLAGS], values)
    free = _FREE
    if values.schedule in OF_A_LENGTH:
        free = free - set(_LENGTH)
    if values.schedule == "plateau" or values.early_stop:
        free = free - {"evaluate_every"}
    named = {name.lstrip("-") for name in values.change}
    found = {n: was for n, was in _different(stored, values).items() if n not in free}
    fixed = dict(_FIXED)
    if not all(found.get("momentum", ())):  # without momentum, there are no variables of it
        fixed["momentum"] = _STATE
    takes = {loss_of(str(loss)) for loss in found.get("loss", ())} - {UNKNOWN}
    if len(takes) > 1:
        fixed["loss"] = "the labels become others with it"
    for name in sorted(named & found.keys() & fixed.keys()):
        raise UsageError(
            f"--change={name}: {fixed[name]}: start a new run in another --model_dir, with "
            f"--init_from={values.model_dir} to keep the weights"
        )
    remembers = {"schedule", "early_stop"}
    if named & remembers or not found.keys() & remembers:  # also another --best_mode
        _check_memory(stored, values)
    if values.extend and (shorter := _shortened(stored, values)):
        name, old, new = shorter
        raise UsageError(
            f"--extend cannot shorten a run, but --{name} was {old:g} and is {new:g}: for a "
            f"schedule that ends earlier, give --change={name} instead"
        )
    if values.extend:
        named |= {*_LENGTH}
    found = {name: was for name, was in found.items() if name not in named}
    if not found:
        return
    said = [f"--{n} was {shown(was)}, is {shown(now)}" for n, (was, now) in found.items()]
    if found.keys() <= {*_LENGTH}:
        shorter = _shortened(stored, values)
        allows = f"--change={shorter[0]}" if shorter else "--extend to train longer all the same"
        raise UsageError(
            f"{values.model_dir} holds a run of another length: {'; '.join(said)}: the "
            f"{values.schedule} schedule depends on the length, so its learning rates would "
            f"change from this step on: add {allows}, or use the same flags or another --model_dir"
        )
    remedy = "use the same flags or another --model_dir"
    before, after = _remembered(stored, values)
    if not found.keys() & fixed.keys() and after in ([], before):
        remedy += f", or add --change={','.join(found)} to change from the present step on"
        if not found.keys().isdisjoint(imported_flags()):
            remedy += ", if the data stay the same"
    raise UsageError(
        f"{values.model_dir} holds a run with other flags: {'; '.join(said)}; {remedy}"
    )


def _shortened(
    stored: Mapping[str, Any], values: flags.FlagValues
) -> tuple[str, float, float] | None:
    """The flag of the length, its value before and its value now, if that is in the same unit and
    shorter."""
    now = spelled_out({name: _stored(values[name]) for name in stored if name in values})
    before = spelled_out(stored)
    for name in _LENGTH:
        old, new = before.get(name), now.get(name)
        if isinstance(old, float | int) and isinstance(new, float | int) and new < old:
            return name, old, new
    return None


def _remembered(stored: Mapping[str, Any], values: flags.FlagValues) -> tuple[list[str], list[str]]:
    """What remembers evaluations, by metric: plateau and early stopping; before and now."""

    def remembered(schedule: Any, early_stop: Any, best_mode: Any) -> list[str]:
        metric, _, mode = early_stop_parts(str(early_stop))
        best = known_mode(metric) or mode or best_mode or usual_mode(metric)
        stops = [f"early_stop {metric} ({best})"] * bool(early_stop)
        return ["plateau"] * (schedule == "plateau") + stops

    before = remembered(*(stored.get(n) for n in ("schedule", "early_stop", "best_mode")))
    return before, remembered(values.schedule, values.early_stop, values.best_mode)


def _check_memory(stored: Mapping[str, Any], values: flags.FlagValues) -> None:
    """Raises `UsageError` if evaluations would be remembered that the checkpoints, which hold the
    memory, know nothing of."""
    before, after = _remembered(stored, values)
    if after not in ([], before):
        named = {name.lstrip("-") for name in values.change}
        name = "--change=early_stop" if "early_stop" in named else "--best_mode"
        if stored.get("schedule") != values.schedule:
            name = "--change=schedule"
        raise UsageError(
            f"{name}: the checkpoints hold the state of {' and '.join(before) or 'nothing'}, "
            f"not of {' and '.join(after)}: use the same --schedule=plateau "
            "and --early_stop=METRIC, or leave both out"
        )


def _stored(flag: flags.Flag) -> Any:
    """The value of ``flag`` as JSON gives it back; as text where JSON has no such value."""

    def as_text(value: Any) -> str:
        return value.name if isinstance(value, enum.Enum) else str(value)

    return json.loads(json.dumps(flag.value, default=as_text))


def shown(value: Any) -> str:
    """A value of a flag, for messages."""
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
                values[name].present = 0  # on the command line
                values[name].using_default_value = False  # which `set_default` would replace
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
        raise UsageError(f"{FILE}: --{flag.name} cannot be {shown(value)}: give that flag")
    texts = [str(part) for part in parts]
    return texts if isinstance(flag, flags.MultiFlag) else ",".join(texts)


_JSON_SCALARS = (str, int, float, bool)
