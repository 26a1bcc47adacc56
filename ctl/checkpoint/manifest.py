"""The layout of a directory of checkpoints, and retention. No TensorFlow here, so listing is fast.

    step-0000000200/manifest.json              description and checksums; written before the rename
    step-0000000200/variables.index, .data-…   a flat tf.train.Checkpoint
    latest.json                                names the last one committed; written last
    .lock                                      held by the writer

All of it is untrusted input: a name, a link or a manifest that a writer would not have made is not
taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from absl import logging

from ctl.base import durable
from ctl.base.interactive import another_directory
from ctl.errors import CheckpointError

_SCHEMA = 1
_NAME = re.compile(r"step-(\d{10,})")
_FILE = re.compile(r"variables\.(index|data-\d{5}-of-\d{5})")

T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """One checkpoint, as its manifest describes it."""

    step: int
    path: Path
    time: float
    """When its state was taken, in seconds since the epoch."""
    metrics: Mapping[str, float]
    evaluated: Sequence[str]
    """Names of the metrics that an evaluation of this state gave, see `annotate`."""
    fingerprint: Mapping[str, Any] | None = field(repr=False)
    variables: Mapping[str, Sequence[Mapping[str, Any]]] = field(repr=False)
    """``{key of the state: [{"name", "shape", "dtype"}, …]}`` in the order of the state."""
    files: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """``{name: {"size", "crc32"}}``"""
    versions: Mapping[str, str] = field(repr=False)
    code: Mapping[str, Any] | None = field(repr=False)
    """See `CheckpointManager.code`."""
    changed: Mapping[str, Any] | None = None
    """Python values that were changed while the step trained, see `TraceGuards.changed`; None in a
    checkpoint of an earlier version."""
    stopped: bool = False
    """Whether an action ended the training here, see `annotate`."""

    @property
    def prefix(self) -> str:
        """The argument for ``tf.train.load_checkpoint``."""
        return str(self.path / "variables")


def path_of(directory: Path, step: int) -> Path:
    """Returns the directory of the checkpoint of ``step``, whether it exists or not."""
    return directory / f"step-{step:010d}"


def paths(directory: Path) -> dict[int, Path]:
    """Returns the directories named like checkpoints by step, ascending. They may be damaged.

    Raises:
        CheckpointError: ``directory`` exists but cannot be listed.
    """
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(
            f"Cannot look for checkpoints in {directory}: {error.strerror}; make it readable or "
            f"choose {another_directory()}"
        ) from error
    steps = [
        int(match[1])
        for entry in entries
        if (match := _NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    ]
    return {step: path_of(directory, step) for step in sorted(steps)}


def load(path: Path) -> Saved:
    """Returns the checkpoint at ``path`` from its manifest; reads no other file.

    Raises:
        durable.Damaged: the manifest is unreadable or not valid.
    """
    content = durable.read_json(path / "manifest.json")

    def require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise durable.Damaged(f"manifest.json: {otherwise}")

    require(isinstance(content, dict), "not an object")
    require(content.get("schema") == _SCHEMA, f"schema {content.get('schema')!r} is not {_SCHEMA}")
    step, metrics, files = (content.get(key) for key in ("step", "metrics", "files"))
    require(type(step) is int and path.name == f"step-{step:010d}", f"it is of step {step!r}")
    require(durable.is_number(content.get("time")), "no time")
    require(isinstance(metrics, dict), "no metrics")
    known = (value for value in metrics.values() if value is not None)
    require(all(map(durable.is_number, known)), "a metric is no number")
    evaluated = content.get("evaluated", list(metrics))  # absent in the first version
    require(
        isinstance(evaluated, list) and all(type(n) is str and n in metrics for n in evaluated),
        "it names no metrics that were evaluated",
    )
    require(isinstance(files, dict) and "variables.index" in files, "no variables.index")
    for name, file in files.items():
        require(_FILE.fullmatch(name) is not None, f"not a file of a checkpoint: {name!r}")
        require(
            isinstance(file, dict)
            and type(file.get("size")) is int
            and any(isinstance(file.get(sum_), str) for sum_ in durable.SUMS),
            f"no size and checksum of {name}",
        )
    fingerprint, versions = content.get("fingerprint"), content.get("versions")
    require(fingerprint is None or isinstance(fingerprint, dict), "the fingerprint is no object")
    require(isinstance(versions, dict), "no versions")
    code = content.get("code")  # absent in the first version
    require(
        code is None
        or (isinstance(code, dict) and all(type(code.get(k)) is str for k in ("step", "source"))),
        "its code has no step and source",
    )
    modules, model = ((code or {}).get(key, {}) for key in ("modules", "model"))  # absent, too
    require(isinstance(modules, dict), "the modules of its code are no object")
    require(
        isinstance(model, dict) and all(isinstance(settings, dict) for settings in model.values()),
        "the model of its code has no settings",
    )
    stopped = content.get("stopped", False)  # absent in the first version
    require(type(stopped) is bool, "it does not say whether the training was ended there")
    changed = content.get("changed")  # absent in the first versions
    require(
        changed is None
        or (
            isinstance(changed, dict)
            and all(v is None or (isinstance(v, list) and len(v) == 2) for v in changed.values())
        ),
        "a value that was changed has no two values",
    )
    variables = content.get("variables")
    require(isinstance(variables, dict), "no variables")
    for group in variables.values():
        require(isinstance(group, list), "the variables of a key are no list")
        for spec in group:
            require(
                isinstance(spec, dict)
                and isinstance(spec.get("name"), str)
                and isinstance(spec.get("shape"), list)
                and isinstance(spec.get("dtype"), str),
                "a variable has no name, shape and dtype",
            )
    return Saved(
        step=step,
        path=path,
        time=content["time"],
        metrics={name: math.nan if v is None else v for name, v in metrics.items()},
        evaluated=evaluated,
        fingerprint=fingerprint,
        variables=variables,
        files=files,
        versions=versions,
        code=code,
        changed=changed,
        stopped=stopped,
    )


def verified(path: Path) -> Saved:
    """As `load`, and the files are as the manifest says; else raises `durable.Damaged`."""
    saved = load(path)
    durable.verify(path, saved.files)
    return saved


def dump(saved: Saved, directory: Path, *, via: Path) -> None:
    """Writes or replaces ``manifest.json`` in ``directory``, durably."""
    content = {
        "schema": _SCHEMA,
        "step": saved.step,
        "time": saved.time,
        # JSON has no NaN.
        "metrics": {k: v if math.isfinite(v) else None for k, v in saved.metrics.items()},
        "evaluated": list(saved.evaluated),
        "stopped": saved.stopped,
        "changed": saved.changed,
        "fingerprint": saved.fingerprint,
        "versions": saved.versions,
        "code": saved.code,
        "files": saved.files,
        "variables": saved.variables,
    }
    durable.write_json(directory / "manifest.json", content, via=via)


def load_all(directory: Path) -> list[Saved]:
    """Returns all checkpoints with a valid manifest, in ascending order of steps."""
    found = []
    for path in paths(directory).values():
        with contextlib.suppress(durable.Damaged):
            found.append(load(path))
    return found


def end_of_history(directory: Path) -> float:
    """Returns the last step in the history of the run: that of ``latest.json``. Later checkpoints
    are of a branch that the run left when it went back to an earlier step, or were not committed.
    Without a valid ``latest.json`` all are of its history: returns infinity."""
    with contextlib.suppress(durable.Damaged):
        pointer = durable.read_json(directory / "latest.json")
        step = pointer.get("step") if isinstance(pointer, dict) else None
        if type(step) is int and step >= 0:
            return step
    return math.inf


def newest_first(directory: Path) -> list[int]:
    """Returns the steps in the order in which every reader looks for the last checkpoint: those up
    to `end_of_history`, then those after it; each from its highest step down."""
    end = end_of_history(directory)
    return sorted(paths(directory), key=lambda step: (step <= end, step), reverse=True)


def best_first(directory: Path, metric: str, mode: str) -> list[Saved]:
    """Returns the checkpoints with a finite ``metric``: the history of the run, then what is later;
    each as `ranked`."""
    end = end_of_history(directory)
    return sorted(ranked(load_all(directory), metric, mode), key=lambda saved: saved.step > end)


def first_intact(
    directory: Path,
    steps: Callable[[], Iterable[int]],
    read: Callable[[Path], T],
    quiet: bool = False,
) -> T | None:
    """Returns what ``read`` returns for the first of the checkpoints of ``steps`` that is intact;
    None if there is none. Passes over a damaged one with a warning, which ``quiet`` leaves out.

    ``read`` raises `durable.Damaged`. ``steps`` is called again after that: a writer may be
    changing the directory.

    Raises:
        CheckpointError: all are damaged, and it is not ``quiet``; the first is named.
    """
    damaged: dict[int, durable.Damaged] = {}
    while (step := next((s for s in steps() if s not in damaged), None)) is not None:
        path = path_of(directory, step)
        try:
            return read(path)
        except durable.Damaged as damage:
            damaged[step] = damage
            if not quiet:
                logging.warning("Skipping the damaged checkpoint %s: %s", path, damage)
    if damaged and not quiet:
        first, reason = next(iter(damaged.items()))
        raise CheckpointError(
            f"No intact checkpoint in {directory} (step {first}: {reason}); restore it from a "
            f"backup or choose {another_directory()}"
        )
    return None


def commit(directory: Path, step: int) -> None:
    """Points ``latest.json`` to ``step``, durably."""
    pointer = {"schema": _SCHEMA, "step": step, "directory": path_of(directory, step).name}
    durable.write_json(directory / "latest.json", pointer, via=directory)


def ranked(saved: Sequence[Saved], metric: str, mode: str) -> list[Saved]:
    """Returns those with a finite ``metric``, best first; of equal ones, the earlier step first."""
    sign = -1 if mode == "max" else 1
    eligible = [s for s in saved if math.isfinite(s.metrics.get(metric, math.nan))]
    return sorted(eligible, key=lambda s: (sign * s.metrics[metric], s.step))


def retained(
    saved: Sequence[Saved],
    *,
    keep: int,
    keep_best: int,
    best_metric: str,
    best_mode: str,
    keep_every_hours: float | None,
) -> set[int]:
    """Returns the steps to keep of ``saved``, which is in ascending order of steps.

    These are the last ``keep``, the first ``keep_best`` of `ranked`, and one for every
    ``keep_every_hours``: the first, then each that was taken at least that much later than the one
    chosen before it.
    """
    chosen = {s.step for s in saved[-keep:]}
    chosen |= {s.step for s in ranked(saved, best_metric, best_mode)[:keep_best]}
    if keep_every_hours is not None:
        due = -math.inf
        for s in saved:
            if s.time >= due:
                chosen.add(s.step)
                due = s.time + 3600 * keep_every_hours
    return chosen


def unnumbered(name: str) -> str:
    """``name`` without the numbers of layers."""
    # Keras numbers the layers of a class in the order of their creation in a process.
    return re.sub(r"_\d+", "", name)
