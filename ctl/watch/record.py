"""The flight record: the only place that knows what a worker writes down when a step is stuck.

``model_dir/inspect/flight-worker-I.json`` says where worker I was and where it last saw the others;
`ctl.watch.hang` merges the files of all workers. No TensorFlow here: a record is also written
when TensorFlow is what hangs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.cluster.members import Cluster
from ctl.watch.beats import Beat, interval
from ctl.watch.section import Section

SCHEMA = 1

# The records of one hang are written within seconds of each other. What is older by more than this,
# and by more than twice the longest wait, is of an attempt before.
SAME_HANG_SECONDS = 120.0

_MOST_FRAMES = 60
_LARGEST_FILE = 4 << 20


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another worker, as the one that writes last heard of it.

    Attributes:
        step, doing, phase, waits, since, gave_up: of its last beat, see `ctl.watch.beats.Beat`.
        silent: seconds since that beat came.
    """

    step: int
    doing: str
    phase: str
    waits: bool
    since: float
    gave_up: bool
    silent: float


@dataclasses.dataclass(frozen=True)
class Record:
    """What one worker knows.

    Attributes:
        worker, workers: which of how many.
        time: seconds since the epoch.
        why: "timed out", "broke off" or "worker I gave up".
        step: global step finished; None before there is one.
        doing: the section of the code, see `ctl.watch.watchdog.Section`.
        phase: of the step, see `phase_of`.
        waits: whether it can wait for others there.
        since: seconds without progress.
        silent_after: seconds without a beat after which a peer is frozen or dead.
        fired: for each mark of the running step that has fired, seconds since then.
        not_fired: the marks that have not, in the order of the step.
        peers: the others that were heard.
        gone: workers that do not listen any more, and the reason.
        packs: bytes of each pack of gradients, where known.
        stacks: of every Python thread by name, ``file:line function``, the innermost last.
        versions: of packages.
    """

    worker: int
    workers: int
    time: float
    why: str
    step: int | None
    doing: str
    phase: str
    waits: bool
    since: float
    silent_after: float
    fired: Mapping[str, float]
    not_fired: tuple[str, ...]
    peers: Mapping[int, Peer]
    gone: Mapping[int, str]
    packs: tuple[int, ...]
    stacks: Mapping[str, tuple[str, ...]]
    versions: Mapping[str, str]


def make(
    cluster: Cluster,
    why: str,
    section: Section,
    peers: Mapping[int, Beat],
    gone: Mapping[int, str],
) -> Record:
    """The record of this process, now."""
    now = time.monotonic()
    return Record(
        worker=cluster.index,
        workers=len(cluster.workers),
        time=time.time(),
        why=why,
        step=section.step,
        doing=section.doing,
        phase=section.phase,
        waits=section.limit is not None,
        since=section.stalled,
        silent_after=4 * interval(len(cluster.workers)),
        fired=section.fired,
        not_fired=section.not_fired,
        peers={
            index: Peer(
                **{f.name: getattr(beat, f.name) for f in dataclasses.fields(Peer)[:-1]},
                silent=now - beat.at,
            )
            for index, beat in sorted(peers.items())
        },
        gone=gone,
        packs=section.packs,
        stacks=_stacks(),
        versions=_versions(),
    )


def phase_of(fired: Collection[str], not_fired: Sequence[str]) -> str:
    """What a step waits for, by its marks: ``input``, ``forward``, ``backward``, ``apply``, or the
    name of a pack that is being reduced; "" when all have fired.

    What the replica does on its own comes first: while it is not through with the backward pass it
    keeps others waiting, whatever packs it has sent already.
    """
    local = [name for name in ("input", "forward", "backward") if name in (*fired, *not_fired)]
    last = max((i for i, name in enumerate(local) if name in fired), default=-1)
    if last + 1 < len(local):  # one that is skipped is not stamped at all: forward under XLA
        return local[last + 1]
    for name in not_fired:
        if name.startswith("done"):
            pack = name.removeprefix("done")
            return f"pack{pack}" if f"ready{pack}" in fired else "backward"
    return "apply" if "apply" in not_fired else ""


