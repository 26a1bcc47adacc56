"""What must hold after an attempt of a job, by what README.md and the pages of
`ctl/distributed/watch`, `ctl/jobs/parameter_server.py` and `ctl/checkpoint` promise.

The bounds in seconds are those of the table in ctl/distributed/watch/README.md, with the limits
that the job gives as flags (`draw`). Times a factor of the caller, for a machine that is
busy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from ctl.checkpoint import manifest

from .attempt import Attempt, Hit, to_resume_from
from .draw import COLLECTIVE_TIMEOUT, COMPILING_TIMEOUT, MARKS, STARTUP_TIMEOUT, STEPS, TRACING

_BENIGN = ("pause", "slow", "garbage", "damage")
_SLOWER = 5.0  # how much longer than undisturbed an attempt may take that goes on
_GRACE = 15.0  # until the survivors of a kill in the training have ended
_HEARTBEATS, _ROLL_CALL = 25.0, 35.0 + 10.0  # a frozen worker; a frozen task beside servers
_AFTER_THAW = 35.0  # then TensorFlow and the roll call notice that they are alone
# A task with one of these marks owes its peers no gradients any more.
# What a task says that a fault has ended with this code.
_SAYS = {"raise": (1, "a bug in the"), "disk": (4, "No space left|cannot export")}
_LATE = (f"step {STEPS - 1}", f"step {STEPS}", "trained", "leaving", "exporting", "done", "exiting")

_TERMED = {42, -15, 99}  # of a task that a signal meets before its first line

# What TensorFlow's threads log while a process ends, and empty lines.
_NOISE = re.compile(
    r"[IWEF]\d{4} |Additional GRPC|:[A-Z]+:|/job:|The tasks have crashed|The error could be|\s*$"
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One check that failed: "time", "code", "blame" or "state", and why in one line."""

    check: str
    why: str


def _order(mark: str) -> int:
    """How far a task is with this mark; -1 before the first."""
    if mark.startswith("step ") or mark == TRACING:
        return MARKS.index("training")
    if mark.startswith("resumed"):
        return MARKS.index("built")
    return len(MARKS) if mark == "done" else MARKS.index(mark) if mark else -1


def deadline(attempt: Attempt, undisturbed: float, factor: float) -> float:
    """Until when all tasks must have ended, in seconds since the epoch.

    Args:
        attempt: what has happened so far.
        undisturbed: seconds of an attempt without faults.
        factor: by how much the machine may be slower than promised.
    """
    pauses = sum(hit.fault.seconds for hit in attempt.hits)
    until = attempt.began + pauses + factor * _SLOWER * undisturbed
    ending = [hit for hit in attempt.hits if hit.fault.kind not in _BENIGN]
    if any(_surely_ends(attempt, hit) for hit in ending):
        until = 0.0
    for hit in ending:
        until = max(until, hit.at + factor * bound(attempt, hit))
    if attempt.thawed:
        until = max(until, attempt.thawed + factor * _AFTER_THAW)
    return until


def _surely_ends(attempt: Attempt, hit: Hit) -> bool:
    if hit.fault.kind in ("disk", "cut", "drop") or any(
        hit.marks[name] in _LATE for name in hit.tasks
    ):
        return False
    workers_only = all(name.startswith("worker") for name in hit.tasks)
    return hit.fault.kind == "freeze" or not ("chief 0" in attempt.names and workers_only)


def bound(attempt: Attempt, hit: Hit) -> float:
    """Seconds from the fault to the end of all others."""
    slowest = min(_order(mark) for mark in hit.marks.values())
    if "chief 0" in attempt.names:
        began = _order(hit.marks["chief 0"]) >= MARKS.index("placed")
        return _ROLL_CALL if began else 2 * STARTUP_TIMEOUT + _GRACE
    if slowest < MARKS.index("placed"):  # they wait for each other, then for TensorFlow
        return 2 * STARTUP_TIMEOUT + _GRACE
    if hit.fault.kind == "hang":
        if hit.fault.place in ("layer", "schedule") or slowest == MARKS.index("training"):
            return max(COLLECTIVE_TIMEOUT, COMPILING_TIMEOUT) + _GRACE
        return STARTUP_TIMEOUT + _GRACE
    if slowest > MARKS.index("training"):  # they leave together
        return COLLECTIVE_TIMEOUT + _GRACE
    noticed_at_once = slowest == MARKS.index("training") and hit.fault.kind in ("kill", "raise")
    return _GRACE if noticed_at_once else _HEARTBEATS


