"""Which way to communicate pays on a slow link, and does the cost model know beforehand?

    sudo python benchmarks/low_communication.py                    # time per step, bytes
    python benchmarks/low_communication.py --what=accuracy         # of 5 seeds each

Trains with the all-reduce of `ctl.TrainStep` and with the recipes that communicate less, between
workers in network namespaces. First the links are fast: `ctl.inspect predict` gets the plans and
the times of these steps, and predicts all slower links. Then the rate is limited, and the methods
train in turn. Between the blocks of a method nothing else runs. README.md says how the numbers are
derived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import shaped
from absl import flags
from processes import Peer, ask_all, check_names, in_turn, machine, progress, tasks, write

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import check_flags, group, run_command

with group("What is trained"):
    _WHAT = flags.DEFINE_enum("what", "time", ["time", "accuracy"], "which table")
    _METHODS = flags.DEFINE_list("methods", None, "some of them (default: all)")
    _MODELS = flags.DEFINE_list("models", "dense,convnet", "functions of ctl.jobs.models")
    _WORKERS = flags.DEFINE_list("workers", "2,4", "numbers of workers")
    _BATCH = flags.DEFINE_integer("batch", 128, "examples of all workers", lower_bound=1)
with group("How the time is measured"):
    _MBIT = flags.DEFINE_list("mbit", "10,100,500", "rates of the links, megabits per second")
    _ROUNDS = flags.DEFINE_integer("rounds", 3, "of every method in turn", lower_bound=1)
    _WARM_UP = flags.DEFINE_integer("warm_up", 200, "steps of each method before", lower_bound=1)
    _SECONDS = flags.DEFINE_float("seconds", 2.0, "of a block, about", lower_bound=0)
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
with group("How the accuracy is measured"):
    _SEEDS = flags.DEFINE_integer("seeds", 5, "runs of each", lower_bound=2)
    _STEPS = flags.DEFINE_integer("train_steps", 1000, "of each run", lower_bound=1)
with group("Results"):
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_FAST = 100_000.0  # megabits per second: more than these processes send
_LEAST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Method:
    """A step that communicates in some way.

    Attributes:
        step: its class.
        options: of the class, which are also flags of ctl.train.
        every: steps from one use of its conditional collectives to the next.
    """

    step: str = "ctl:TrainStep"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    every: int = 1

    @property
    def each_step(self) -> bool:
        """Whether gradients cross in every step, so that all replicas have the same weights."""
        return self.every == 1


_COMPRESSED = "ctl.recipes.compressed:Compressed"
METHODS = {
    "all_reduce": Method(),
    "fp16": Method(_COMPRESSED, {"compressor": "fp16"}),
    "int8": Method(_COMPRESSED, {"compressor": "int8"}),
    "topk": Method(_COMPRESSED, {"compressor": "topk"}),
    "powersgd": Method("ctl.recipes.powersgd:PowerSGD", {"powersgd_rank": 2}),
    "local_sgd": Method("ctl.recipes.local_sgd:LocalSGD", {"local_steps": 8}, 8),
    "diloco": Method("ctl.recipes.diloco:DiLoCo", {"local_steps": 50}, 50),
}


def _check(methods: list[str] | None, workers: list[str], mbit: list[str]) -> None:
    check_names("unknown method", methods or [], METHODS)
    if not all(n.isdigit() and int(n) > 1 for n in workers):
        raise UsageError(f"--workers={','.join(workers)}: give numbers of 2 or more")
    with contextlib.suppress(ValueError):
        if all(float(rate) > 0 for rate in mbit):
            return
    raise UsageError(f"--mbit={','.join(mbit)}: give positive rates")


check_flags(["methods", "workers", "mbit"], _check)


def chosen() -> dict[str, Method]:
    return {n: m for n, m in METHODS.items() if not _METHODS.value or n in _METHODS.value}


@dataclasses.dataclass
class Workers:
    """Processes that train together, each in a network namespace."""

    peers: list[Peer]
    places: list[tuple[list[str], str]]

    def ask(self, method: Method, what: str, **request: Any) -> list[dict[str, Any]]:
        """The answers of all; see `peers/methods_worker.py`."""
        asked = {"what": what, "step": method.step, "options": method.options}
        return ask_all(self.peers, _TIMEOUT.value, **asked, **request)

    def train(self, method: Method, expected: float) -> dict[str, float]:
        """Trains a block: of the slowest worker, ``seconds`` of a step, and ``sent`` bytes of the
        worker that sent most. ``expected``: about the seconds of a step."""
        steps = max(_LEAST_STEPS, round(_SECONDS.value / expected))
        steps = -(-steps // method.every) * method.every
        answers = self.ask(method, "run", steps=steps)
        return {key: max(a[key] for a in answers) / steps for key in ("seconds", "sent")}

    def measure(self, methods: dict[str, Method], expected: dict[str, float]) -> dict[str, Any]:
        """Trains --rounds blocks of each method in turn: medians."""
        blocks: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
        for number in range(_ROUNDS.value):
            for name in in_turn(methods, number):
                progress(f"round {number + 1} of {_ROUNDS.value}: {name}")
                blocks[name].append(self.train(methods[name], expected[name]))
        progress("")
        return {
            name: {key: statistics.median(b[key] for b in found) for key in ("seconds", "sent")}
            for name, found in blocks.items()
        }


@contextlib.contextmanager
def started(model: str, count: int) -> Iterator[Workers]:
    """Starts the workers, and ends them on exit."""
    script = ["methods_worker.py", f"--model={model}", f"--batch={_BATCH.value}"]
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(shaped.namespaces(count, _FAST, 0.0))
        peers = [
            stack.enter_context(Peer(f"worker {index}", script, task, inside))
            for index, (task, (inside, _)) in enumerate(
                zip(tasks(shaped.addresses(places)), places, strict=True)
            )
        ]
        for peer in peers:
            peer.answer(_TIMEOUT.value)
        yield Workers(peers, places)


def predicted(
    folder: pathlib.Path, methods: dict[str, Method], fast: dict[str, Any], count: int, mbit: str
) -> dict[str, dict[str, float]]:
    """What ``ctl.inspect predict`` says of a link, from plans in ``folder`` and ``fast`` steps."""
    given = [
        f"{folder / name}.json@{fast[name]['seconds'] * 1e3:.4f}ms/{method.every}"
        for name, method in methods.items()
    ]
    command = [sys.executable, "-m", "ctl.inspect", "predict", f"--methods={','.join(given)}"]
    command += [f"--outer=0us,{mbit}Mbit/s", f"--replicas={count}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CtlError(f"ctl.inspect predict: {done.stderr.strip()}")
    return {each["name"]: each for each in json.loads(done.stdout)["methods"][str(count)]}


def time_of(model: str, count: int) -> list[dict[str, Any]]:
    """A row for each rate and method."""
    methods, rows = chosen(), []
    with tempfile.TemporaryDirectory() as name, started(model, count) as workers:
        folder = pathlib.Path(name)
        for title, method in methods.items():
            progress(f"{model}, {count} workers: compiling {title}")
            (folder / f"{title}.json").write_text(json.dumps(workers.ask(method, "plan")[0]))
            workers.ask(method, "run", steps=_WARM_UP.value)
        fast = workers.measure(methods, dict.fromkeys(methods, 0.01))
        for rate in _MBIT.value:
            guess = predicted(folder, methods, fast, count, rate)
            shaped.limit(workers.places, float(rate))
            seen = workers.measure(methods, {n: guess[n]["step"] for n in methods})
            shaped.limit(workers.places, _FAST)
            for title, method in methods.items():
                rows.append(
                    {
                        "model": model,
                        "workers": count,
                        "mbit": float(rate),
                        "method": title,
                        "each_step": method.each_step,
                        "fast": fast[title]["seconds"],
                        "step": seen[title]["seconds"],
                        "predicted": guess[title]["step"],
                        "sent": seen[title]["sent"],
                        "planned": guess[title]["sent"],
                    }
                )
            print_cell(rows[-len(methods) :])
    return rows


def print_cell(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['model']}, {first['workers']} workers, {first['mbit']:g} Mbit/s")
    print(
        f"{'method':<12}{'KiB/step':>10}{'counted':>10}{'fast ms':>10}{'step ms':>10}"
        f"{'predicted':>11}{'error':>7}"
    )
    for row in rows:
        print(
            f"{row['method']:<12}{row['planned'] / 1024:10.1f}{row['sent'] / 1024:10.1f}"
            f"{row['fast'] * 1e3:10.2f}{row['step'] * 1e3:10.2f}{row['predicted'] * 1e3:11.2f}"
            f"{row['predicted'] / row['step'] - 1:+7.0%}",
            flush=True,
        )


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell: the fastest method, and the one that was predicted to be; once of all methods,
    and once of those in which all replicas have the same weights."""
    cells = []
    keys = {(r["model"], r["workers"], r["mbit"]): None for r in rows}
    for key in keys:
        here = [r for r in rows if (r["model"], r["workers"], r["mbit"]) == key]
        for among, some in (("all", here), ("same weights", [r for r in here if r["each_step"]])):
            if len(some) < 2:
                continue
            best = min(some, key=lambda r: r["step"])
            named = min(some, key=lambda r: r["predicted"])
            cells.append(
                {
                    "cell": key,
                    "among": among,
                    "fastest": best["method"],
                    "predicted": named["method"],
                    "loses": named["step"] / best["step"] - 1,
                }
            )
    return cells


