"""A window: the stamps of one worker in some steps, and their file.

Imports no TensorFlow, so that files can be joined without it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ctl.base import durable
from ctl.errors import UsageError

SCHEMA = 1  # Incremented when a key changes its meaning or is removed, not when one is added.

_NAME = re.compile(r"input|forward|backward|apply|(ready|begun|ended|done)\d{1,6}")
_FILE = re.compile(r"worker-(\d{1,6})\.json")
_MOST = 10**7  # stamps in one file


@dataclasses.dataclass(frozen=True)
class Pack:
    """One all-reduce: its name in the graph, and its bytes on each replica."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Window:
    """The stamps of some steps on the replicas of one worker, on that worker's own clock.

    Attributes:
        worker: the index of this worker.
        workers: the number of all workers.
        steps: int64 [S], ascending: batches seen before each step.
        names: the M marks, see `ctl.phases.marks`; with a profile also ``begun{k}`` and
            ``ended{k}``, around the collective of pack k.
        stamps: float64 [R, S, M], for R replicas, seconds since the epoch; NaN if a mark was not
            stamped.
        packs: in the order in which they are reduced: pack k is between ``ready{k}`` and
            ``done{k}``.
        in_order: whether each pack waits for the one before it.
        barriers: float64 [K, 2], seconds since the epoch: when this worker came to each barrier of
            all workers, and when it left. All workers have the same K barriers; one worker has 0.
        description: of the run, for people.
        plan: the plan of the step as JSON, see `ctl.phases.plan.plan`; or None.
        run: what the windows that all workers took together have in common, and no others; empty if
            unknown.
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
    run: str = ""

    @property
    def clock_age(self) -> float:
        """Seconds between the barriers and the stamp farthest from them; 0.0 without either."""
        known = self.stamps[np.isfinite(self.stamps)]
        if not known.size or not self.barriers.size:
            return 0.0
        return float(np.abs(known - np.median(self.barriers)).max())

    def to_json(self) -> dict[str, Any]:
        """The window as a JSON object; NaN becomes null."""
        null: Any = None
        stamps = np.where(np.isnan(self.stamps), null, self.stamps)
        return {
            "schema": SCHEMA,
            "kind": "window",
            **vars(self),
            "names": list(self.names),
            "steps": self.steps.tolist(),
            "stamps": stamps.tolist(),
            "packs": [dataclasses.asdict(pack) for pack in self.packs],
            "barriers": self.barriers.tolist(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Window:
        """The window that `to_json` wrote.

        Raises:
            ValueError: ``value`` is not a window; the message is one line.
        """
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
            raise ValueError("its names are not names of marks")
        if len(set(names)) < len(names) or not {"input", "backward", "apply"} <= set(names):
            raise ValueError("its marks repeat, or lack input, backward or apply")
        steps = _array(value, "steps", 1)
        if (steps != np.round(steps)).any() or (np.diff(steps) <= 0).any():
            raise ValueError("its steps are not in ascending order")
        stamps = _array(value, "stamps", 3)
        shape = (len(steps), len(names))
        if (stamps.size or len(steps)) and (stamps.shape[0] < 1 or stamps.shape[1:] != shape):
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
            stamps=stamps if stamps.size else np.zeros([1, *shape]),
            packs=tuple(
                Pack(str(pack.get("name"))[:200], _integer(pack, "bytes", 0, 2**60))
                for pack in packs
            ),
            in_order=value.get("in_order") is True,
            barriers=barriers.reshape(-1, 2),
            description=str(value.get("description") or "")[:1000],
            plan=plan,
            run=str(value.get("run") or "")[:100],
        )


def write(window: Window, directory: Path) -> Path:
    """Writes ``worker-I.json`` to ``model_dir/inspect`` atomically, and returns its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = directory / f"worker-{window.worker}.json"
    with durable.writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        durable.write_json(path, window.to_json(), via=directory)
    return path


def read_all(directory: Path) -> list[Window]:
    """Reads the windows of all workers in ``directory``, in order.

    Raises:
        UsageError: there is none, they are not of one run, or a file is damaged or not a window;
            the message names the file and the reason.
    """
    windows = []
    for path in sorted(directory.glob("worker-*.json")):
        try:
            if _FILE.fullmatch(path.name):
                windows.append(Window.from_json(durable.read_json(path)))
        except (durable.Damaged, ValueError) as error:
            raise UsageError(f"{path}: {error}") from error
    if not windows:
        raise UsageError(
            f"{directory} has no worker-*.json: run `python -m ctl.inspect run --model_dir=DIR` "
            "on every worker, then give DIR/inspect"
        )
    check_together(windows)
    return sorted(windows, key=lambda window: window.worker)


def check_together(windows: Sequence[Window]) -> None:
    """Checks that ``windows`` are those of all workers of one run.

    Raises:
        UsageError: a worker is missing or there twice, or the windows are of different runs.
    """
    workers = windows[0].workers
    have = sorted(window.worker for window in windows)
    if any(window.workers != workers for window in windows):
        raise UsageError(
            "these windows are from runs with different numbers of workers: delete the older files"
        )
    if have != list(range(workers)):
        missing = sorted(set(range(workers)) - set(have))
        raise UsageError(
            f"the run had {workers} workers, but there is no window of {_list(missing)}"
            if missing
            else "a worker has more than one window"
        )
    facts: dict[str, set[Any]] = {
        "identifiers": {window.run for window in windows},
        "packs": {window.packs for window in windows},
        "marks": {window.names[: 4 + 2 * len(window.packs)] for window in windows},
        "cross-device operations": {window.in_order for window in windows},
    }
    for what, differs in facts.items():
        if len(differs) > 1:
            raise UsageError(f"these windows are from different runs: their {what} differ")
    if len({len(window.barriers) for window in windows}) > 1:
        raise UsageError("these windows are from different runs: their barriers differ")


def _list(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:8])) + (", ..." if len(workers) > 8 else "")
    return f"worker{'s' if len(workers) > 1 else ''} {shown}"


def _integer(value: Mapping[str, Any], key: str, least: int, most: int) -> int:
    number = value.get(key)
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"its {key} is {json.dumps(number)[:40]}")
    return number


def _array(value: Mapping[str, Any], key: str, rank: int) -> np.ndarray:
    """A float64 array of this rank, null becomes NaN; an empty array has the shape [0] * rank."""
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
