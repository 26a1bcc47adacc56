"""Are checkpoints in an object store safe from what may happen to it?

    python -m tests.chaos.stores --faults=1000 --seed=1
    python -m tests.chaos.stores --cases=1 --seed=17     # one again: the i-th case uses seed + i

A case is a run of some attempts in ``faulty://``, see ``tests/support/faulty_store.py``. Each
attempt is a process. It resumes from the last checkpoint, writes checkpoints as a
`CheckpointManager` does, with retention, and says which of them were copied to the store. Its
requests fail as the case draws it, and the process is killed within one. A few cases give up, as
training does after ``--keep_trying``. After each attempt, all that its last reader needs must hold:

- the checkpoint that a reader tries first is intact by its checksums, and has what was written;
- it is at least the last one that was said to be in the store;
- no writer begins before it, nor before the last one that was written on its machine. A part of the
  attempts are on another machine, whose cache is empty.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from faulty_store import KINDS, Faults, FaultyFileSystem  # noqa: E402

from ctl.base import durable, stores  # noqa: E402
from ctl.checkpoint import manifest, mirror  # noqa: E402
from ctl.checkpoint.manifest import Saved  # noqa: E402
from ctl.checkpoint.mirror import Mirror  # noqa: E402
from ctl.errors import CheckpointError  # noqa: E402

_KEEP = 3
_SECONDS = 60  # of an attempt


_DATA = "variables.data-00000-of-00001"


def content(seed: int, step: int) -> bytes:
    """The bytes of the checkpoint: 1 to 100 kB."""
    drawn = random.Random(f"{seed} {step}")
    return drawn.randbytes(drawn.randint(1_000, 100_000))


def write(directory: Path, seed: int, step: int) -> None:
    """Writes a checkpoint as a manager does, and applies retention."""
    unfinished = durable.scratch(directory, f"step-{step:010d}")
    unfinished.mkdir()
    (unfinished / "variables.index").write_bytes(hashlib.sha256(content(seed, step)).digest())
    (unfinished / _DATA).write_bytes(content(seed, step))
    saved = Saved(
        *(step, manifest.path_of(directory, step), time.time(), {}, (), None, {}),
        files=durable.seal(unfinished),
        versions={},
        code=None,
    )
    manifest.dump(saved, unfinished, via=directory)
    durable.publish(unfinished, saved.path)
    manifest.commit(directory, step)
    for old in sorted(manifest.paths(directory))[:-_KEEP]:
        durable.discard(manifest.path_of(directory, old))


def attempt(url: str, seed: int, number: int, told: int) -> None:
    """One process: resumes, saves some, and tells ``told``, a descriptor, what has happened."""

    def tell(line: str) -> None:
        os.write(told, f"{line}\n".encode())

    drawn = random.Random(f"{seed} {number}")
    rate = drawn.choice([0.02, 0.05, 0.1, 0.2])
    kinds = tuple(drawn.sample(KINDS, drawn.randint(1, len(KINDS))))
    FaultyFileSystem.faults = Faults(drawn.randrange(1 << 30), rate, kinds, tell)
    with Mirror(url, keep_trying=drawn.choice([0.05, 1.0, 20.0])) as run:
        run.own()
        last = run.bring_last()
        step = last.step if last else 0
        tell(f"resumed {step}")
        directory = run.directory / "checkpoints"
        directory.mkdir(exist_ok=True)
        for _ in range(drawn.randint(1, 6)):
            step += 1
            write(directory, seed, step)
            (run.directory / "metrics.jsonl").write_text(f"{step}\n")
            run.changed()
            tell(f"wrote {step}")
            if drawn.random() < 0.7:
                run.flush()
                tell(f"saved {step}")
            run.check()
        run.flush()
        tell(f"saved {step}")


def case(seed: int, folder: Path, count: collections.Counter[str]) -> list[str]:
    """Runs a case; returns what does not hold."""
    url, failures, saved, wrote = f"faulty://{folder}/store/run", [], 0, 0
    drawn = random.Random(seed)
    for number in range(drawn.randint(2, 5)):
        if drawn.random() < 0.3:  # another machine
            shutil.rmtree(f"{os.environ['XDG_CACHE_HOME']}/ctl", ignore_errors=True)
            wrote = 0
        readable, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(readable)
                signal.alarm(_SECONDS)
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                attempt(url, seed, number, told)
                os._exit(0)
            except CheckpointError as error:
                os.write(told, f"gave up {error}\n".encode())
                os._exit(4)
            except BaseException as error:
                os.write(told, f"wrong {error!r}\n".encode())
                os._exit(1)
        os.close(told)
        with open(readable) as lines:
            said = lines.read().splitlines()
        _, status = os.waitpid(child, 0)
        count["attempts"] += 1
        count["given up"] += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 4
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            failures.append(f"attempt {number}: signal {os.WTERMSIG(status)}")
        for line in said:
            word, _, rest = line.partition(" ")
            if word == "saved":
                saved = int(rest)
            elif word == "wrote":
                wrote = int(rest)
            elif word == "resumed" and int(rest) < max(saved, wrote):
                what = f"{saved} was saved, {wrote} written"
                failures.append(f"attempt {number}: resumed at {rest}, and {what}")
            elif word == "wrong":
                failures.append(f"attempt {number}: {rest}")
            elif word in KINDS:
                count[word] += 1
        FaultyFileSystem.faults = None
        failures += [f"after attempt {number}: {why}" for why in judge(url, seed, saved)]
    return failures


def judge(url: str, seed: int, saved: int) -> list[str]:
    """What a reader of the store finds wrong."""
    with Mirror(url, writes=False) as reader:
        directory = reader.directory / "checkpoints"
        steps = manifest.newest_first(directory)
        last = reader.bring_last()
        data = last and (last.path / _DATA).read_bytes()
        shutil.rmtree(reader.directory)
    if not steps:
        return [f"nothing is there, and {saved} was saved"] if saved else []
    if last is None or last.step != steps[0]:
        return [f"the newest, {steps[0]}, cannot be read; {last.step if last else None} can"]
    wrong = []
    if last.step < saved:
        wrong.append(f"the newest is {last.step}, and {saved} was saved")
    if data != content(seed, last.step):
        wrong.append(f"{last.step} has other bytes")
    return wrong


def run(faults: int | None, cases: int | None, seed: int) -> tuple[str, list[str]]:
    """Runs cases until there were so many ``faults`` or ``cases``; returns what to say."""
    count: collections.Counter[str] = collections.Counter()
    failures, done, began = [], 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache"),
        mock.patch.object(stores, "_FIRST_PAUSE", 0.0005),
        mock.patch.object(stores, "_PART", 20_000),
        mock.patch.object(mirror, "_LONGEST_PAUSE", 0.01),
    ):
        os.mkdir(f"{folder}/cache", 0o700)
        while done < cases if cases is not None else sum(count[k] for k in KINDS) < (faults or 0):
            place = Path(folder, str(done))
            place.mkdir()
            failures += [f"seed {seed + done}: {why}" for why in case(seed + done, place, count)]
            shutil.rmtree(place)
            shutil.rmtree(f"{folder}/cache/ctl", ignore_errors=True)
            done += 1
    faulty = ", ".join(f"{count[kind]} {kind}" for kind in KINDS)
    total = sum(count[kind] for kind in KINDS)
    return (
        f"{done} cases, {count['attempts']} attempts, of which {count['given up']} gave up; "
        f"{total} faults: {faulty}; {len(failures)} failures; {time.monotonic() - began:.0f} s"
    ), failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    said, failures = run(given.faults, given.cases, given.seed)
    print("\n".join([*failures, said]))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
