"""What `input_pipeline.py --stream_images=60000` measures: files of images that are decoded anew.

Each kind of pipeline has a process (`peers/stream_reader.py`); blocks are interleaved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from processes import Peer, progress

_LATE = 1_000_000  # the step of a late start


class Kind(NamedTuple):
    """What the files hold: square images."""

    encoding: str
    side: int
    distinct: int  # images, which repeat


KINDS = {"png": Kind("png", 64, 2000), "jpeg": Kind("jpeg", 224, 200)}


class Row(NamedTuple):
    """A row of the table."""

    peer: str  # its process: the kind of pipeline, and what tells it from another one of that kind
    request: dict[str, int] = {}

    @property
    def kind(self) -> str:
        return self.peer.split(",")[0]


TUNED = "tf.data, tuned"
ROWS = {
    "ctl": Row("ctl"),
    "ctl, blocks of 16": Row("ctl", {"block": 16}),
    TUNED: Row("tf.data"),
    "tf.data, tutorial": Row("tutorial"),
    "Grain": Row("grain"),
    "ctl, 2 replicas": Row("ctl", {"replicas": 2}),
    f"{TUNED}, 2 replicas": Row("tf.data, 2 replicas", {"replicas": 2}),
    "ctl, worker 1 of 2": Row("ctl", {"workers": 2, "worker": 0}),
    "ctl, worker 2 of 2": Row("ctl", {"workers": 2, "worker": 1}),
}


def write(folder: Path, count: int, kind: Kind) -> None:
    """Writes ``count`` images as a TFDS dataset of 16 files of TFRecord; for Grain, where it is
    installed, the same again of ArrayRecord in ``folder/grain``."""
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    random = np.random.default_rng(0)
    coarse = random.integers(256, size=[kind.distinct, 16, 16, 3], dtype=np.uint8)
    encode = {"png": tf.io.encode_png, "jpeg": tf.io.encode_jpeg}[kind.encoding]
    files = []
    for image in coarse.repeat(kind.side // 16, axis=1).repeat(kind.side // 16, axis=2):
        noisy = image + random.integers(-8, 8, size=image.shape)
        files.append(encode(np.clip(noisy, 0, 255).astype(np.uint8)).numpy())

    class CtlImages(tfds.core.GeneratorBasedBuilder):
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
                image = io.BytesIO(files[number % kind.distinct])
                yield number, {"image": image, "label": number % 10}

    config = tfds.download.DownloadConfig(num_shards=16)
    CtlImages(data_dir=folder).download_and_prepare(download_config=config)
    if _has_grain():
        CtlImages(data_dir=folder / "grain", file_format="array_record").download_and_prepare(
            download_config=config
        )


def _has_grain() -> bool:
    return importlib.util.find_spec("grain") is not None


def measure(folder: Path, *, batch: int, steps: int, rounds: int, timeout: float) -> dict[str, Any]:
    """The answers of each round, by row and by what was asked; none for what is not installed."""
    answers: dict[str, Any] = {name: {"start": [], "late": [], "steps": []} for name in ROWS}
    rows = {name: row for name, row in ROWS.items() if row.kind != "grain" or _has_grain()}
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for row in rows.values():
            if row.peer not in peers:
                progress(f"{row.peer} starts")
                data_dir = folder / "grain" if row.kind == "grain" else folder
                flags = [f"--data_dir={data_dir}", f"--global_batch_size={batch}"]
                command = ["stream_reader.py", f"--kind={row.kind}", *flags]
                peers[row.peer] = Peer(row.peer, command)
                stack.callback(peers[row.peer].close)
                peers[row.peer].answer(timeout)

        def ask(name: str, what: str, keep: bool, **request: int) -> None:
            progress(f"{what}: {name}")
            peer = peers[rows[name].peer]
            peer.say(json.dumps(request))
            answer = peer.answer(timeout)
            if keep:
                answers[name][what].append(answer)

        names = list(rows)
        for number in range(-1, rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                row = rows[name]
                if name == "ctl":
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

    print(
        f"{'':28}{'images/s':>10}{'per CPU s':>10}{'KiB/image':>10}{'peak MiB':>10}{'first s':>9}"
    )
    for name, of in answers.items():
        if not of["steps"]:
            print(f"{name:28}not installed: pip install {ROWS[name].kind}")
            continue
        first = f"{median(name, 'start', 'seconds'):9.3f}" if of["start"] else ""
        print(
            f"{name:28}{images / median(name, 'steps', 'seconds'):10.0f}"
            f"{images / median(name, 'steps', 'cpu_seconds'):10.0f}"
            f"{median(name, 'steps', 'bytes') / images / 1024:10.2f}"
            f"{median(name, 'steps', 'peak_mib'):10.0f}{first}"
        )
    late = median("ctl", "late", "seconds") / median("ctl", "start", "seconds")
    print(f"\nfirst batch at step {_LATE:,} / at step 0: {late:.2f}")
    for name, than in (
        ("ctl", TUNED),
        ("ctl", "tf.data, tutorial"),
        ("ctl", "Grain"),
        ("ctl, 2 replicas", f"{TUNED}, 2 replicas"),
    ):
        pairs = list(zip(answers[than]["steps"], answers[name]["steps"], strict=False))
        for what, key in (("images/s", "seconds"), ("images per CPU s", "cpu_seconds")):
            if ratios := [a[key] / b[key] for a, b in pairs]:
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                print(f"{what} of {name} / of {than}: {spread}")
    for worker in (1, 2):
        name = f"ctl, worker {worker} of 2"
        for what, key in (("bytes", "bytes"), ("CPU seconds", "cpu_seconds")):
            share = median(name, "steps", key) / median("ctl", "steps", key)
            print(f"{what} of worker {worker} of 2 / of one worker: {share:.3f}")
    print()
