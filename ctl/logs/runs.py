"""Reads what runs have logged: flags, records and results. Imports neither TensorFlow nor NumPy.

Files of a run are not trusted: what is not as a run writes it is left out, and said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.base import durable
from ctl.base.actions import CONTEXT
from ctl.base.best import Mode, known_mode, usual_mode
from ctl.base.curves import Curve
from ctl.errors import UsageError
from ctl.flags import config
from ctl.flags.defaults import early_stop_parts, spelled_out
from ctl.flags.durations import SCHEDULES

_LONGEST = 1 << 20  # bytes of a line

# Flags that say where and how a run was started, and nothing of what it computes.
NOT_COMPARED = frozenset(
    (
        *("model_dir", "data_dir", "data_cache", "download", "worker_index", "log_every"),
        *("tensorboard", "mlflow", "wandb", "export"),
    )
)


@dataclass(frozen=True)
class Best:
    """The best value of a result, with its step, and the last one. Both of the best are None if it
    is not known whether a high or a low one is better."""

    best: float | None
    step: int | None
    last: float


@dataclass(frozen=True)
class Run:
    """A run of `ctl.train`.

    Attributes:
        name: its directory as it was given.
        flags: by name, from ``config.json``.
        records: by phase (``train``, ``eval``, ``test``) and step, in ascending order of steps:
            scalars by name.
        until: the step at which it ends; None if it does not say.
        notes: lines about what was left out.
        workers: how many it had when it was started last.
    """

    name: str
    flags: Mapping[str, Any]
    records: Mapping[str, Mapping[int, Mapping[str, float]]]
    until: int | None
    notes: list[str] = field(default_factory=list)
    workers: int = 1

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((step for steps in self.records.values() for step in steps), default=0)

    @property
    def seconds(self) -> float:
        """Time of the training steps, without evaluations, checkpoints and pauses. It is the sum
        over records of their steps by the steps per second. A record without these, as that of the
        first steps, has those of the next."""
        total = 0.0
        before = waiting = 0
        for step, values in self.records.get("train", {}).items():
            waiting, before = waiting + step - before, step
            rate = values.get("steps_per_second", 0.0)
            if rate > 0:
                total, waiting = total + waiting / rate, 0
        return total

    @property
    def replicas(self) -> int:
        """``--replicas`` of the run, else one for each of its workers."""
        replicas, workers = self.flags.get("replicas"), self.flags.get("workers")
        if type(replicas) is int and replicas > 0:
            return replicas
        return max(self.workers, len(workers) if isinstance(workers, list) else 1)

    def flag(self, name: str) -> Any:
        """The value of a flag, or its default if it has an effect. Of several workers, ``replicas``
        need not be given."""
        value = self.flags.get(name)
        if value is None and name in self.flags and self._has_effect(name):
            value = spelled_out(self.flags)[name]
        return self.replicas if name == "replicas" and not value and self.replicas > 1 else value

    def _has_effect(self, name: str) -> bool:
        """Whether the default of a flag says what the run did: of splits, the data decide that."""
        used = SCHEDULES.get(str(self.flags.get("schedule")), ())
        of_another = name not in used and any(name in flags for flags in SCHEDULES.values())
        return not of_another and name not in ("train_split", "eval_split")

    def curve(self, phase: str, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` of the scalar ``name``, where it is finite."""
        steps = self.records.get(phase, {})
        return [(s, v[name]) for s, v in steps.items() if math.isfinite(v.get(name, math.nan))]

    def curves(self, name: str, number: int = 0) -> list[Curve]:
        """The scalar ``name`` of training and evaluations, for a chart; ``number``: of this run."""
        return [
            Curve(self.curve(phase, name), phase == "eval", number, self._gaps(phase, name))
            for phase in ("train", "eval")
        ]

    def _gaps(self, phase: str, name: str) -> list[int]:
        """The steps whose scalar ``name`` is not finite."""
        steps = self.records.get(phase, {})
        return [step for step, v in steps.items() if not math.isfinite(v.get(name, 0.0))]

    def results(self) -> dict[str, Best]:
        """The results of evaluations by ``phase name``, such as ``eval accuracy``."""
        found = {}
        for phase in ("eval", "test"):
            names = dict.fromkeys(n for v in self.records.get(phase, {}).values() for n in v)
            for name in names:
                if curve := self.curve(phase, name):
                    step: int | None = None
                    best: float | None = None
                    if mode := mode_of_result(name, self.flags):
                        sign = -1 if mode == "max" else 1
                        step, best = min(curve, key=lambda point: (sign * point[1], point[0]))
                    found[f"{phase} {name}"] = Best(best, step, curve[-1][1])
        return found