def judge(attempt: Attempt, run_dir: Path, before: int) -> list[Failure]:
    """Checks an attempt.

    Args:
        attempt: what has happened.
        run_dir: of the job.
        before: the step from which the attempt had to go on.
    """
    failures = [Failure("time", f"{name} has not ended in time") for name in attempt.stuck]
    if attempt.left:
        failures.append(Failure("time", f"processes {attempt.left} are left"))
    for name in attempt.names:
        failures += _judge_task(attempt, name)
    return failures + _judge_state(attempt, run_dir, before)


def _judge_task(attempt: Attempt, name: str) -> list[Failure]:
    ends = [code for code, _ in attempt.ends[name]]
    if not ends:  # killed by the runner, which `stuck` says or the fault explains
        return []
    lines = [line for line in attempt.said[name].splitlines() if not _NOISE.match(line)]
    last = (lines or ["nothing"])[-1]
    allowed = _allowed(attempt, name)
    if ends[0] not in allowed:
        codes = ", ".join(map(str, sorted(allowed)))
        return [Failure("code", f"{name} exited with {ends[0]}, not {codes}: {last[:300]}")]
    culprits = _culprits(attempt)
    if ends[0] != 5 or name in _hit_by(attempt, "freeze", "cut", "drop"):
        return []
    named = _named(name, last)
    if innocent := named - culprits:
        return [Failure("blame", f"{name} names {_names(innocent)}: {last[:400]}")]
    known = culprits - _hit_by(attempt, "cut", "drop")  # both ends of a lost connection are there
    speaks = name == "chief 0" or "chief 0" not in attempt.names  # servers are told to end
    if known and not named and speaks and name not in culprits:
        return [Failure("blame", f"{name} does not name {_names(culprits)}: {last[:400]}")]
    return []


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _hit_by(attempt: Attempt, *kinds: str) -> set[str]:
    return {name for hit in attempt.hits if hit.fault.kind in kinds for name in hit.tasks}


def _culprits(attempt: Attempt) -> set[str]:
    """The tasks that may be named."""
    termed = {
        name
        for hit in attempt.hits
        for name in hit.tasks
        if hit.fault.kind in ("term", "int")
        and (
            "chief 0" in attempt.names
            or hit.fault.times > 1
            or _order(hit.marks[name]) < MARKS.index("training")
        )
    }
    stopped = {name for name in attempt.names if _gave_up_connecting(attempt, name)}
    return (
        termed
        | stopped
        | _hit_by(attempt, *("kill", "freeze", "hang", "raise", "cut", "drop", "disk"))
    )


def _named(own: str, line: str) -> set[str]:
    """The tasks that the last line of a task names."""
    line = re.sub(rf"^{own}( of \d+)?: ", "", line)
    blamed = line.rpartition("waiting for ")[2]
    named = {" ".join(pair) for pair in re.findall(r"\b(worker|ps) (\d+) (?:at|\()", blamed)}
    return named | ({"chief 0"} if re.search(r"^(ps|worker) .*the coordinator at", line) else set())


def _gave_up_connecting(attempt: Attempt, name: str) -> bool:
    """Whether TensorFlow never connected the task. To those that it had connected, the task looks
    lost: see the limits in ctl/distributed/watch/README.md."""
    return (
        re.search("TensorFlow has been connecting to the job .*; gave up", attempt.said[name])
        is not None
    )


def _allowed(attempt: Attempt, name: str) -> set[int]:
    """The exit codes that a task may have."""
    codes: set[int] = set()
    of_task = _codes_of_servers if "chief 0" in attempt.names else _codes_of_workers
    for hit in attempt.hits:
        if hit.fault.kind in _BENIGN:
            continue
        codes |= of_task(hit, name)
        if any(mark == f"resumed {STEPS}" for _, mark in attempt.marks[name]):
            codes.add(0)  # there was nothing left to train
    return codes or {0}


