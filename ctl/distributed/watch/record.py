"""The flight record: the file that a worker writes when a step is stuck.

``model_dir/inspect/flight-worker-I.json`` says where worker I was and where it last saw the others.
`ctl.distributed.watch.hang` merges the records of all workers. No TensorFlow here, because a record
is also written when TensorFlow hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ctl.base import durable
from ctl.distributed.cluster.members import Cluster
from ctl.distributed.watch.beats import Peer, from_json, interval
from ctl.errors import CtlError

SCHEMA = 2

# The records of one hang are written within seconds of each other. A record that is older by more
# than this, and by more than twice the longest wait, is of an earlier attempt.
SAME_HANG_SECONDS = 120.0

# Values of `Record.why` of a worker whose own collective failed.
GAVE_UP = ("timed out", "broke off")

_MOST_FRAMES = 60
_LARGEST_FILE = 4 << 20


@dataclasses.dataclass(eq=False)
class Section:
    """A section of the code that the main thread is in, as the watchdog sees it.

    Attributes:
        doing: description for messages.
        limit: seconds without progress after which the process ends; None for work that waits for
            no other worker.
        otherwise: error to end with at the limit, in place of one that blames other workers.
        step: last known global step.
        progress: returns the global step.
        marks: returns the seconds since each mark of the running step that has fired, and the names
            of those that have not, in the order of the step.
        packs: bytes of each pack of gradients, where known.
        flag: the flag that sets the limit.
        stalled: seconds since the last progress.
        quiet_until: value of ``stalled`` at which the watchdog next logs whom it waits for.
        fired, not_fired: last result of ``marks``, read while the step makes no progress.
        phase: what the running step waits for, see `phase_of`.
    """

    doing: str
    limit: float | None
    otherwise: CtlError | None = None
    step: int | None = None
    progress: Callable[[], int] | None = None
    marks: Callable[[], tuple[dict[str, float], tuple[str, ...]]] | None = None
    packs: tuple[int, ...] = ()
    flag: str = "--collective_timeout"
    stalled: float = 0.0
    quiet_until: float = math.inf
    fired: dict[str, float] = dataclasses.field(default_factory=dict)
    not_fired: tuple[str, ...] = ()
    phase: str = ""


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one worker at a hang, and its last news of the others.

    Attributes:
        worker: its index.
        workers: number of workers.
        time: when the record was made, in seconds since the epoch.
        why: "timed out", "broke off" or "worker I gave up".
        step: last global step that it finished; None before the first section with steps.
        doing, phase, waits, since: see `ctl.distributed.watch.beats.Beat`.
        silent_after: seconds without a beat after which a peer counts as frozen or dead.
        fired, not_fired, packs: see `Section`.
        peers: the other workers whose beats were received, by index.
        gone: the reason for each worker that no longer listens, by index.
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
    peers: Mapping[int, Peer],
    gone: Mapping[int, str],
) -> Record:
    """Returns the record of this process at this moment; `Record` says what the arguments are."""
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
        peers=peers,
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
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
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
        raise ValueError(f"it is larger than {_LARGEST_FILE >> 20} MiB")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"it has schema {data.get('schema')!r:.20}; this ctl reads {SCHEMA}")
    record = from_json(Record, data, "record")
    if not 1 <= record.workers <= 10**6:
        raise ValueError("workers is not a number from 1 to 1,000,000")
    for worker in (record.worker, *record.peers, *record.gone):
        if worker >= record.workers:
            raise ValueError(f"there is no worker {worker}")
    return record
