"""What `input_pipeline.py --stream_images=60000` measures: files of images that are decoded anew.

All rows of ctl share a process (`peers/stream_reader.py`), each row of a peer has one; blocks are
interleaved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from processes import Peer, in_turn, progress

_LATE = 1_000_000  # the step of a late start


class Kind(NamedTuple):
    """What the files hold: square images."""

    encoding: str
    side: int
    distinct: int  # images, which repeat
    shuffled: int  # in the buffer of the tutorial, where an image is float32


KINDS = {"png": Kind("png", 64, 2000, 10_000), "jpeg": Kind("jpeg", 224, 200, 1000)}


class Row(NamedTuple):
    """A row of the table."""

    kind: str  # of pipeline, see `peers/stream_reader.py`
    request: dict[str, int] = {}


PEERS = {"tf.data, tuned": "tf.data", "tf.data, tutorial": "tutorial", "Grain": "grain"}
TWO_REPLICAS = {"replicas": 2}
WORKERS = {f"worker {n + 1} of 2": {"workers": 2, "worker": n} for n in range(2)}
FIRST_WORKER = next(iter(WORKERS))
ROWS = {
    "ctl": Row("ctl"),
    "ctl, blocks of 16": Row("ctl", {"block": 16}),
    **{name: Row(kind) for name, kind in PEERS.items()},
    "ctl, 2 replicas": Row("ctl", TWO_REPLICAS),
    **{f"{name}, 2 replicas": Row(kind, TWO_REPLICAS) for name, kind in PEERS.items()},
    **{f"ctl, {worker}": Row("ctl", request) for worker, request in WORKERS.items()},
    **{f"{name}, {FIRST_WORKER}": Row(kind, WORKERS[FIRST_WORKER]) for name, kind in PEERS.items()},
}


def write(folder: Path, count: int, kind: Kind) -> None:
    """Writes ``count`` images as a TFDS dataset of 16 files of TFRecord; for Grain, where it is
    installed, the same again of ArrayRecord in ``folder/grain``."""
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    random, distinct = np.random.default_rng(0), min(count, kind.distinct)
    coarse = random.integers(256, size=[distinct, 16, 16, 3], dtype=np.uint8)
    encode = {"png": tf.io.encode_png, "jpeg": tf.io.encode_jpeg}[kind.encoding]
    files = []
    for image in coarse.repeat(kind.side // 16, axis=1).repeat(kind.side // 16, axis=2):
        noisy = image + random.integers(-8, 8, size=image.shape)
        files.append(encode(np.clip(noisy, 0, 255).astype(np.uint8)).numpy())

    class CtlImages(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Images."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            shape = (kind.side, kind.side, 3)
            features = {
                "image": tfds.features.Image(shape=shape, encoding_format=kind.encoding),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for number in range(count):
                image = io.BytesIO(files[number % distinct])
                yield number, {"image": image, "label": number % 10}

    config = tfds.download.DownloadConfig(num_shards=16)
    CtlImages(data_dir=folder).download_and_prepare(download_config=config)
    if _has_grain():
        CtlImages(data_dir=folder / "grain", file_format="array_record").download_and_prepare(
            download_config=config
        )


def _has_grain() -> bool:
    return importlib.util.find_spec("grain") is not None


def measure(
    folder: Path,
    kind: Kind,
    beside: Sequence[str],
    *,
    batch: int,
    steps: int,
    rounds: int,
    timeout: float,
) -> dict[str, Any]:
    """The answers of each round, by row and by what was asked; none for what is not installed.
    ``beside``: kinds of `PEERS`."""
    asked = {name: row for name, row in ROWS.items() if row.kind in ("ctl", *beside)}
    answers: dict[str, Any] = {name: {"start": [], "late": [], "steps": []} for name in asked}
    rows = {name: row for name, row in asked.items() if row.kind != "grain" or _has_grain()}
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}  # all rows of ctl have one process
        for name, row in rows.items():
            if row.kind == "ctl" and peers:
                peers[name] = peers["ctl"]
                continue
            progress(f"{name} starts")
            data_dir = folder / "grain" if row.kind == "grain" else folder
            flags = [f"--data_dir={data_dir}", f"--shuffle={kind.shuffled}"]
            flags += [f"--kind={row.kind}", f"--global_batch_size={batch}"]
            peers[name] = stack.enter_context(Peer(name, ["stream_reader.py", *flags]))
            peers[name].answer(timeout)

        def ask(name: str, what: str, keep: bool, **request: int) -> None:
            progress(f"{what}: {name}")
            answer = peers[name].ask(timeout, **request)
            if keep:
                answers[name][what].append(answer)

        for number in range(-1, rounds):
            for name in in_turn(rows, number):
                row = rows[name]
                if name == "ctl":
                    ask(name, "start", False, start=0, steps=1)  # ends what was read ahead
                    for start in (_LATE, 0, 0, _LATE):
                        what = "late" if start else "start"
                        ask(name, what, number >= 0, start=start, steps=1)
                # Before a block, the buffers are used up, as they are after it: what a pipeline
                # has read ahead while others were measured would count as its speed.
                if row.kind == "ctl":
                    ask(name, "start", False, start=0, steps=1 + steps // 2, **row.request)
                else:
                    if number < 0:
                        ask(name, "start", True, start=0, steps=1, **row.request)
                    ask(name, "steps", False, steps=1 + steps // 2)
                ask(name, "steps", number >= 0, steps=steps)
    progress("")
    return answers


def show(answers: dict[str, Any], images: int) -> None:
    """Prints medians; ``images`` is the number of images of a block of steps."""

    def median(name: str, what: str, key: str) -> float:
        return statistics.median(answer[key] for answer in answers[name][what])

    def ratio(above: str, below: str, key: str) -> str:
        pairs = zip(answers[above]["steps"], answers[below]["steps"], strict=True)
        ratios = [a[key] / b[key] for a, b in pairs]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    print(
        f"{'':32}{'images/s':>10}{'per CPU s':>10}{'KiB/image':>10}{'peak MiB':>10}{'first s':>9}"
    )
    for name, of in answers.items():
        if not of["steps"]:
            print(f"{name:32}not installed: pip install {ROWS[name].kind}")
            continue
        first = f"{median(name, 'start', 'seconds'):9.3f}" if of["start"] else ""
        print(
            f"{name:32}{images / median(name, 'steps', 'seconds'):10.0f}"
            f"{images / median(name, 'steps', 'cpu_seconds'):10.0f}"
            f"{median(name, 'steps', 'bytes') / images / 1024:10.2f}"
            f"{median(name, 'steps', 'peak_mib'):10.0f}{first}"
        )
    late = median("ctl", "late", "seconds") / median("ctl", "start", "seconds")
    print(f"\nfirst batch at step {_LATE:,} / at step 0: {late:.2f}")
    for where in ("", ", 2 replicas", f", {FIRST_WORKER}"):
        for peer in PEERS:
            theirs, ours = f"{peer}{where}", f"ctl{where}"
            if theirs in answers and answers[theirs]["steps"]:
                rate, per_cpu = ratio(theirs, ours, "seconds"), ratio(theirs, ours, "cpu_seconds")
                print(f"ctl / {theirs}: images/s {rate}, per CPU s {per_cpu}")
    for worker in WORKERS:
        read, cpu = (ratio(f"ctl, {worker}", "ctl", key) for key in ("bytes", "cpu_seconds"))
        print(f"{worker} / one worker: bytes {read}, CPU seconds {cpu}")
    print()