def print_verdict(cells: list[dict[str, Any]]) -> None:
    print(f"\n{'cell':<32}{'among':<14}{'fastest':<12}{'predicted':<12}{'loses':>6}")
    for each in cells:
        model, count, mbit = each["cell"]
        title = f"{model}, {count} workers, {mbit:g} Mbit/s"
        loses = f"{each['loses']:6.0%}" if each["loses"] else ""
        print(f"{title:<32}{each['among']:<14}{each['fastest']:<12}{each['predicted']:<12}{loses}")
    right = sum(each["fastest"] == each["predicted"] for each in cells)
    print(f"the winner was predicted in {right} of {len(cells)} cells")


def accuracy_of(model: str, count: int, name: str, method: Method) -> dict[str, Any]:
    """Mean and deviation of the accuracy over --seeds seeds, on replicas of one process."""
    progress(f"{model}, {count} replicas: {name}")
    options = [f"--{key}={value}" for key, value in method.options.items()]
    inner = "adamw" if name == "diloco" else "adam"  # as in its paper
    command = [sys.executable, "-m", "ctl.recipes.population", f"--seeds={_SEEDS.value}"]
    command += [f"--step={method.step}", *options, f"--optimizer={inner}", f"--model={model}"]
    command += [f"--replicas={count}", f"--global_batch_size={_BATCH.value}"]
    command += [f"--train_steps={_STEPS.value}", f"--evaluate_every={_STEPS.value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    progress("")
    if done.returncode:
        raise CtlError(f"{name}: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    (titles,) = (words for words in lines if words[:1] == ["seed"] and "accuracy" in words)
    column = titles.index("accuracy")
    found = {words[0]: float(words[column]) for words in lines if words[:1] in _STATISTICS}
    row = {"model": model, "workers": count, "method": name, **found}
    print(
        f"{model:<10}{count:>8}  {name:<12}{found['mean']:9.4f} ± {found['deviation']:.4f}"
        f"{found['least']:10.4f}{found['most']:8.4f}",
        flush=True,
    )
    return row


_STATISTICS = (["mean"], ["deviation"], ["least"], ["most"])


def main() -> None:
    load = os.getloadavg()[0]
    cells = [(m, int(n)) for m in _MODELS.value for n in _WORKERS.value]
    content: dict[str, Any] = {"machine": machine(load)}
    print(" ".join(f"{k}={v}" for k, v in content["machine"].items()))
    if _WHAT.value == "time":
        rows = [row for cell in cells for row in time_of(*cell)]
        content |= {"rows": rows, "cells": judged(rows)}
        print_verdict(content["cells"])
    else:
        print(
            f"{'model':<10}{'replicas':>8}  {'method':<12}{'accuracy':>18}{'least':>10}{'most':>8}"
        )
        content["rows"] = [
            accuracy_of(*cell, name, method) for cell in cells for name, method in chosen().items()
        ]
    write(_JSON.value, content)


if __name__ == "__main__":
    run_command(main, __doc__)
