"""How does training scale from 1 to 4 replicas, and does the cost model know?

    python benchmarks/scaling.py                                   # workers on loopback
    python benchmarks/scaling.py --strategy=mirrored --counts=1,2,4   # devices of one process
    sudo python benchmarks/scaling.py --mbit=500                   # workers on links of 500 Mbit/s

The jobs of all sizes stay alive and train in turn, so that all see the same disturbances of the
machine. The link is measured on 2 replicas. From it the cost model of `ctl.inspect predict`
computes the times of the other jobs, which are printed beside the measured times. README.md says
how the numbers are derived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterator
from typing import Any

import shaped
from absl import flags
from jobs import Effort, Job
from processes import Peer, ask_all, in_turn, machine, progress, tasks, write

from ctl import launch
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command
from ctl.inspect.measure.link import Measured, PiecewiseLinear, Point
from ctl.inspect.predict import cost
from ctl.inspect.predict.model import Pack, Step, predict

with group("What is trained"):
    _STRATEGY = flags.DEFINE_enum(
        "strategy", "multi_worker", ["multi_worker", "mirrored"], "processes, or devices of one"
    )
    _COUNTS = flags.DEFINE_list("counts", "1,2,3,4", "numbers of replicas; 1 and 2 among them")
    _BATCH = flags.DEFINE_integer(
        "batch", 192, "examples of a replica (weak scaling), of all (strong)", lower_bound=1
    )
    _LAYERS = flags.DEFINE_integer("layers", 4, "dense layers of the network", lower_bound=1)
    _WIDTH = flags.DEFINE_integer("width", 512, "of each layer", lower_bound=1)
with group("The links between workers"):
    _MBIT = flags.DEFINE_float(
        "mbit", None, "rate in megabits per second: each worker in a network namespace; needs root"
    )
    _DELAY = flags.DEFINE_float(
        "delay_ms", 0.0, "of each packet, with --mbit; needs a kernel with netem", lower_bound=0
    )
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "of every job in turn", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 40, "of a block", lower_bound=1)
    _LINK_SECONDS = flags.DEFINE_float(
        "link_seconds", 0.5, "of all-reduces of each size, about", lower_bound=0
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one answer of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_LINK_SIZES = [1 << k for k in range(10, 25, 2)]  # 1 KiB to 16 MiB


def _check_counts(counts: list[str], strategy: str, batch: int, mbit: float | None) -> None:
    if not all(c.isdigit() and int(c) > 0 for c in counts) or not {"1", "2"} <= set(counts):
        raise UsageError(
            f"--counts={','.join(counts)}: must be numbers of replicas, with 1 and 2 among them"
        )
    for count in map(int, counts):
        if batch % count:
            raise UsageError(f"--batch={batch} is not divisible by {count} replicas")
    if mbit is not None and (mbit <= 0 or strategy != "multi_worker"):
        raise UsageError("--mbit must be above 0, and needs --strategy=multi_worker")


check_flags(["counts", "strategy", "batch", "mbit"], _check_counts)


@dataclasses.dataclass
class Group:
    """A job with some number of replicas.

    Attributes:
        job: its processes.
        gradient_bytes: size of the gradients of one replica.
        blocks: ms per step of each block, by ``(strong, alone)``; see `train`.
    """

    job: Job
    gradient_bytes: int
    blocks: dict[tuple[bool, bool], list[float]] = dataclasses.field(default_factory=dict)

    def train(self, strong: bool, alone: bool, keep: bool = True) -> None:
        """Trains one block: with strong or weak scaling; if ``alone``, without the all-reduce."""
        request = {"what": "train", "steps": _STEPS.value, "strong": strong, "alone": alone}
        seconds = max(
            answer["seconds"] for answer in ask_all(self.job.peers, _TIMEOUT.value, **request)
        )
        if keep:
            self.blocks.setdefault((strong, alone), []).append(1e3 * seconds / _STEPS.value)

    def milliseconds(self, strong: bool, alone: bool) -> float:
        """Per step, median over the blocks. All kinds are the same on one replica."""
        if self.job.replicas == 1:
            strong = alone = False
        return statistics.median(self.blocks[strong, alone])


@contextlib.contextmanager
def started(counts: list[int]) -> Iterator[list[Group]]:
    """Starts a job for each of ``counts`` and ends all processes on exit."""
    with contextlib.ExitStack() as stack:
        places: list[tuple[list[str], str]] = []
        if _MBIT.value:
            several = shaped.namespaces(max(counts), _MBIT.value, _DELAY.value)
            places = stack.enter_context(several)
        groups = []
        for count in counts:
            progress(f"starting {count}")
            title = f"{count} replicas"
            how = _processes(count, places)
            peers = [stack.enter_context(Peer(title, *each)) for each in how]
            about = [peer.answer(_TIMEOUT.value) for peer in peers][0]
            if "unavailable" in about:
                raise UsageError(about["unavailable"])
            effort = Effort(
                iterations=40, seconds=_LINK_SECONDS.value, warm_up=3, timeout=_TIMEOUT.value
            )
            job = Job(title, peers, count, about["device"], effort)
            groups.append(Group(job, about["gradient_bytes"]))
        progress("")
        yield groups


def _processes(
    count: int, places: list[tuple[list[str], str]]
) -> list[tuple[list[str], dict[str, str], list[str]]]:
    """Command, environment and prefix of the command, for each process."""
    script = ["scaling_worker.py", f"--batch={_BATCH.value}", f"--layers={_LAYERS.value}"]
    script += [f"--width={_WIDTH.value}", "--operation=auto", "--nocheck"]
    if count == 1:
        return [([*script, "--strategy=mirrored"], {}, [])]
    if _STRATEGY.value == "mirrored":
        return [([*script, "--strategy=mirrored", f"--replicas={count}"], {}, [])]
    script += ["--strategy=multi_worker"]
    if not places:
        return [(script, task, []) for task in tasks(launch.cluster(count)["worker"])]
    used = places[:count]
    pairs = zip(tasks(shaped.addresses(used)), used, strict=True)
    return [(script, task, inside) for task, (inside, _) in pairs]


def train_in_turn(groups: list[Group]) -> None:
    """Trains --rounds blocks of every kind in every job, after one block each to warm up."""
    for number in range(-1, _ROUNDS.value):
        for each in in_turn(groups, max(0, number)):
            progress(f"round {number + 1} of {_ROUNDS.value}: {each.job.name}")
            kinds = [(False, False), (False, True), (True, False), (True, True)]
            for strong, alone in kinds if each.job.replicas > 1 else kinds[:1]:
                each.train(strong, alone, keep=number >= 0)
    progress("")


def measure_links(groups: list[Group]) -> None:
    """Measures all-reduces in all jobs with several replicas, which take each size in turn."""
    for size in sorted({*_LINK_SIZES, groups[0].gradient_bytes}):
        for each in groups:
            if each.job.replicas > 1:
                progress(f"{each.job.name}: {size} bytes")
                each.job.rows.append(each.job.measure(size))
    progress("")


def link_between(groups: list[Group]) -> cost.Link:
    """The link, fitted to the all-reduces of 2 replicas. All replicas share it, without --mbit."""
    (two,) = [each.job for each in groups if each.job.replicas == 2]
    measured = Measured(_STRATEGY.value, "ring", 2, points_of(two))
    return cost.link_of(measured, shared=_MBIT.value is None)


def points_of(job: Job) -> tuple[Point, ...]:
    """Sizes and times of the all-reduces of ``job``."""
    return tuple(Point(row["bytes"], row["seconds"]) for row in job.rows)


def scaling(groups: list[Group], link: cost.Link, strong: bool) -> list[dict[str, Any]]:
    """A row for each number of replicas; times in milliseconds."""
    one = next(each for each in groups if each.job.replicas == 1).milliseconds(False, False)
    network, cores = cost.Network(link), len(os.sched_getaffinity(0))
    rows = []
    for each in groups:
        n, size = each.job.replicas, each.gradient_bytes
        step, alone = (each.milliseconds(strong, kind) for kind in (False, True))
        useful = one / n if strong else one
        row = {"replicas": n, "step": step, "alone": alone, "efficiency": useful / step}
        row["at_most"] = min(1.0, cores / n)
        if n > 1:
            # One pack is complete when the backward pass ends, so that it hides behind nothing.
            model = Step(0.0, alone / 1e3, 0.0, (Pack(size, 1.0),))
            predicted = predict(model, n, lambda size, n=n: cost.ring(network, n, size))
            transfer = PiecewiseLinear(points_of(each.job)).seconds(size)
            row |= {
                "exposed": step - alone,
                "all_reduce": 1e3 * transfer,
                "predicted_all_reduce": 1e3 * predicted.communication,
                "predicted_step": 1e3 * predicted.step,
                "all_reduce_error": predicted.communication / transfer - 1,
                "step_error": 1e3 * predicted.step / step - 1,
            }
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]], strong: bool) -> None:
    each = "in all" if strong else "on each replica"
    print(f"\n{'strong' if strong else 'weak'} scaling: {_BATCH.value} examples {each}")
    print(
        f"{'replicas':>8}{'step ms':>10}{'alone':>9}{'exposed':>9}{'efficiency':>11}{'at most':>9}"
        f"{'all-reduce':>12}{'predicted':>10}{'error':>7}{'step':>10}{'error':>7}"
    )
    for row in rows:
        line = f"{row['replicas']:8}{row['step']:10.2f}{row['alone']:9.2f}"
        if row["replicas"] == 1:
            print(f"{line}{'':9}{row['efficiency']:11.0%}{row['at_most']:9.0%}")
            continue
        print(
            f"{line}{row['exposed']:9.2f}{row['efficiency']:11.0%}{row['at_most']:9.0%}"
            f"{row['all_reduce']:12.2f}{row['predicted_all_reduce']:10.2f}"
            f"{row['all_reduce_error']:+7.0%}{row['predicted_step']:10.2f}{row['step_error']:+7.0%}"
        )


def errors(rows: list[dict[str, Any]], key: str) -> float:
    """The mean absolute error in ``key`` over the rows with more than 2 replicas."""
    return statistics.mean(abs(row[key]) for row in rows if row["replicas"] > 2)


def main() -> None:
    load = os.getloadavg()[0]
    with started(sorted(map(int, _COUNTS.value))) as groups:
        train_in_turn(groups)
        measure_links(groups)
    link = link_between(groups)
    tables = {
        name: scaling(groups, link, strong) for name, strong in (("weak", False), ("strong", True))
    }
    named = (_STRATEGY, _BATCH, _LAYERS, _WIDTH, _MBIT, _DELAY, _ROUNDS, _STEPS)
    settings = {flag.name: flag.value for flag in named}
    about = machine(load)
    content = {
        "settings": settings | {"gradient_bytes": groups[0].gradient_bytes},
        "machine": about,
        "link": dataclasses.asdict(link),
        "all_reduce": {each.job.name: each.job.rows for each in groups},
        "blocks": {
            each.job.name: [
                {"strong": strong, "alone": alone, "milliseconds": values}
                for (strong, alone), values in each.blocks.items()
            ]
            for each in groups
        },
        **tables,
    }
    write(_JSON.value, content)
    print(" ".join(f"{k}={v}" for k, v in (settings | about).items()))
    kind = "shared by all" if link.shared else "one for each"
    print(
        f"gradients of {groups[0].gradient_bytes} bytes in one pack; link from 2 replicas, {kind}: "
        f"{link.alpha * 1e6:.0f} us, {link.beta / 1e9:.3f} GB/s"
    )
    for name, rows in tables.items():
        print_table(rows, name == "strong")
    if len(groups) > 2:
        print(
            f"\nmean error of the prediction on more than 2 replicas: all-reduce "
            f"{errors(tables['weak'], 'all_reduce_error'):.0%}, step "
            f"{errors(tables['weak'], 'step_error'):.0%} (weak), "
            f"{errors(tables['strong'], 'step_error'):.0%} (strong)"
        )
    cores = about["cores"]
    print(
        f"{cores} cores: more than {cores} replicas share them, so the efficiency cannot exceed "
        "'at most'"
    )


if __name__ == "__main__":
    run_command(main, __doc__)
