"""How many seconds from the start of a process until a model has an accuracy?

    python benchmarks/time_to_accuracy.py
    python benchmarks/time_to_accuracy.py --dataset=fashion_mnist,mnist --data_dir=DIR --json=FILE

One recipe in ctl, Keras `fit`, Orbit and PyTorch: the same model, optimizer, schedule, batch size
and evaluations. Each run is a new process with a seed of its own (`peers/`); the variants take
turns. The same command with the same --json goes on after the runs that the file has. README.md
says what counts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags
from processes import PEERS, Peer, check_names, in_turn, machine, progress, write

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import check_flags, group, run_command


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, and the accuracy at which the clock stops."""

    goal: float
    model: str
    global_batch_size: int
    learning_rate: float
    steps: int
    evaluate_every: int

    def flags(self) -> list[str]:
        """The flags of a peer."""
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]


# Dataset -> the recipe of all variants, and the cheapest that we found for ctl.
RECIPES = {
    "fashion_mnist_mini": Recipe(0.86, "dense", 64, 2e-3, 2000, 250),
    "fashion_mnist": Recipe(0.905, "convnet", 128, 2e-3, 2500, 250),
    "mnist": Recipe(0.985, "convnet", 128, 2e-3, 2500, 250),
}
CHEAPEST = {
    "fashion_mnist_mini": Recipe(0.86, "convnet", 64, 3e-3, 450, 50),
    "fashion_mnist": Recipe(0.905, "convnet", 128, 7e-3, 1375, 1375),
    "mnist": Recipe(0.985, "convnet", 128, 6e-3, 1000, 1000),
}

# Variant -> script and its arguments.
VARIANTS = {
    "ctl": ["accuracy_ctl.py"],
    "ctl_auto": ["accuracy_ctl.py", "--tune"],
    "ctl_xla": ["accuracy_ctl.py", "--jit_compile"],
    "cheapest": ["accuracy_ctl.py"],
    "fit": ["accuracy_fit.py"],
    "fit_50": ["accuracy_fit.py", "--steps_per_execution=50"],
    "orbit": ["accuracy_orbit.py"],
    "torch": ["accuracy_torch.py"],
}
_GOAL = 0.8  # of the best peer

with group("What is trained"):
    _DATASETS = flags.DEFINE_list("dataset", "fashion_mnist_mini", ", ".join(RECIPES))
    _DATA_DIR = flags.DEFINE_string(
        "data_dir", None, "the folder of TFDS in which they are prepared"
    )
    _VARIANTS = flags.DEFINE_list(
        "variants", "ctl,ctl_auto,cheapest,fit_50,orbit,torch", ", ".join(VARIANTS)
    )
    _STEPS = flags.DEFINE_integer("steps", None, "in place of those of the recipe", lower_bound=1)
with group("How"):
    _SEEDS = flags.DEFINE_integer("seeds", 10, "runs of each variant", lower_bound=1)
    _TIMEOUT = flags.DEFINE_float("timeout", 600.0, "seconds for the answer of a process")
    _JSON = flags.DEFINE_string(
        "json", None, "file for the results; runs that it holds are not repeated"
    )


def _check(dataset: list[str], variants: list[str]) -> None:
    check_names("unknown dataset", dataset, RECIPES)
    check_names("unknown variant", variants, VARIANTS)


check_flags(["dataset", "variants"], _check)


def recipe_of(dataset: str, variant: str) -> Recipe:
    recipe = (CHEAPEST if variant == "cheapest" else RECIPES)[dataset]
    return dataclasses.replace(recipe, steps=_STEPS.value) if _STEPS.value else recipe


def run(dataset: str, variant: str, seed: int, arrays: str) -> dict[str, Any]:
    """Trains once, in a new process.

    Returns:
        ``seconds`` from the start of the process to the evaluation that reached the goal, None if
        none did; its ``step``; ``accuracies`` of all evaluations; versions. Or ``failure``.
    """
    recipe = recipe_of(dataset, variant)
    command = [*VARIANTS[variant], *recipe.flags(), f"--dataset={dataset}", f"--seed={seed}"]
    if _DATA_DIR.value:
        command.append(f"--data_dir={_DATA_DIR.value}")
    if command[0] == "accuracy_torch.py":
        command.append(f"--arrays={arrays}")
    begin = time.perf_counter()
    peer = Peer(variant, command)
    accuracies: list[float] = []
    try:
        while True:
            answer = peer.answer(_TIMEOUT.value)
            accuracies.append(answer["accuracy"])
            seconds = time.perf_counter() - begin
            reached = answer["accuracy"] >= recipe.goal
            if reached or answer["step"] >= recipe.steps:
                return {
                    "seconds": seconds if reached else None,
                    "step": answer["step"],
                    "accuracies": accuracies,
                    **peer.answer(_TIMEOUT.value),
                }
    except CtlError as error:
        return {"failure": str(error).removeprefix(f"{variant}: ")}
    finally:
        peer.close()


