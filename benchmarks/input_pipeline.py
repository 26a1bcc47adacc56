"""How many images per second reach the replicas, through ctl's data and the tutorials' pipeline?

    python benchmarks/input_pipeline.py
    python benchmarks/input_pipeline.py --replicas=2 --pipelines=tutorial,ctl --json=out.json
    python benchmarks/input_pipeline.py --stream_images=60000 --stream_jpegs=6000

The step has no model: every replica sums its images (`peers/images.py`). Every pipeline has its own
process, and their blocks are interleaved. README.md says how the numbers are derived.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import tempfile
from typing import Any

import streams
from absl import flags
from processes import Peer, check_names, in_turn, machine, progress, summary, write

from ctl.errors import CtlError, UsageError
from ctl.flags.parsing import group, run_command

# The names are those of `peers/images.py`. The streams decode every image in every epoch.
_STREAMS = ("ctl_stream", "ctl_stream_tuned")
PIPELINES = ("tutorial", "ctl_own", "ctl", *_STREAMS)

with group("What is measured"):
    _PIPELINES = flags.DEFINE_list("pipelines", list(PIPELINES), ", ".join(PIPELINES))
    _REPLICAS = flags.DEFINE_list(
        "replicas", "1,2", "replicas in one process; logical CPU devices where there is no GPU"
    )
    _BATCH = flags.DEFINE_integer("global_batch_size", 128, "images per step", lower_bound=1)
    _DATASET = flags.DEFINE_string("dataset", "fashion_mnist_mini", "a dataset of TFDS")
    _DATA_DIR = flags.DEFINE_string("data_dir", None, "where it is; by default in ctl")
    _IMAGES = flags.DEFINE_integer(
        "stream_images",
        0,
        "if given: PNGs of 64x64 to make and to stream, see streams.py",
        lower_bound=0,
    )
    _JPEGS = flags.DEFINE_integer(
        "stream_jpegs", 0, "if given: JPEGs of 224x224 to make and to stream", lower_bound=0
    )
    _PEERS = flags.DEFINE_list(
        "stream_peers", list(streams.PEERS.values()), "what is streamed beside ctl"
    )
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 7, "blocks of each pipeline", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 2000, "steps of a block", lower_bound=1)
    _STREAM_STEPS = flags.DEFINE_integer(
        "stream_steps", 100, "steps of a block where images are decoded anew", lower_bound=1
    )
    _WARM_UP = flags.DEFINE_integer("warm_up", 2, "blocks before, not timed", lower_bound=1)
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one block of a process")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def measure(replicas: str) -> dict[str, list[dict[str, float]]]:
    """For every pipeline, its answer in each round."""
    arguments = [
        f"--replicas={replicas}",
        f"--global_batch_size={_BATCH.value}",
        f"--dataset={_DATASET.value}",
        *([f"--data_dir={_DATA_DIR.value}"] if _DATA_DIR.value else []),
    ]
    commands = {name: ["images.py", f"--pipeline={name}", *arguments] for name in _PIPELINES.value}
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with contextlib.ExitStack() as stack:
        peers = []
        for name, command in commands.items():  # one at a time, so that no start slows another
            progress(f"{replicas} replicas: {name} starts")
            peers.append(stack.enter_context(Peer(name, command)))
            peers[-1].answer(_TIMEOUT.value)
        for number in range(-_WARM_UP.value, _ROUNDS.value):
            for peer in in_turn(peers, number):
                progress(f"{replicas} replicas, round {number + 1}/{_ROUNDS.value}: {peer.name}")
                steps = _STREAM_STEPS if peer.name in _STREAMS else _STEPS
                answer = peer.ask(_TIMEOUT.value, steps=steps.value)
                if number >= 0:
                    answers[peer.name].append(answer)
    progress("")
    return answers


def summarize(answers: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Rates in images per second, and their ratios to ``tutorial`` in the same round."""
    reference = answers["tutorial"]
    rows = {}
    for name, rounds in answers.items():
        rates, cpu_rates = (
            [[a["images"] / a[key] for a in of] for of in (rounds, reference)]
            for key in ("seconds", "cpu_seconds")
        )
        rows[name] = {
            "images_per_second": summary(rates[0]),
            "images_per_cpu_second": summary(cpu_rates[0]),
            "ratio": summary([a / b for a, b in zip(*rates, strict=True)]),
            "cpu_ratio": summary([a / b for a, b in zip(*cpu_rates, strict=True)]),
            "mean": rounds[-1]["mean"],
            "rounds": rounds,
        }
    return rows


