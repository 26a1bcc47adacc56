"""How long does a step take in ctl's loop, in other loops, and at the least?

    python benchmarks/step_time.py --model=dense --global_batch_size=64
    python benchmarks/step_time.py --model=dense,convnet --replicas=1,2 --global_batch_size=128
    python benchmarks/step_time.py --variants=ctl,plain,torch --workers=2 --global_batch_size=128

Every variant trains in its own process (`peers/`; with several workers, one for each), in blocks of
--steps steps. The blocks of the variants are interleaved, so that all see the same disturbances of
the machine. A variant that is not installed, or cannot do what is asked, is shown with the reason.
README.md says how the numbers are derived.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import bars
from absl import flags
from processes import Peer, check_names, in_turn, machine, progress, summary, write

from ctl.base.names import check_model_name
from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import group, run_command
from ctl.launch import THREADS, cluster, threads_of

# Variant -> script and its arguments. A `bound` trains on one fixed batch: it has no input
# pipeline, and does not learn the task.
VARIANTS = {
    "ctl": ["ctl_loop.py"],
    "ctl_off": ["ctl_loop.py", "--off"],
    "ctl_xla": ["ctl_loop.py", "--jit_compile"],
    "fit": ["keras_fit.py"],
    "fit_50": ["keras_fit.py", "--steps_per_execution=50"],
    "orbit": ["orbit_loop.py"],
    "plain": ["plain_loop.py"],
    "plain_xla": ["plain_loop.py", "--jit_compile"],
    "torch": ["torch_loop.py"],
    "torch_compile": ["torch_loop.py", "--jit_compile"],
    "fabric": ["fabric_loop.py"],
    "bound": ["plain_loop.py", "--fixed_batch"],
    "bound_xla": ["plain_loop.py", "--fixed_batch", "--jit_compile"],
}

with group("What is measured"):
    _VARIANTS = flags.DEFINE_list("variants", "ctl,plain,bound,bound_xla", ", ".join(VARIANTS))
    _REFERENCE = flags.DEFINE_string("reference", "plain", "the variant that times are divided by")
    _MODELS = flags.DEFINE_list("model", "dense", "models of ctl.jobs.models")
    _BATCHES = flags.DEFINE_list("global_batch_size", "64", "examples per step")
    _REPLICAS = flags.DEFINE_list(
        "replicas", "1", "replicas in one process; logical CPU devices where there is no GPU"
    )
    _WORKERS = flags.DEFINE_integer(
        "workers", 1, "processes on loopback that train together", lower_bound=1
    )
with group("How"):
    _PROCESSES = flags.DEFINE_integer(
        "processes", 2, "processes of each variant, one after the other", lower_bound=1
    )
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "rounds of each process", lower_bound=1)
    _BLOCKS = flags.DEFINE_integer("blocks", 2, "blocks of each variant in a round", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 1000, "steps of a block", lower_bound=1)
    _WARM_UP = flags.DEFINE_integer(
        "warm_up", 3, "blocks before the first round, not timed", lower_bound=1
    )
    _TOLERANCE = flags.DEFINE_float(
        "tolerance", 0.2, "largest relative difference of the final losses", lower_bound=0.0
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
with group("Results"):
    _JSON = flags.DEFINE_string("json", None, "file for the results")
    _SVG = flags.DEFINE_string("svg", None, "file for a bar chart of the times")

# Below this loss a network has memorized the examples; relative differences mean nothing.
_BY_HEART = 0.1


class Job:
    """A variant and its processes, one for each worker, which train together."""

    def __init__(self, variant: str, arguments: Sequence[str], workers: int):
        self.variant = variant
        self._peers: list[Peer] = []
        addresses = cluster(workers)["worker"]
        # As under `ctl.launch`. The peers of PyTorch have one thread, as under torchrun.
        threads = {THREADS: os.environ.get(THREADS, threads_of(workers))}
        for index in range(workers):
            task = [f"--workers={','.join(addresses)}", f"--worker_index={index}"]
            command = [*VARIANTS[variant], *arguments, *(task if workers > 1 else [])]
            self._peers.append(Peer(variant, command, threads if workers > 1 else None))

    def answer(self) -> dict[str, Any]:
        """Waits for all workers and returns the answer of the first, with the CPU time of all.

        Raises:
            CtlError: a process ended, or did not answer in --timeout seconds.
        """
        answers = [peer.answer(_TIMEOUT.value) for peer in self._peers]
        if "cpu_seconds" in answers[0]:
            answers[0]["cpu_seconds"] = sum(answer["cpu_seconds"] for answer in answers)
        return answers[0]

    def train(self, steps: int) -> dict[str, Any]:
        """Trains a block of ``steps`` steps.

        Returns:
            ``{"steps": int, "seconds": float, "cpu_seconds": float, "loss": float}``.

        Raises:
            CtlError: as `answer`.
        """
        for peer in self._peers:
            peer.say(str(steps))
        return self.answer()

    def close(self) -> None:
        """Kills the processes."""
        for peer in self._peers:
            peer.close()


class Measured:
    """Results of one variant in one setting; ms per step, one value for each round."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.loss = 0.0
        self.about: dict[str, Any] = {}
        self.failure = ""