def median(runs: list[dict[str, Any]]) -> float:
    """Of the seconds; infinite if half of the runs did not reach the goal."""
    return statistics.median(math.inf if r["seconds"] is None else r["seconds"] for r in runs)


def show(dataset: str, by_variant: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{dataset}: {RECIPES[dataset]}")
    print(f"{'':10}{'reached':>9}{'seconds':>9}{'min':>8}{'max':>8}{'steps':>8}{'accuracy':>10}")
    for variant, runs in by_variant.items():
        if failed := [r["failure"] for r in runs if "failure" in r]:
            print(f"{variant:10}fails: {failed[0]}")
            continue
        reached = [r for r in runs if r["seconds"] is not None]
        times = [r["seconds"] for r in reached] or [math.nan]
        last = statistics.median(r["accuracies"][-1] for r in runs)
        print(
            f"{variant:10}{f'{len(reached)} of {len(runs)}':>9}{median(runs):9.1f}"
            f"{min(times):8.1f}{max(times):8.1f}{statistics.median(r['step'] for r in runs):8.0f}"
            f"{last:10.4f}"
        )
    worked = {v: median(runs) for v, runs in by_variant.items() if "failure" not in runs[0]}
    peers = {v: s for v, s in worked.items() if not v.startswith(("ctl", "cheapest"))}
    if not peers or math.isinf(min(peers.values())):
        return
    best = min(peers, key=peers.__getitem__)
    for variant, seconds in worked.items():
        if variant not in peers:
            ratio = seconds / peers[best]
            verdict = "met" if ratio <= _GOAL else "missed"
            print(f"{variant} over {best}, the best peer: {ratio:.2f} (goal {_GOAL}: {verdict})")


def _stored(path: str | None) -> dict[str, Any]:
    if path is None or not os.path.exists(path):
        return {}
    try:
        return json.loads(pathlib.Path(path).read_text())["runs"]
    except (ValueError, KeyError) as error:
        raise UsageError(f"--json={path} is not a file of this program: {error}") from error


def main() -> None:
    stored, about = _stored(_JSON.value), machine(os.getloadavg()[0])
    print(*(f"{key}={value}" for key, value in about.items()))
    for dataset in _DATASETS.value:
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in _VARIANTS.value}
        with tempfile.TemporaryDirectory() as arrays:
            for seed in range(1, _SEEDS.value + 1):
                for variant in in_turn(measured, seed):
                    # A run of another recipe is none of this one.
                    key = f"{dataset} {variant} {seed} {recipe_of(dataset, variant)}"
                    if key not in stored:
                        progress(f"{dataset}, seed {seed} of {_SEEDS.value}: {variant}")
                        reads = variant == "torch" and importlib.util.find_spec("torch")
                        if reads and not os.listdir(arrays):
                            _write_arrays(dataset, arrays)
                        stored[key] = run(dataset, variant, seed, arrays)
                        progress("")
                        _say(dataset, variant, seed, stored[key])
                    measured[variant].append(stored[key])
                    write(_JSON.value, {"machine": about, "runs": stored}, say=False)
        show(dataset, measured)


def _write_arrays(dataset: str, folder: str) -> None:
    command = [sys.executable, PEERS / "arrays.py", dataset, folder]
    done = subprocess.run(
        [*command, *([_DATA_DIR.value] if _DATA_DIR.value else [])], capture_output=True, text=True
    )
    if done.returncode:
        raise CtlError(f"arrays.py: {done.stderr.strip().splitlines()[-1]}")


def _say(dataset: str, variant: str, seed: int, of: dict[str, Any]) -> None:
    said = f"fails: {of['failure']}" if "failure" in of else "did not reach the goal"
    if of.get("seconds"):
        said = f"{of['seconds']:.1f} s"
    last = f", {of['accuracies'][-1]:.4f} at step {of['step']}" if "step" in of else ""
    print(f"{dataset}, seed {seed}, {variant}: {said}{last}", flush=True)


if __name__ == "__main__":
    run_command(main, __doc__)
