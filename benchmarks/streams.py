"""What `input_pipeline.py --stream_images=60000` measures: files of PNGs that are decoded anew.

ctl and tf.data have a process each (`peers/stream_reader.py`); blocks are interleaved.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from pathlib import Path
from typing import Any

from processes import Peer, progress

SIDE = 64
_DISTINCT = 2000  # images, which repeat
_LATE = 1_000_000  # the step of a late start
TUNED = "tf.data, tuned"
ASKED: dict[str, dict[str, int]] = {
    "ctl": {},
    "ctl, blocks of 16": {"block": 16},
    TUNED: {},
    "ctl, worker 1 of 2": {"workers": 2, "worker": 0},
    "ctl, worker 2 of 2": {"workers": 2, "worker": 1},
}


def write(folder: Path, count: int) -> None:
    """Writes ``count`` PNGs of 64 x 64 x 3 as a TFDS dataset of 16 files of TFRecord."""
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    random = np.random.default_rng(0)
    coarse = random.integers(256, size=[_DISTINCT, 16, 16, 3], dtype=np.uint8)
    noise = random.integers(-8, 8, size=[_DISTINCT, SIDE, SIDE, 3])
    images = np.clip(coarse.repeat(4, axis=1).repeat(4, axis=2) + noise, 0, 255).astype(np.uint8)
    files = [tf.io.encode_png(image).numpy() for image in images]

    class CtlImages(tfds.core.GeneratorBasedBuilder):
        """PNGs."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            features = {
                "image": tfds.features.Image(shape=(SIDE, SIDE, 3), encoding_format="png"),
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
                image = io.BytesIO(files[number % _DISTINCT])
                yield number, {"image": image, "label": number % 10}

    CtlImages(data_dir=folder).download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=16)
    )


def measure(folder: Path, *, batch: int, steps: int, rounds: int, timeout: float) -> dict[str, Any]:
    """The answers of each round, by pipeline and what was asked."""
    base = ["stream_reader.py", f"--data_dir={folder}", f"--global_batch_size={batch}"]
    answers: dict[str, Any] = {name: {"start": [], "late": [], "steps": []} for name in ASKED}
    with contextlib.ExitStack() as stack:
        peers = {}
        for kind in ("ctl", "tf.data"):
            progress(f"{kind} starts")
            peers[kind] = Peer(kind, [*base, f"--kind={kind}"])
            stack.callback(peers[kind].close)
            peers[kind].answer(timeout)

        def ask(name: str, what: str, keep: bool, **request: int) -> None:
            progress(f"{what}: {name}")
            peer = peers["tf.data" if name == TUNED else "ctl"]
            peer.say(json.dumps(request))
            answer = peer.answer(timeout)
            if keep:
                answers[name][what].append(answer)

        names = list(ASKED)
        for number in range(-1, rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if name == "ctl":
                    for what, start in (
                        ("late", _LATE),
                        ("start", 0),
                        ("start", 0),
                        ("late", _LATE),
                    ):
                        ask(name, what, number >= 0, start=start, steps=1)
                # Blocks begin with full buffers, as they end. tf.data, once tuned, goes on.
                if name != TUNED or number < 0:
                    ask(name, "start", False, start=0, steps=1 + steps // 4, **ASKED[name])
                ask(name, "steps", number >= 0, steps=steps)
    progress("")
    return answers


def show(answers: dict[str, Any], images: int) -> None:
    """Prints medians; ``images`` is the number of images of a block of steps."""

    def median(name: str, what: str, key: str) -> float:
        return statistics.median(answer[key] for answer in answers[name][what])

    print(
        f"{'':20}{'images/s':>10}{'per CPU s':>10}{'KiB/image':>10}{'peak MiB':>10}{'first s':>9}"
    )
    for name, of in answers.items():
        first = f"{median(name, 'start', 'seconds'):9.3f}" if of["start"] else ""
        print(
            f"{name:20}{images / median(name, 'steps', 'seconds'):10.0f}"
            f"{images / median(name, 'steps', 'cpu_seconds'):10.0f}"
            f"{median(name, 'steps', 'bytes') / images / 1024:10.2f}"
            f"{median(name, 'steps', 'peak_mib'):10.0f}{first}"
        )
    late = median("ctl", "late", "seconds") / median("ctl", "start", "seconds")
    ratios = [
        a["seconds"] / b["seconds"]
        for a, b in zip(answers[TUNED]["steps"], answers["ctl"]["steps"], strict=True)
    ]
    print(f"\nfirst batch at step {_LATE:,} / at step 0: {late:.2f}")
    print(
        f"images/s of ctl / of tf.data, tuned: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f})"
    )
    for worker in (1, 2):
        name = f"ctl, worker {worker} of 2"
        for what, key in (("bytes", "bytes"), ("CPU seconds", "cpu_seconds")):
            share = median(name, "steps", key) / median("ctl", "steps", key)
            print(f"{what} of worker {worker} of 2 / of one worker: {share:.3f}")