def measure(arguments: Sequence[str], where: str) -> dict[str, Measured]:
    """Runs every variant. The time of a round is the median of its blocks. ``where`` is the title
    of the progress line."""
    measured = {variant: Measured() for variant in _VARIANTS.value}
    for process in range(_PROCESSES.value):
        title = f"{where}, process {process + 1}/{_PROCESSES.value}"
        with contextlib.ExitStack() as stack:
            jobs = []
            for variant, its in measured.items():
                if its.failure:
                    continue
                progress(f"{title}: {variant} warms up")
                job = Job(variant, arguments, _WORKERS.value)
                stack.callback(job.close)
                try:
                    its.about = job.answer()
                    for _ in range(_WARM_UP.value):
                        job.train(_STEPS.value)
                except CtlError as error:
                    its.failure = str(error)
                    job.close()
                else:
                    jobs.append(job)
            for number in range(_ROUNDS.value):
                for job in in_turn(jobs, number):
                    progress(f"{title}, round {number + 1}/{_ROUNDS.value}: {job.variant}")
                    blocks = [job.train(_STEPS.value) for _ in range(_BLOCKS.value)]
                    its = measured[job.variant]
                    for of, key in ((its.times, "seconds"), (its.cpu_times, "cpu_seconds")):
                        of.append(statistics.median(1e3 * b[key] / b["steps"] for b in blocks))
                    its.loss = blocks[-1]["loss"]
    progress("")
    return measured


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raises `CtlError` if a final loss differs from the median by more than ``tolerance``
    (relative). Variants that train on one fixed batch are left out."""
    learned = {v: loss for v, loss in losses.items() if not v.startswith("bound")}
    middle = statistics.median(learned.values())
    for variant, loss in learned.items():
        if not abs(loss - middle) <= tolerance * max(middle, _BY_HEART):
            raise CtlError(
                f"{variant} does not learn what the others do: its loss is {loss:.4f}, theirs "
                f"{middle:.4f}; its times mean nothing (see --tolerance)"
            )


def _rows(measured: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """What the JSON file and the table have of each variant."""
    reference = measured[_REFERENCE.value].times
    return {
        variant: {"failure": its.failure}
        if its.failure
        else {
            "milliseconds": summary(its.times),
            "cpu_milliseconds": summary(its.cpu_times),
            "ratio": summary([a / b for a, b in zip(its.times, reference, strict=True)]),
            "loss": its.loss,
            "rounds": its.times,
            **its.about,
        }
        for variant, its in measured.items()
    }


def _show(rows: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'':14}{'ms/step':>9}{'min':>9}{'max':>9}{'ratio':>9}{'min':>7}{'max':>7}"
        f"{'CPU ms':>10}{'loss':>10}"
    )
    for variant, row in rows.items():
        if "failure" in row:
            print(f"{variant:14}fails: {row['failure'].removeprefix(variant + ': ')}")
            continue
        ms, ratio = row["milliseconds"], row["ratio"]
        print(
            f"{variant:14}{ms['median']:9.3f}{ms['min']:9.3f}{ms['max']:9.3f}"
            f"{ratio['median']:9.2f}{ratio['min']:7.2f}{ratio['max']:7.2f}"
            f"{row['cpu_milliseconds']['median']:10.3f}{row['loss']:10.4f}"
        )
    times = {variant: row["rounds"] for variant, row in rows.items() if "rounds" in row}
    ours, ratios = times.pop("ctl", None), []
    for variant, theirs in times.items() if ours else ():
        of = summary([a / b for a, b in zip(ours, theirs, strict=True)])
        ratios.append(f"{variant} {of['median']:.2f} ({of['min']:.2f}-{of['max']:.2f})")
    if ratios:
        print(f"ctl over {', '.join(ratios)}")


def _settings() -> Iterator[dict[str, Any]]:
    """Every combination of --model, --replicas and --global_batch_size."""
    for model, replicas, batch in itertools.product(_MODELS.value, _REPLICAS.value, _BATCHES.value):
        check_model_name(model)
        for flag, value in ((_REPLICAS, replicas), (_BATCHES, batch)):
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(f"--{flag.name}={value}: must be a whole number of 1 or more")
        shares = int(replicas) * _WORKERS.value
        if int(batch) % shares:
            raise UsageError(f"--global_batch_size={batch} is not divisible by {shares} replicas")
        yield {"model": model, "replicas": int(replicas), "global_batch_size": int(batch)}


def _check() -> list[dict[str, Any]]:
    check_names("unknown variant", [*_VARIANTS.value, _REFERENCE.value], VARIANTS)
    if _REFERENCE.value not in _VARIANTS.value:
        raise UsageError(f"--reference={_REFERENCE.value} is not among --variants")
    return list(_settings())


def main() -> None:
    settings = _check()
    how = {
        flag.name: flag.value
        for flag in (_WORKERS, _REFERENCE, _PROCESSES, _ROUNDS, _BLOCKS, _STEPS)
    }
    about_machine = machine(os.getloadavg()[0])
    runs = []
    for setting in settings:
        title = " ".join(f"{key}={value}" for key, value in (setting | how).items())
        measured = measure([f"--{key}={value}" for key, value in setting.items()], title)
        for name in ("ctl", _REFERENCE.value):
            if name in measured and measured[name].failure:
                raise CtlError(measured[name].failure)
        runs.append({"settings": setting | how, "variants": _rows(measured)})
        print(title, *(f"{k}={v}" for k, v in about_machine.items()))
        _show(runs[-1]["variants"])
        write(_JSON.value, {"machine": about_machine, "runs": runs})
        if _SVG.value:
            pathlib.Path(_SVG.value).write_text(bars.chart(runs))
        check_losses(
            {variant: its.loss for variant, its in measured.items() if not its.failure},
            _TOLERANCE.value,
        )


if __name__ == "__main__":
    run_command(main, __doc__)