def check(rows: dict[str, dict[str, Any]]) -> None:
    """Raises `CtlError` if the mean sum of an image differs by more than 5 % from the median."""
    middle = statistics.median(row["mean"] for row in rows.values())
    for name, row in rows.items():
        if not abs(row["mean"] - middle) <= 0.05 * middle:
            raise CtlError(
                f"{name} gives other images than the others: their mean sum is {row['mean']:.1f}, "
                f"not {middle:.1f}, so its rate means nothing"
            )


def show(rows: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'':18}{'images/s':>10}{'min':>10}{'max':>10}{'ratio':>7}{'min':>6}{'max':>6}"
        f"{'per CPU s':>11}{'ratio':>7}"
    )
    for name, row in rows.items():
        rate, ratio = row["images_per_second"], row["ratio"]
        print(
            f"{name:18}{rate['median']:10.0f}{rate['min']:10.0f}{rate['max']:10.0f}"
            f"{ratio['median']:7.2f}{ratio['min']:6.2f}{ratio['max']:6.2f}"
            f"{row['images_per_cpu_second']['median']:11.0f}{row['cpu_ratio']['median']:7.2f}"
        )
    print()


def stream(about: dict[str, Any]) -> None:
    """Measures pipelines over files of images."""
    results: dict[str, Any] = {"machine": about, "streams": {}}
    for name, count in (("png", _IMAGES.value), ("jpeg", _JPEGS.value)):
        if not count:
            continue
        kind = streams.KINDS[name]
        with tempfile.TemporaryDirectory() as folder:
            progress(f"writes {count} images")
            streams.write(pathlib.Path(folder), count, kind)
            answers = streams.measure(
                pathlib.Path(folder),
                kind,
                _PEERS.value,
                batch=_BATCH.value,
                steps=_STREAM_STEPS.value,
                rounds=_ROUNDS.value,
                timeout=_TIMEOUT.value,
            )
        print(f"{count} images, {name}, {kind.side}x{kind.side}")
        streams.show(answers, _STREAM_STEPS.value * _BATCH.value)
        results["streams"][name] = answers
        write(_JSON.value, results, say=False)


def main() -> None:
    check_names("unknown pipeline", _PIPELINES.value, PIPELINES)
    check_names("unknown peer", _PEERS.value, streams.PEERS.values())
    if "tutorial" not in _PIPELINES.value:
        raise UsageError("--pipelines must include tutorial, the base of the ratios")
    for replicas in _REPLICAS.value:
        if not replicas.isdecimal() or int(replicas) < 1:
            raise UsageError(f"--replicas={replicas}: must be whole numbers of 1 or more")
        if _BATCH.value % int(replicas):
            raise UsageError(
                f"--global_batch_size={_BATCH.value} is not divisible by {replicas} replicas"
            )
    about = machine(os.getloadavg()[0])
    print("  ".join(f"{key}={value}" for key, value in about.items()), end="\n\n")
    if _IMAGES.value or _JPEGS.value:
        stream(about)
        return
    runs = {}
    for replicas in _REPLICAS.value:
        print(f"{replicas} replicas, global batch {_BATCH.value}, {_DATASET.value}")
        runs[replicas] = summarize(measure(replicas))
        show(runs[replicas])
        write(_JSON.value, {"machine": about, "replicas": runs}, say=False)
        check(runs[replicas])


if __name__ == "__main__":
    run_command(main, __doc__)
