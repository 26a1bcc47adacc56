"""Draws schedules of faults for a job. They are plain data, as in JSON."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

# The job, see `job`. Times in seconds; they are the flags of `ctl.train` of that name.
STEPS, SAVE_EVERY, EVALUATE_EVERY = 60, 5, 30
COLLECTIVE_TIMEOUT, STARTUP_TIMEOUT = 10.0, 20.0
COMPILING_TIMEOUT = 20.0  # instead of `watchdog.FIRST_CALL_SECONDS`

ALL = -1  # as the task of a fault

# Where code of a user runs, or the disk of the chief. The first are asked at certain steps.
STEPPED = ("action", "data", "forward", "saving")
PLACES = (*STEPPED, "model", "layer", "schedule", "metric", "evaluated", "export")

# Of a task, in this order; "step N" is between "tracing", where the step is traced, and "trained".
MARKS = ("start", "placed", "built", "training", "trained", "leaving", "exporting", "exiting")
TRACING = "tracing"

KINDS = {
    "kill": "SIGKILL to a task",
    "pause": "SIGSTOP, and SIGCONT within the time limits",
    "freeze": "SIGSTOP until the others have ended",
    "term": "SIGTERM to a task or to all, once to 40 times",
    "int": "SIGINT to a task or to all, once or twice",
    "disk": "no space left on the disk of the checkpoints",
    "garbage": "bytes that mean nothing, silent and half-open connections on every port",
    "cut": "all connections of a task are shut down",
    "drop": "the network hangs: no packet reaches a task any more",
    "slow": "code of a user, or a save, takes some seconds once",
    "hang": "code of a user, or a save, never returns",
    "raise": "code of a user, or a save, raises an exception",
    "damage": "after the attempt, a file of the newest checkpoint is damaged",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: in its attempt.
        kind: one of `KINDS`.
        task: index of the task that it hits; `ALL` for all.
        place: of the user's code, one of `PLACES`; else the mark that it waits for, of the task or,
            in a job with parameter servers, of the coordinator; for "damage", how: "flip", "cut
            short" or "delete".
        step: of the user's code, if its place is one of `STEPPED`.
        seconds: how long a slow place or a pause takes; else how long after the mark it comes.
        times: how often a signal is sent.
    """

    number: int
    kind: str
    task: int
    place: str
    step: int = 0
    seconds: float = 0.0
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The attempts of one job. The last has no faults.

    Attributes:
        seed: that it was drawn from.
        workers: number of workers.
        servers: number of parameter servers; 0 for a job of workers alone.
        attempts: the faults of each.
    """

    seed: int
    workers: int
    servers: int
    attempts: tuple[tuple[Fault, ...], ...]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks. The first saves."""
        names = [f"worker {i}" for i in range(self.workers)]
        if self.servers:
            return ["chief 0", *names, *(f"ps {i}" for i in range(self.servers))]
        return names

    def dumps(self) -> str:
        """One line of JSON; leaves out what is as by default."""
        faults = [[_short(fault) for fault in attempt] for attempt in self.attempts]
        return json.dumps({**dataclasses.asdict(self), "attempts": faults})


def loads(text: str) -> Schedule:
    """The schedule that `Schedule.dumps` wrote. Raises ValueError if it is none."""
    try:
        data = json.loads(text)
        attempts = tuple(tuple(Fault(**fault) for fault in faults) for faults in data["attempts"])
        schedule = Schedule(**{**data, "attempts": attempts})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no schedule: {error}") from error
    if unknown := {f.kind for faults in attempts for f in faults} - KINDS.keys():
        raise ValueError(f"no kind of fault: {', '.join(unknown)}")
    return schedule


def _short(fault: Fault) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(Fault)}
    return {k: v for k, v in dataclasses.asdict(fault).items() if v != defaults[k]}


def draw(seed: int, *, workers: int = 4, attempts: int = 2) -> Schedule:
    """Draws a schedule: a job of at most ``workers`` workers, one in four times with parameter
    servers, and up to ``attempts`` attempts with one or two faults before the last."""
    randoms = random.Random(seed)
    servers = randoms.choice([0, 0, 0, 1])
    count = randoms.randint(1, min(workers, 3) if servers else workers)
    schedule = Schedule(seed, count, servers, ())
    disturbed = [
        tuple(_fault(number, schedule, randoms) for number in range(randoms.choice([1, 1, 2])))
        for _ in range(randoms.randint(1, attempts))
    ]
    return dataclasses.replace(schedule, attempts=(*disturbed, ()))


def _fault(number: int, schedule: Schedule, randoms: random.Random) -> Fault:
    alone = len(schedule.tasks) == 1
    kinds = set(KINDS) - ({"freeze", "garbage", "cut", "drop", "hang"} if alone else set())
    if schedule.servers:
        # Code of a user runs in the coordinator, for which nobody waits.
        kinds -= {"hang", "drop"}
    kind = randoms.choice(sorted(kinds))
    task = randoms.randrange(len(schedule.tasks))
    if kind in ("slow", "hang", "raise"):
        never = {"forward"} if schedule.servers else set()
        if kind == "hang":  # nobody waits for the export
            never |= {"export"}
        places = [place for place in PLACES if place not in never]
        place = randoms.choice(places)
        if schedule.servers or place in ("export", "saving"):
            task = 0
        step = randoms.randrange(1, STEPS - 5) if place in STEPPED else 0
        seconds = round(randoms.uniform(0.5, 4), 2) if kind == "slow" else 0.0
        return Fault(number, kind, task, place, step=step, seconds=seconds)
    if kind == "damage":
        return Fault(number, kind, 0, randoms.choice(["flip", "cut short", "delete"]))
    if kind == "disk":
        task = 0
    places = [*MARKS, TRACING] if kind != "drop" else [TRACING]
    place = randoms.choice([*places, *(f"step {randoms.randrange(1, STEPS)}" for _ in range(9))])
    seconds = round(randoms.uniform(0, 0.3), 3)
    if kind == "pause":
        seconds = round(randoms.uniform(0.5, 4), 2)
    if kind in ("pause", "term", "int") and randoms.random() < 0.3:
        task = ALL
    times = {"term": [1, 1, 2, 40], "int": [1, 1, 2]}.get(kind, [1])
    return Fault(number, kind, task, place, seconds=seconds, times=randoms.choice(times))