def _stacks() -> dict[str, tuple[str, ...]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): tuple(
            f"{entry.filename}:{entry.lineno} {entry.name}"
            for entry in traceback.extract_stack(frame)[-_MOST_FRAMES:]
        )
        for ident, frame in sys._current_frames().items()
    }


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("ctl", "tensorflow", "keras"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def path_of(directory: Path, worker: int) -> Path:
    return directory / f"flight-worker-{worker}.json"


def write(directory: Path, record: Record) -> Path:
    """Writes the file of ``record``, in place of an older one. Raises OSError."""
    path = path_of(directory, record.worker)
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".tmp-{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1))
    os.replace(unfinished, path)
    return path


def read(path: Path) -> Record:
    """The record in a file, which anybody may have written.

    Raises:
        ValueError: it is not one; the text says why.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(_LARGEST_FILE + 1)
    if len(text) > _LARGEST_FILE:
        raise ValueError(f"more than {_LARGEST_FILE >> 20} MiB")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r:.20}, not {SCHEMA}")
    workers = _number(data, "workers", int, 1, 10**6)
    step = None if data.get("step") is None else _number(data, "step", int)
    return Record(
        worker=_number(data, "worker", int, 0, workers - 1),
        workers=workers,
        time=_number(data, "time", float),
        why=_text(data, "why"),
        step=step,
        doing=_text(data, "doing"),
        phase=_text(data, "phase"),
        waits=_flag(data, "waits"),
        since=_number(data, "since", float),
        silent_after=_number(data, "silent_after", float),
        fired={_line(k): _number(v, k, float, -1e9) for k, v in _items(data, "fired", whole=True)},
        not_fired=tuple(_line(name) for name in _list(data.get("not_fired"), "not_fired")),
        peers={
            _index(key, workers): Peer(
                step=_number(peer, "step", int),
                doing=_text(peer, "doing"),
                phase=_text(peer, "phase"),
                waits=_flag(peer, "waits"),
                since=_number(peer, "since", float),
                gave_up=_flag(peer, "gave_up"),
                silent=_number(peer, "silent", float),
            )
            for key, peer in _items(data, "peers")
        },
        gone={_index(k, workers): _text(v, k) for k, v in _items(data, "gone", whole=True)},
        packs=tuple(
            _number({"packs": size}, "packs", int) for size in _list(data.get("packs"), "packs")
        ),
        stacks={
            _line(name): tuple(_line(entry) for entry in _list(stack, "stacks"))
            for name, stack in _items(data, "stacks")
        },
        versions={_line(k): _text(v, k) for k, v in _items(data, "versions", whole=True)},
    )


def _number(data: Any, name: str, kind: type, low: float = 0, high: float = 1e12) -> Any:
    value = data.get(name) if isinstance(data, dict) else None
    kinds = (int,) if kind is int else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(f"{_line(name)} is not a number from {low:g} to {high:g}")
    return kind(value)


def _flag(data: Any, name: str) -> bool:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, bool):
        raise ValueError(f"{name} is not true or false")
    return value


def _text(data: Any, name: str) -> str:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{_line(name)} is not a text")
    return _line(value)


def _line(value: Any) -> str:
    """At most 300 characters that a terminal only prints."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    return "".join(c for c in value if c.isprintable())[:300]


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _items(data: dict, name: str, whole: bool = False) -> list[tuple[str, Any]]:
    """Keys and values of an object in ``data``; with ``whole``, each key with the object itself."""
    value = data.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return [(key, value if whole else item) for key, item in value.items()]


def _index(key: str, workers: int) -> int:
    if not key.isdecimal() or len(key) > 7 or int(key) >= workers:
        raise ValueError(f"there is no worker {_line(key)}")
    return int(key)
