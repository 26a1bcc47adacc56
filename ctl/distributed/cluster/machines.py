"""Which machines have the workers of an elastic job: what their launchers agree on.

Each launcher looks at the board once a second, and more often after a loss. When no worker of a
plan runs any more, the first launcher that is there makes the next plan (`next_plan`). A machine is
there while its record changes: clocks of machines are not compared.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ctl.distributed.cluster.board import AWAY, LEFT, RUNS, WAITS, Machine, Plan
from ctl.errors import CheckpointError, DivergedError, PeerError, Preempted, UsageError

# Seconds without a new record after which a machine is lost. Until a launcher has looked for some
# seconds, it cannot tell which machines are.
SILENT_SECONDS, _FIRST_LOOK_SECONDS = 10.0, 3.0

# The same when a worker of the plan has lost another; and before others begin with none of the
# machines of a plan: the board may have lost these while they train.
_SILENT_AFTER_A_LOSS_SECONDS, _ALL_SILENT_SECONDS = 4.0, 60.0

_END_SECONDS = 5.0  # for the last record; a directory may hang

# Between two looks; the second, for `SILENT_SECONDS` after a worker here has begun or ended.
_BEAT_SECONDS, _QUICK_BEAT_SECONDS = 1.0, 0.25

# A wrong flag, a loss that is NaN: the same would come again.
FINAL = (UsageError.exit_code, DivergedError.exit_code)

# Codes of workers that were not lost: such a worker has lost another, cannot write, or was stopped.
NOT_LOST = (0, PeerError.exit_code, CheckpointError.exit_code, Preempted.exit_code)


class Board(Protocol):
    """What `DirectoryBoard` and `ServedBoard` have in common."""

    def exchange(
        self, mine: Machine, proposed: Plan | None = None
    ) -> tuple[dict[str, Machine], Plan]:
        """Posts the record of this machine, and a plan. Returns all records and the newest plan."""

    def close(self) -> None:
        """Ends what the board holds."""


@dataclasses.dataclass(frozen=True)
class View:
    """What a launcher knows of all machines.

    Attributes:
        plan: the newest.
        machines: all records, also of machines that are lost.
        there: names of those whose records change.
        silent: seconds since a member of the plan has changed its record; infinite if this launcher
            has seen none change.
    """

    plan: Plan
    machines: Mapping[str, Machine]
    there: frozenset[str]
    silent: float = math.inf

    def of_plan(self) -> list[Machine]:
        """The members of the plan that have followed it."""
        known = [self.machines[name] for name in self.plan.members if name in self.machines]
        return [machine for machine in known if machine.plan == self.plan.number]

    def is_over(self) -> bool:
        """Whether no worker of the plan runs, or will run."""
        late = (self.machines[name] for name in self.plan.members if name in self.there)
        return not any(m.state == RUNS or m.plan < self.plan.number for m in late)

    def order(self) -> list[Machine]:
        """The machines that are there, in the order of their ranks in the next plan."""
        rank = {name: index for index, name in enumerate(self.plan.members)}
        names = sorted(self.there, key=lambda name: (rank.get(name, len(rank)), name))
        return [self.machines[name] for name in names if self.machines[name].state != LEFT]

    def strangers(self) -> list[str]:
        """Names of the machines whose workers follow a later plan: the board was started anew."""
        return [m.name for m in self.order() if m.state == RUNS and m.plan > self.plan.number]

    def newcomers(self) -> list[str]:
        """Names of the machines that wait while the workers of the plan run."""
        return [
            m.name for m in self.order() if m.state == WAITS and m.name not in self.plan.members
        ]


def verdict(view: View) -> int | None:
    """The exit code with which all launchers end after the plan of ``view``; None if there is
    another plan to come, or workers still run."""
    members = view.of_plan()
    codes = [machine.code for machine in members if machine.state != RUNS]
    for final in FINAL:
        if final in codes:
            return final
    if not members or not view.is_over():
        return None
    chief = members[0] if members[0].name == view.plan.members[0] else None
    if chief and chief.code == 0:  # it writes: the training is done, whoever was lost since
        return 0
    asked = any(machine.joins or machine.state == LEFT for machine in members)
    if Preempted.exit_code in codes and not asked:  # somebody has stopped a worker
        return Preempted.exit_code
    return None


def next_plan(
    view: View, least: int, most: int, *, waited: float, last_call: float, lasted: bool
) -> Plan | None:
    """The plan that follows that of ``view``; None if more machines are waited for.

    Args:
        view: in which no worker runs, and which has no `verdict`.
        least, most: numbers of workers.
        waited: seconds since the last plan was over, or since this launcher has started.
        last_call: seconds that a job that begins waits for more than ``least`` machines.
        lasted: whether the last attempt ran for so long that ``failures`` begin anew.
    """
    old, here = view.plan, view.order()
    ready = [machine for machine in here if machine.state == WAITS]
    begins = not any(machine.name in old.members for machine in here)
    if begins:
        ran = any(machine.state == RUNS for machine in view.of_plan())
        if ran and view.silent < _ALL_SILENT_SECONDS or view.strangers():
            return None
        if len(ready) < (least if waited >= last_call else most):
            return None
        return _plan(old, ready[:most], 0, f"{len(ready[:most])} machines are there")
    members, failures = view.of_plan(), 0 if lasted else old.failures
    gone = [name for name in old.members if name not in {machine.name for machine in ready}]
    joins = any(machine.joins for machine in members)
    apart = any(m.trained for m in members) and any(m.code == PeerError.exit_code for m in members)
    if len(ready) >= least and (gone or joins or apart):
        why = (
            f"without {', '.join(gone)}"
            if gone
            else "more machines join"
            if joins
            else ("the workers have lost each other, and none is lost")
        )
        return _plan(old, ready[:most], failures, why)
    ready = [machine for machine in here if machine.state in (WAITS, AWAY)]
    if len(ready) < least:
        return None
    return _plan(old, ready[:most], failures + 1, f"restart {failures + 1}")


def _plan(old: Plan, machines: list[Machine], failures: int, why: str) -> Plan:
    return Plan(
        old.number + 1,
        tuple(machine.name for machine in machines),
        tuple(machine.address for machine in machines),
        failures,
        why,
    )


def worst(codes: Iterable[int]) -> int:
    """The code of a worker that was lost; else of one that was stopped or cannot write."""
    lost_none = (0, PeerError.exit_code)
    return max(codes, key=lambda code: (code not in NOT_LOST, code not in lost_none, code))


class Machines:
    """This machine among those of a job, a context manager: a thread looks at the ``board``.

    Args:
        mine: the first record of this machine.
    """

    def __init__(self, board: Board, mine: Machine):
        self._board, self.mine = board, mine
        self._lock, self._wake, self._ended = threading.Lock(), threading.Event(), False
        # Seconds in which the board has answered: nobody is lost because it, or this process, was
        # away.
        self._clock = 0.0
        self._changed: dict[str, tuple[int, float]] = {}  # the beat of each; by that clock, when
        self._proposed: Plan | None = None
        self._looked = self._quick_until = time.monotonic()
        self._view = View(Plan(), {}, frozenset())
        self._old: int | None = None  # number of the plan at the start: perhaps of an earlier job
        self._alive = 0  # number of the last plan with a member that was there
        self.trouble = ""
        self._thread = threading.Thread(target=self._look_on, name="machines", daemon=True)

    def __enter__(self) -> Machines:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            self.say(state=LEFT)
        self._ended = True
        self._wake.set()
        self._thread.join(_END_SECONDS)
        self._board.close()

    def say(self, **changes: Any) -> None:
        """Changes the record of this machine, which others see at once."""
        with self._lock:
            if all(getattr(self.mine, name) == value for name, value in changes.items()):
                return
            if "state" in changes:
                self._quick_until = time.monotonic() + SILENT_SECONDS
            self.mine = dataclasses.replace(self.mine, **changes)
        self._wake.set()

    def propose(self, plan: Plan) -> None:
        """Posts a plan. The first of its number counts."""
        self._proposed = plan
        self._wake.set()

    @property
    def view(self) -> View:
        """What this launcher has last seen. Its own record is the current one."""
        view = self._view
        return dataclasses.replace(view, machines={**view.machines, self.mine.name: self.mine})

    @property
    def concerned(self) -> bool:
        """Whether the newest plan is of this job. Else a job that has ended has left it."""
        number = self._view.plan.number
        return number > 0 and (number != self._old or number == self._alive)

    @property
    def knows_who_is_there(self) -> bool:
        """Whether it has looked for long enough to tell which machines are there."""
        return self._clock >= _FIRST_LOOK_SECONDS

    @property
    def silence(self) -> float:
        """Seconds since the board has last answered."""
        return time.monotonic() - self._looked

    def _look_on(self) -> None:
        while True:
            self._wake.clear()
            ended, proposed, self._proposed = self._ended, self._proposed, None
            with self._lock:
                self.mine = mine = dataclasses.replace(self.mine, beat=self.mine.beat + 1)
            try:
                self._see(*self._board.exchange(mine, proposed))
                self.trouble = ""
            except Exception as error:  # whatever the board says, this thread goes on
                self.trouble = getattr(error, "strerror", None) or str(error) or repr(error)
            if ended:
                return
            quick = time.monotonic() < self._quick_until
            self._wake.wait(_QUICK_BEAT_SECONDS if quick else _BEAT_SECONDS)

    def _see(self, machines: dict[str, Machine], plan: Plan) -> None:
        now, first_look = time.monotonic(), self._old is None
        if first_look:
            self._old = plan.number
        else:
            self._clock += min(now - self._looked, 2 * _BEAT_SECONDS)
        self._looked = now
        for name, machine in machines.items():
            if self._changed.get(name, (None,))[0] != machine.beat:
                # What a machine has said before this one looked may be an old record.
                old = first_look and name != self.mine.name
                self._changed[name] = machine.beat, -math.inf if old else self._clock
        broken = any(machine.broken for machine in View(plan, machines, frozenset()).of_plan())
        patience = _SILENT_AFTER_A_LOSS_SECONDS if broken else SILENT_SECONDS
        there = frozenset(
            name
            for name, (_, at) in self._changed.items()
            if name in machines and self._clock - at < patience and machines[name].state != LEFT
        )
        if there.intersection(plan.members):
            self._alive = plan.number
        seen = [self._changed[name][1] for name in plan.members if name in self._changed]
        self._view = View(plan, machines, there, self._clock - max(seen, default=-math.inf))
