"""What one worker saw of some steps, and its file: the only place that knows their form.

No TensorFlow here: files are joined where there need be none.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctl.checkpoint import durable
from ctl.errors import CheckpointError, UsageError

SCHEMA = 1  # Raised when a key changes its meaning or goes away, not when one is added.

_NAME = re.compile(r"input|forward|backward|apply|(ready|begun|ended|done)\d{1,6}")
_FILE = re.compile(r"worker-(\d{1,6})\.json")
_MOST = 10**7  # stamps in one file


@dataclasses.dataclass(frozen=True)
class Pack:
    """What one all-reduce moves: its name in the graph, and its bytes on each replica."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Window:
    """The stamps of some steps on the replicas of one worker, on that worker's own clock.

    Attributes:
        worker: index of this worker, of ``workers`` in all.
        steps: int64 [S], ascending; batches seen before each.
        names: the M marks, see `ctl.marks`; with a profile also ``begun{k}`` and
            ``ended{k}``, around the collective of pack k.
        stamps: float64 [R, S, M], seconds since the epoch; NaN where a mark was not stamped.
        packs: in the order in which they are reduced: pack k is between ``ready{k}`` and
            ``done{k}``.
        in_order: each pack waits for the one before it.
        barriers: float64 [K, 2], seconds: when this worker came to a barrier of all workers, and
            when it left it; the same K barriers on every worker, K = 0 for one worker.
        description: of the run, for people.
        plan: what the step moves, see `ctl.inspect.plan.plan`, as JSON; or None.
    """

    worker: int
    workers: int
    steps: np.ndarray
    names: tuple[str, ...]
    stamps: np.ndarray
    packs: tuple[Pack, ...]
    in_order: bool
    barriers: np.ndarray
    description: str = ""
    plan: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; NaN is null."""
        stamps = np.where(np.isnan(self.stamps), None, self.stamps)
        return {
            "schema": SCHEMA,
            "kind": "window",
            "worker": self.worker,
            "workers": self.workers,
            "steps": self.steps.tolist(),
            "names": list(self.names),
            "stamps": stamps.tolist(),
            "packs": [dataclasses.asdict(pack) for pack in self.packs],
            "in_order": self.in_order,
            "barriers": self.barriers.tolist(),
            "description": self.description,
            "plan": self.plan,
        }

    @classmethod
    def from_json(cls, value: Any) -> Window:
        """Raises ValueError, in one line, for whatever is not a window."""
        if not isinstance(value, dict) or value.get("kind") != "window":
            raise ValueError("it is not a window of ctl.inspect")
        if value.get("schema") != SCHEMA:
            raise ValueError(f"it has schema {value.get('schema')!r}; this ctl reads {SCHEMA}")
        workers = _integer(value, "workers", 1, 10**6)
        worker = _integer(value, "worker", 0, workers - 1)
        names = value.get("names")
        if not isinstance(names, list) or not all(
            isinstance(name, str) and _NAME.fullmatch(name) for name in names
        ):
            raise ValueError("its names are not those of marks")
        if len(set(names)) < len(names) or not {"input", "backward", "apply"} <= set(names):
            raise ValueError("its marks are not those of a step")
        steps = _array(value, "steps", 1)
        if (steps != np.round(steps)).any() or (np.diff(steps) <= 0).any():
            raise ValueError("its steps do not ascend")
        stamps = _array(value, "stamps", 3)
        if stamps.size and (stamps.shape[0] < 1 or stamps.shape[1:] != (len(steps), len(names))):
            raise ValueError(f"its stamps have shape {list(stamps.shape)}")
        barriers = _array(value, "barriers", 2)
        if barriers.size and (barriers.shape[1] != 2 or not np.isfinite(barriers).all()):
            raise ValueError("its barriers are not pairs of times")
        packs = value.get("packs")
        if not isinstance(packs, list) or not all(isinstance(pack, dict) for pack in packs):
            raise ValueError("it has no list of packs")
        if any({f"ready{k}", f"done{k}"} - set(names) for k in range(len(packs))):
            raise ValueError("it has packs without marks")
        plan = value.get("plan")
        if plan is not None and not isinstance(plan, dict):
            raise ValueError("its plan is not an object")
        return cls(
            worker=worker,
            workers=workers,
            steps=steps.astype(np.int64),
            names=tuple(names),
            stamps=stamps if stamps.size else np.zeros([1, len(steps), len(names)]),
            packs=tuple(
                Pack(str(pack.get("name"))[:200], _integer(pack, "bytes", 0, 2**60))
                for pack in packs
            ),
            in_order=value.get("in_order") is True,
            barriers=barriers.reshape(-1, 2),
            description=str(value.get("description") or "")[:1000],
            plan=plan,
        )


def path_of(directory: Path, worker: int) -> Path:
    """Where the window of a worker is, or would be; ``directory`` is ``model_dir/inspect``."""
    return directory / f"worker-{worker}.json"


def write(window: Window, directory: Path) -> Path:
    """Writes ``worker-I.json`` whole or not at all, and returns its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = path_of(directory, window.worker)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        durable.write_json(path, window.to_json(), via=directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return path


def read(path: Path) -> Window:
    """Raises `UsageError`, naming the file and what is wrong with it."""
    try:
        return Window.from_json(durable.read_json(path))
    except (durable.Damaged, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error


def read_all(directory: Path) -> list[Window]:
    """The windows of all workers in ``directory``, in their order.

    Raises:
        UsageError: there is none, one is damaged, or they are not of one run.
    """
    paths = sorted(directory.glob("worker-*.json")) if directory.is_dir() else []
    windows = [read(path) for path in paths if _FILE.fullmatch(path.name)]
    if not windows:
        raise UsageError(
            f"{directory} has no worker-*.json: run `python -m ctl.inspect run --model_dir=...` "
            "on every worker, and name the directory `inspect` in it"
        )
    check_together(windows)
    return sorted(windows, key=lambda window: window.worker)


def check_together(windows: Sequence[Window]) -> None:
    """Raises `UsageError` unless ``windows`` are those of all workers of one run."""
    workers = windows[0].workers
    have = sorted(window.worker for window in windows)
    if any(window.workers != workers for window in windows):
        raise UsageError("these windows are of runs with different numbers of workers")
    if have != list(range(workers)):
        missing = sorted(set(range(workers)) - set(have))
        raise UsageError(
            f"there are {workers} workers, but no window of {_list(missing)}"
            if missing
            else "a worker has more than one window"
        )
    facts = {
        "packs": {window.packs for window in windows},
        "marks": {window.names[: 4 + 2 * len(window.packs)] for window in windows},
        "cross-device operations": {window.in_order for window in windows},
    }
    for what, differs in facts.items():
        if len(differs) > 1:
            raise UsageError(f"these windows are of different runs: their {what} differ")
    if len({len(window.barriers) for window in windows}) > 1:
        raise UsageError("these windows are of different runs: their barriers differ")


def _list(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:8])) + (", ..." if len(workers) > 8 else "")
    return f"worker{'s' if len(workers) > 1 else ''} {shown}"


def _integer(value: Mapping[str, Any], key: str, least: int, most: int) -> int:
    number = value.get(key)
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"its {key} is {json.dumps(number)[:40]}")
    return number


def _array(value: Mapping[str, Any], key: str, rank: int) -> np.ndarray:
    """A float64 array of numbers and nulls (NaN), of this rank; an empty one has zeros for it."""
    try:
        array = np.array(value.get(key), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its {key} are not numbers") from None
    if array.size == 0:
        return np.zeros([0] * rank)
    if array.ndim != rank or array.size > _MOST or np.isinf(array).any():
        raise ValueError(f"its {key} are not numbers in {rank} dimensions")
    if rank == 1 and np.isnan(array).any():
        raise ValueError(f"its {key} have gaps")
    return array
