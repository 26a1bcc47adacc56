"""Finds which worker keeps the others waiting: pure functions over flight records.

`ctl.distributed.watch.watchdog` passes its own record; ``python -m ctl.inspect hang DIR`` passes
the records of all workers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from ctl.distributed.watch.record import Record

# Beats come once a second, so the place of a worker is reliable only if the worker has stayed there
# for longer than that.
_STEADY_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker was.

    Attributes:
        worker: its index.
        known: whether it left a record or a beat of it was received.
        own: whether this is from its own record; else it is from the last beat received.
        step: last global step that it finished; -1 if not known.
        doing, phase, waits, since: see `ctl.distributed.watch.beats.Beat`.
        steady: whether it was there for long enough to be compared with others.
        silent: seconds without a beat, if more than ``silent_after`` (frozen or dead); else 0.
        gone: why nothing listens at its address, or "".
        gave_up: whether it ended because a collective broke off; then it is not the cause. A worker
            whose collective timed out may be.
        at: innermost frame of its main thread, or "".
    """

    worker: int
    known: bool = False
    own: bool = False
    step: int = -1
    doing: str = ""
    phase: str = ""
    waits: bool = False
    since: float = 0.0
    steady: bool = False
    silent: float = 0.0
    gone: str = ""
    gave_up: bool = False
    at: str = ""

    @property
    def where(self) -> str:
        """Phase, section and step, for messages."""
        after = f" after step {self.step}" if self.step >= 0 else ""
        return (f"{self.phase} of " if self.phase else "") + self.doing + after

    @property
    def _last(self) -> str:
        return f", last seen in {self.where}" if self.known else ""

    def __str__(self) -> str:
        """The worker, and its state in brackets."""
        if self.gone:
            what = f"gone: {self.gone}{self._last}"
        elif not self.known:
            what = "it left no record, and no worker heard from it"
        elif self.silent:
            what = f"frozen or dead: silent for {self.silent:.0f} s{self._last}"
        else:
            at = f", {self.at}" if self.at and not self.waits else ""
            what = f"in {self.where} for {self.since:.0f} s{at}"
        return f"worker {self.worker} ({what})"


def places(records: Sequence[Record]) -> list[Place]:
    """Returns the place of each worker, from its own record or else from its last beat."""
    return [_place(worker, records) for worker in range(max(r.workers for r in records))]


def _place(worker: int, records: Sequence[Record]) -> Place:
    own = max((r for r in records if r.worker == worker), key=lambda r: r.time, default=None)
    heard = [r for r in records if worker in r.peers]
    last = max(heard, key=lambda r: r.time - r.peers[worker].silent, default=None)
    peer = last.peers[worker] if last else None
    silent = peer.silent if last and peer and peer.silent > last.silent_after else 0.0
    gone = next((r.gone[worker] for r in records if worker in r.gone), "")
    found, gave_up, at = own or peer, "", ""
    if found is None:
        return Place(worker, gone=gone)
    if own:
        # Silence after its record only means that it ended. Silence before its record means that it
        # was frozen and went on.
        if last and own.time < last.time - silent + last.silent_after:
            silent = 0.0
        gone, gave_up = "", own.why
        at = ["", *own.stacks.get("MainThread", ())][-1]
    elif peer and peer.gave_up:
        silent, gone, gave_up = 0.0, "", peer.gave_up
    return Place(
        worker,
        known=True,
        own=own is not None,
        step=-1 if found.step is None else found.step,
        doing=found.doing,
        phase=found.phase,
        waits=found.waits,
        since=found.since,
        steady=found.since >= _STEADY_SECONDS,
        silent=silent,
        gone=gone,
        gave_up=gave_up == "broke off",
        at=at,
    )


def suspects(records: Sequence[Record]) -> list[Place]:
    """Returns the workers that the others wait for, the most certain first; empty if unknown.

    First come the workers that are gone, frozen or dead. Then come those that stand still elsewhere
    than most waiting workers: at an earlier step, in another section, or in work of their own. If
    there are none of either, the result is the workers without a record or a beat, provided that
    at least two workers have one, or that there are only two.
    """
    found = places(records)
    unheard = [p for p in found if not p.known]
    sure = len(found) - len(unheard) > 1 or (len(found) == 2 and len(unheard) == 1)
    return _judge(found)[1] or (unheard if sure else [])


def _judge(found: Sequence[Place]) -> tuple[list[Place], list[Place]]:
    """Returns the workers that wait in the same place, and those that they wait for."""
    lost = [p for p in found if p.gone or p.silent]
    # Who gave up had waited, also where that was not expected: in a collective of an action. So did
    # the others in that place.
    where = {_at(p) for p in found if p.known and (p.waits or p.gave_up)}
    waiting = [p for p in found if p.known and _at(p) in where and p not in lost]
    groups = Counter(_at(p) for p in waiting if p.steady)
    if not groups:
        return waiting, lost
    # Of equally large groups, take the one that is further: workers behind it keep it waiting.
    most = max(groups, key=lambda place: (groups[place], place[0], place[2].startswith("pack")))
    # A worker without a phase has finished its step and waits for the sum of the losses.
    group = [p for p in waiting if _at(p) in (most, (*most[:2], "")) or p.gave_up or not p.steady]
    elsewhere = [p for p in found if p.known and p not in group and p not in lost and not p.gave_up]
    # A ring can end on one worker a step before it ends on the next: who waits in an all-reduce
    # waits for those that are lost, too.
    elsewhere = [
        p for p in elsewhere if p.steady and not (lost and p.waits and p.phase.startswith("pack"))
    ]
    return group, lost + sorted(elsewhere, key=lambda p: (p.waits, p.step))


def _at(place: Place) -> tuple[int, str, str]:
    return place.step, place.doing, place.phase


def summary(records: Sequence[Record]) -> str:
    """Returns one line: which workers wait where, for how long, and for which workers."""
    found = places(records)
    group, named = _judge(found)
    named = named or [p for p in found if not p.known] or ([] if group else found)
    if not group:
        who = "no worker waits for others; "
        step = max(p.step for p in found)
    else:
        one = max(group, key=lambda p: (p.steady, p.since))
        step = one.step
        where = f"{one.phase} of {one.doing}" if one.phase else one.doing
        have = "have" if len(group) > 1 else "has"
        who = f"{_workers(group)} {have} waited {one.since:.0f} s in {where}"
        who += " for " if named else "; "
    whom = ", ".join(str(place) for place in named)
    if not whom:
        whom = "all are in the same place: suspect the network between them, or TensorFlow"
    # A step is counted when it is finished, so the next one is the one that hangs.
    return (f"step {step + 1}: " if step >= 0 else "before step 1: ") + who + whom


def _workers(group: Sequence[Place]) -> str:
    numbers = ", ".join(str(place.worker) for place in group)
    return f"worker{'s' if len(group) > 1 else ''} {numbers}"
