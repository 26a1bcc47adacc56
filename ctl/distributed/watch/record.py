"""The flight record: the file that a worker writes when a step is stuck.

``model_dir/inspect/flight-worker-I.json`` says where worker I was and where it last saw the others.
`ctl.distributed.watch.hang` merges the records of all workers. No TensorFlow here, because a record
is also written when TensorFlow hangs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ctl.base import durable
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.watch.beats import Beat, interval
from ctl.distributed.watch.section import Section

SCHEMA = 2

# The records of one hang are written within seconds of each other. A record that is older by more
# than this, and by more than twice the longest wait, is of an earlier attempt.
SAME_HANG_SECONDS = 120.0

# Values of `Record.why` of a worker whose own collective failed.
GAVE_UP = ("timed out", "broke off")

_MOST_FRAMES = 60
_LARGEST_FILE = 4 << 20


@dataclasses.dataclass(frozen=True)
class Peer:
    """The last beat that the writer of a record received from another worker.

    Attributes:
        step, doing, phase, waits, since, gave_up: see `ctl.distributed.watch.beats.Beat`.
        silent: seconds since the beat was received.
    """

    step: int
    doing: str
    phase: str
    waits: bool
    since: float
    gave_up: str
    silent: float


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one worker at a hang, and its last news of the others.

    Attributes:
        worker: its index.
        workers: number of workers.
        time: when the record was made, in seconds since the epoch.
        why: "timed out", "broke off" or "worker I gave up".
        step: last global step that it finished; None before the first section with steps.
        doing: section of the code, see `ctl.distributed.watch.section.Section`.
        phase: what the step waits for, see `phase_of`.
        waits: whether it may wait for others in this section.
        since: seconds without progress.
        silent_after: seconds without a beat after which a peer counts as frozen or dead.
        fired: seconds since each mark of the running step that has fired.
        not_fired: the other marks, in the order of the step.
        peers: the other workers whose beats were received, by index.
        gone: the reason for each worker that no longer listens, by index.
        packs: bytes of each pack of gradients, where known.
        stacks: frames of every Python thread by its name, ``file:line function``, innermost last.
        versions: of Python and packages, by name.
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
    """Returns the record of this process at this moment; `Record` says what the arguments are."""
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
    """Returns what a step waits for, by its marks: ``input``, ``forward``, ``backward``, ``apply``,
    or ``packI`` while pack I is being reduced; "" when all marks have fired.

    Phases of the replica itself come first: until its backward pass ends it keeps others waiting,
    even if it has sent some packs.
    """
    local = [name for name in ("input", "forward", "backward") if name in (*fired, *not_fired)]
    last = max((i for i, name in enumerate(local) if name in fired), default=-1)
    if last + 1 < len(local):  # some marks are left out of a step: forward under XLA
        return local[last + 1]
    for name in not_fired:
        if name.startswith("done"):
            pack = name.removeprefix("done")
            return f"pack{pack}" if f"ready{pack}" in fired else "backward"
    return "apply" if "apply" in not_fired else ""


def _stacks() -> dict[str, tuple[str, ...]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): _stack(frame)
        for ident, frame in sys._current_frames().items()
    }


def _stack(frame: FrameType) -> tuple[str, ...]:
    """Opens no source file, unlike `traceback.extract_stack`: the file system may hang."""
    inner = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES)
    lines = [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in inner]
    return tuple(reversed(lines))


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("ctl", "tensorflow", "keras"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def path_of(directory: Path, worker: int) -> Path:
    """Returns the file for the record of ``worker``."""
    return directory / f"flight-worker-{worker}.json"


def write(directory: Path, record: Record) -> Path:
    """Writes the file of ``record``, replaces an older one, and returns its path.

    Raises:
        OSError: it cannot be written.
    """
    path = path_of(directory, record.worker)
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".tmp-{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1))
    os.replace(unfinished, path)
    return path


def read(path: Path) -> Record:
    """Reads the record in a file, which is untrusted input.

    Raises:
        ValueError: the file is not a record; the message says why.
        OSError: the file cannot be read.
    """
    with durable.open_regular(path) as file:
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
                gave_up=_text(peer, "gave_up"),
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
    value: Any = data.get(name) if isinstance(data, dict) else None
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
    """The first 300 printable characters, so that a terminal obeys none of them."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    return "".join(c for c in value if c.isprintable())[:300]


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _items(data: dict, name: str, whole: bool = False) -> list[tuple[str, Any]]:
    """Keys and values of the object ``name``; with ``whole``, the object in place of each value."""
    value = data.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return [(key, value if whole else item) for key, item in value.items()]


def _index(key: str, workers: int) -> int:
    if not key.isdecimal() or len(key) > 7 or int(key) >= workers:
        raise ValueError(f"there is no worker {_line(key)}")
    return int(key)
