"""Trains drawn cases with ctl, and counts how they end.

python -m tests.fuzz.run --cases=5000 --seed=1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import multiprocessing
import queue
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from .cases import Case, drawn, parsed, simpler

SECONDS = 300  # after which a case hangs
_CASES_PER_PROCESS = 25  # TensorFlow does not free all that a case has used


def kept() -> dict[str, Case]:
    """Cases that failed once, by name."""
    text = (Path(__file__).parent / "kept.json").read_text("utf-8")
    return {name: parsed(values) for name, values in json.loads(text).items()}


class Judge:
    """Judges cases in a child process, which may die or hang."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._left = 0

    def __call__(self, case: Case) -> tuple[str, str]:
        """Returns kind and text of the `Verdict` on ``case``."""
        if not self._pool or not self._left:
            self.close()
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_prepare)
            self._left = _CASES_PER_PROCESS
        self._left -= 1
        try:
            return self._pool.submit(_judge, case).result(SECONDS)
        except TimeoutError:
            for process in multiprocessing.active_children():
                if process.pid in self._pool._processes:
                    process.kill()
            self._left = 0
            return "bug", f"hangs: no end after {SECONDS} s"
        except BrokenProcessPool:
            self._left = 0
            return "bug", "the process died"
        except Exception as error:  # noqa: BLE001
            return "bug", f"the fuzzer failed: {type(error).__name__}: {error}"

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()


def _prepare() -> None:
    """Gives a child process the devices of the tests."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "support")]
    import ctl_fixtures  # noqa: F401
    import tensorflow as tf

    from . import trial  # noqa: F401

    tf.get_logger().setLevel("ERROR")
    gc.freeze()  # each case ends with a collection, which need not look at modules


def _judge(case: Case) -> tuple[str, str]:
    from ctl_fixtures import mirrored_strategy

    from .trial import judge

    return tuple(judge(case, mirrored_strategy))  # a `Verdict` would import TensorFlow to read it


def judged(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, str, str]]:
    """Yields each case with kind and text of its verdict, in the order in which they end."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Case, str, str]] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)

    def work() -> None:
        with contextlib.closing(Judge()) as judge, contextlib.suppress(queue.Empty):
            while True:
                case = waiting.get_nowait()
                done.put((case, *judge(case)))

    with ThreadPoolExecutor(jobs) as threads:
        workers = [threads.submit(work) for _ in range(jobs)]
        try:
            for _ in cases:
                yield done.get()
        finally:
            while not waiting.empty():
                waiting.get_nowait()
    for worker in workers:
        worker.result()


def shrunk(case: Case, text: str, judge: Judge) -> Case:
    """The simplest case found that is a bug of the same kind as ``case``."""
    kind = _kind(text)
    for new in simpler(case):
        verdict, text = judge(new)
        if verdict == "bug" and _kind(text) == kind:
            return shrunk(new, text, judge)
    return case


def _kind(text: str) -> str:
    """What two texts of one kind of bug share: no names and no numbers."""
    return re.split(r"[^A-Za-z ]", text)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="how many to draw")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the cases")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--case", help="one case instead, as JSON or a name in kept.json")
    parser.add_argument("--shrink", action="store_true", help="look for a simpler case of a bug")
    options = parser.parse_args()
    if options.case:
        cases = [kept().get(options.case) or parsed(json.loads(options.case))]
    else:
        print(f"seed {options.seed}")
        cases = drawn(options.cases, options.seed)
    began = time.monotonic()
    kinds: collections.Counter[str] = collections.Counter()
    texts: collections.Counter[str] = collections.Counter()
    with contextlib.closing(judged(cases, options.jobs)) as results:
        for number, (case, kind, text) in enumerate(results, 1):
            kinds[kind] += 1
            if kind == "bug":
                print(f"\rbug: {case}\n  {text}", flush=True)
                if options.shrink:
                    with contextlib.closing(Judge()) as judge:
                        print(f"  simplest: {shrunk(case, text, judge)}", flush=True)
            elif text:
                texts[f"{kind}: {text}"] += 1
            seconds = time.monotonic() - began
            line = f"{number}/{len(cases)}, {kinds['bug']} bugs, {seconds / number:.1f} s a case"
            print(f"\r{line} ", end="\n" if number % 50 == 0 else "", flush=True)
            if seconds > 60 * options.minutes:
                break
    print("\n")
    for name, count in [*kinds.most_common(), *texts.most_common()]:
        print(f"{count:6d}  {name}")
    sys.exit(kinds["bug"] > 0)


if __name__ == "__main__":
    main()