def best_so_far(path: Path) -> dict[str, float]:
    """The best of each result of the evaluations of the run in ``path``; empty if it is new."""
    try:
        results = read(path).results()
    except UsageError:
        return {}
    of_evaluations = {n: r.best for n, r in results.items() if n.startswith("eval ")}
    return {n.removeprefix("eval "): best for n, best in of_evaluations.items() if best is not None}


def mode_of_result(name: str, flags: Mapping[str, Any]) -> Mode | None:
    """Whether the highest or the lowest value of the result ``name`` is the best, as far as the
    ``flags`` of its run and its name say."""
    best, mode = str(flags.get("best_metric")), flags.get("best_mode")
    stops, _, own = early_stop_parts(str(flags.get("early_stop")))
    if name == stops and own:
        mode = own
    elif name != best and not (name == stops and known_mode(best)):
        mode = None  # --best_mode is of another
    mode = known_mode(name) or mode or usual_mode(name)
    return mode and ("max" if mode == "max" else "min")


def read(path: Path) -> Run:
    """Reads the run in ``path``.

    Raises:
        UsageError: it holds no run, or nothing was logged.
    """
    name, notes, workers = str(path), [], 1
    if not path.is_dir():
        raise UsageError(f"{name}: no such directory")
    try:
        flags = config.read(path)
        workers = config.workers_of(path)
    except UsageError as error:
        flags = {}
        notes.append(f"{error}: its flags are not compared")
    else:
        if flags is None:
            raise UsageError(f"{name} holds no run of ctl.train: no {config.FILE}")
    records: dict[str, dict[int, dict[str, float]]] = {}
    until, damaged = None, 0
    try:
        for record in _lines(path / "metrics.jsonl"):
            if record is None:
                damaged += 1
                continue
            phase, step = record["phase"], record["step"]
            scalars = {n: v for n, v in record.items() if n not in (*CONTEXT, "schema")}
            # A resumed run may write a step again: the later line counts.
            records.setdefault(phase, {})[step] = dict(_numbers(scalars))
            until = record["until"] if type(record.get("until")) is int else until
    except FileNotFoundError:
        raise UsageError(f"{name} has logged nothing yet: no metrics.jsonl") from None
    except OSError as error:
        raise UsageError(f"{name}: metrics.jsonl cannot be read: {error.strerror}") from error
    if damaged:
        lines = "line of metrics.jsonl is" if damaged == 1 else "lines of metrics.jsonl are"
        notes.append(f"{name}: {damaged} damaged {lines} left out")
    if not records:
        raise UsageError(f"{name} has logged nothing yet: metrics.jsonl has no record")
    ordered = {phase: dict(sorted(steps.items())) for phase, steps in records.items()}
    return Run(name, flags or {}, ordered, until, notes, workers)


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The records in ``path``, None for a line that is none. The last line may be incomplete, while
    a run writes it."""
    with durable.open_regular(path) as file:
        while line := file.readline(_LONGEST):
            if not line.endswith(b"\n"):
                if len(line) == _LONGEST:
                    yield None
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            good = (
                isinstance(record, dict)
                and isinstance(record.get("phase"), str)
                and type(record.get("step")) is int
                and 0 <= record["step"] < 2**53
            )
            yield record if good else None


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if value in ("NaN", "Infinity", "-Infinity"):  # as `to_json` writes them
            value = float(value)
        if durable.is_number(value):
            yield name, float(value)


def to_json(value: Any) -> str:
    """``value`` as JSON. Numbers that are not finite become the strings "NaN", "Infinity" and
    "-Infinity" (as in the JSON mapping of protobuf; ``float()`` reads them)."""
    return json.dumps(_valid(value), allow_nan=False)


def _valid(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _valid(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def differing_flags(runs: list[Run]) -> list[str]:
    """Names of the flags that are not the same in all ``runs``, in the order of the first."""
    names = dict.fromkeys(name for run in runs for name in run.flags)
    return [
        name
        for name in names
        if name not in NOT_COMPARED
        and len({json.dumps(run.flag(name)) for run in runs if run.flags}) > 1
    ]
