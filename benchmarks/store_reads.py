"""Does a training wait longer for images of a store than for those of the disk?

    python benchmarks/store_reads.py
    python benchmarks/store_reads.py --kind=jpeg --images=4000 --latency_ms=20

The store is this machine's disk, read by fsspec, and each of its requests takes ``--latency_ms``
longer. The images are those of `input_pipeline.py`, decoded anew in each epoch. Blocks are
interleaved: in each round, one epoch of each row.
"""

from __future__ import annotations

import os
import pathlib
import resource
import tempfile
import time
from typing import Any

import streams
from absl import flags
from processes import machine, progress, summary, write

from ctl.flags.parsing import group, run_command

with group("What is measured"):
    _KIND = flags.DEFINE_enum("kind", "png", list(streams.KINDS), "of images, see streams.py")
    _IMAGES = flags.DEFINE_integer("images", 20_000, "in the data set", lower_bound=1000)
    _BATCH = flags.DEFINE_integer("global_batch_size", 128, "images per step", lower_bound=1)
    _LATENCY = flags.DEFINE_float("latency_ms", 5.0, "of each request", lower_bound=0)
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "epochs of each row", lower_bound=1)
    _JSON = flags.DEFINE_string("json", None, "file for the results")

# The size of the cache over that of the data; None for no cache, and blocks of images.
ROWS: dict[str, tuple[float | None, int]] = {
    "disk": (None, 1),
    "store, first epoch": (2.0, 1),
    "store, second epoch": (2.0, 1),
    "store, cache for half": (0.5, 1),
    "disk, blocks of 16": (None, 16),
    "store, half, blocks of 16": (0.5, 16),
    "store, no cache, blocks of 16": (None, 16),
}


def register() -> list[str]:
    """Makes ``late://``, and returns the list of the requests that it gets."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    requests: list[str] = []

    class Late(LocalFileSystem):
        """The disk, after a while."""

        protocol = "late"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("late://"))

        def _wait(self, what: str) -> None:
            requests.append(what)
            time.sleep(_LATENCY.value / 1000)

        def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
            self._wait("read")
            return super().cat_file(path, start, end)

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            self._wait("info")
            return super().info(path)

        def ls(self, path: str, detail: bool = False, **_: Any) -> Any:
            self._wait("list")
            return LocalFileSystem().ls(path, detail)

    fsspec.register_implementation("late", Late)
    return requests


def epoch(data_dir: Any, block: int, requests: list[str]) -> dict[str, float]:
    """Opens the data, as a run does, and takes the batches of an epoch."""
    from ctl.data import load

    requests.clear()
    begun, cpu = time.perf_counter(), time.process_time()
    dataset = load(
        "ctl_images",
        global_batch_size=_BATCH.value,
        split="train",
        data_dir=data_dir,
        resident_limit_mib=0,
        shuffle_block=block,
    )
    steps = _IMAGES.value // _BATCH.value
    batches = iter(dataset.batches())
    next(batches)
    first = time.perf_counter()
    for _ in range(steps - 1):
        next(batches)
    end = time.perf_counter()
    images = _BATCH.value * steps
    return {
        "start": first - begun,
        "steps": (images - _BATCH.value) / (end - first),
        "epoch": images / (end - begun),
        "cpu": images / (time.process_time() - cpu),
        "requests": len(requests),
    }


def show(answers: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and ratios to the disk in the same round."""
    titles = "".join(f"{title:18}" for title in ("over disk", "epoch over disk", "per CPU second"))
    print(f"{'':30}{'start s':>8}{'images/s':>10}  {titles}requests")
    for name, rounds in answers.items():
        base = answers["disk, blocks of 16" if "16" in name else "disk"]
        texts = []
        for key in ("steps", "epoch", "cpu"):
            ratio = summary([a[key] / b[key] for a, b in zip(rounds, base, strict=True)])
            texts.append(f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})")
        start, rate, requests = (
            summary([one[key] for one in rounds])["median"]
            for key in ("start", "steps", "requests")
        )
        ratios = "".join(f"{text:18}" for text in texts)
        print(f"{name:30}{start:8.2f}{rate:10.0f}  {ratios}{requests:.0f}")


def main() -> None:
    about = machine(os.getloadavg()[0])
    print("  ".join(f"{key}={value}" for key, value in about.items()), end="\n\n")
    requests = register()
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/home"
        data = pathlib.Path(folder, "data")
        progress(f"writes {_IMAGES.value} images")
        streams.write(data, _IMAGES.value, streams.KINDS[_KIND.value])
        from ctl.data import StorePath

        size = sum(path.stat().st_size for path in data.glob("ctl_images/*/*"))
        epoch(data, 1, requests)  # warms up
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for number in range(_ROUNDS.value):
            for name, (part, block) in ROWS.items():
                progress(f"round {number + 1}/{_ROUNDS.value}: {name}")
                place: Any = data
                if name.startswith("store"):
                    kept = f"{folder}/{part}-{block}-{number}:{(part or 0) * size / 2**20:.1f}MiB"
                    place = StorePath(f"late://{data}", kept if part else None)
                answers[name].append(epoch(place, block, requests))
                write(_JSON.value, {"machine": about, "rows": answers}, say=False)
        progress("")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{_IMAGES.value} images, {size / 2**20:.0f} MiB")
        print(f"peak memory {peak:.0f} MiB; {before:.0f} MiB after an epoch of the disk")
    show(answers)


if __name__ == "__main__":
    run_command(main, __doc__)