def _codes_of_workers(hit: Hit, name: str) -> set[int]:
    if hit.fault.kind == "int":
        return _as_term(hit, name, _codes_of_workers)
    kind, mark = hit.fault.kind, hit.marks[name]
    late = any(hit.marks[n] in _LATE for n in hit.tasks)
    if name in hit.tasks:
        own = {"kill": {-9}, "raise": {1}, "hang": {5}, "cut": {0, 5}, "freeze": {5}}
        own["drop"] = {5}
        own["disk"] = {0, 4} if late else {4}
        own["term"] = _TERMED if not mark else {0, 42} if late else {42}
        return own[kind] | (
            {0} if late and kind in ("freeze", "drop", "hang") or mark == "done" else set()
        )
    if kind == "term":
        ready = [_order(hit.marks[n]) >= MARKS.index("training") for n in hit.tasks]
        return {42} | (set() if all(ready) else {5}) | ({0, 5} if late else set())
    return {5} | ({0} if late or kind == "cut" else set())


def _as_term(hit: Hit, name: str, codes: Callable[[Hit, str], set[int]]) -> set[int]:
    """The codes after SIGINT: those after SIGTERM. The second one may end a task at once, which the
    others lose then."""
    term = dataclasses.replace(hit, fault=dataclasses.replace(hit.fault, kind="term"))
    return codes(term, name) | ({5, 130} if hit.fault.times > 1 else set())


def _codes_of_servers(hit: Hit, name: str) -> set[int]:
    if hit.fault.kind == "int":
        return _as_term(hit, name, _codes_of_servers)
    kind, chief = hit.fault.kind, hit.marks["chief 0"]
    late = chief in _LATE
    codes = {"kill": {5}, "freeze": {5}, "cut": {0, 5}, "raise": {1}, "disk": {4}, "term": {42}}
    ends = codes[kind]
    if _order(chief) < MARKS.index("training") and kind == "term":
        ends = {5} | (_TERMED if not hit.marks[name] else {42})
    own = {"kill": {-9}, "freeze": {5}, "cut": {0, 5}}.get(kind, ends)
    if all(n.startswith("worker") for n in hit.tasks) and kind != "freeze":
        # The others go on.
        return own | {0} if name in hit.tasks else {0}
    return (own if name in hit.tasks else ends) | ({0} if late or chief == "done" else set())


def _judge_state(attempt: Attempt, run_dir: Path, before: int) -> list[Failure]:
    failures = []
    for name in attempt.names:
        for _, mark in attempt.marks[name]:
            if mark.startswith("resumed") and int(mark.split()[1]) != before:
                failures.append(Failure("state", f"{name} {mark}, not from {before}"))
    now = to_resume_from(run_dir / "checkpoints")
    if now < before:
        failures.append(Failure("state", f"step {before} was saved; after the attempt it is {now}"))
    for name in attempt.names:
        for step in re.findall(r"saved step (\d+) in ", attempt.said[name])[-1:]:
            if now < int(step):
                failures.append(Failure("state", f"{name} has saved step {step}; there is {now}"))
    for hit in attempt.hits:
        code, words = _SAYS.get(hit.fault.kind, (None, ""))
        for name in hit.tasks:
            ended = attempt.ends[name] and attempt.ends[name][0][0] == code
            if ended and not re.search(words, attempt.said[name]):
                failures.append(Failure("blame", f"{name} does not say {words!r}"))
    return failures


def final_state(run_dir: Path) -> str:
    """A hash of all that the last checkpoint holds; its name and the files, bit for bit."""
    digest = hashlib.sha256()
    step = to_resume_from(run_dir / "checkpoints")
    digest.update(str(step).encode())
    for path in sorted(manifest.path_of(run_dir / "checkpoints", step).glob("variables.*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def wrong_variables(checkpoints: Path) -> str:
    """What is wrong with the last checkpoint of a job with parameter servers, or ""."""
    step = to_resume_from(checkpoints)
    if step != STEPS:
        return f"{step} steps were counted, not {STEPS}"
    child = os.fork()  # TensorFlow must start no thread in the process that forks
    if not child:
        code = 2
        try:
            import numpy as np
            import tensorflow as tf

            path = manifest.path_of(checkpoints, step)
            reader = tf.train.load_checkpoint(str(path / "variables"))
            values = [reader.get_tensor(n) for n in reader.get_variable_to_shape_map()]
            numbers = [v for v in values if getattr(v, "dtype", None) in (np.float32, np.int64)]
            code = 0 if numbers and all(np.isfinite(v).all() for v in numbers) else 1
        finally:
            os._exit(code)
    return "" if os.waitpid(child, 0)[1] == 0 else "a variable is not finite, or cannot be read"
