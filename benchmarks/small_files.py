"""How fast are many small images and many tiny records read, over what TensorFlow offers for them?

    python benchmarks/small_files.py
    python benchmarks/small_files.py --images=100000 --rounds=9 --json=out.json

All rows live in one process, and their blocks take turns. README.md says what each row is.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import flags
from processes import in_turn, machine, progress, summary, write

from ctl.flags.parsing import group, run_command

with group("What is read"):
    _IMAGES = flags.DEFINE_integer("images", 20_000, "PNGs of 32x32 in 10 folders", lower_bound=640)
    _RECORDS = flags.DEFINE_integer("records", 200_000, "examples of 73 bytes", lower_bound=1280)
with group("How"):
    _ROUNDS = flags.DEFINE_integer("rounds", 5, "blocks of each row", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 200, "batches of a block", lower_bound=1)
    _JSON = flags.DEFINE_string("json", None, "file for the results")

_BATCH = 128
_SHUFFLED = 10_000  # in a buffer of tf.data


def images(folder: Path) -> dict[str, Iterator[Any]]:
    """Streams of the same PNGs, that of the peer last."""
    import keras
    import numpy as np
    import tensorflow as tf

    from ctl.data import Streaming
    from ctl.data.sources import ImageFolder

    random = np.random.default_rng(0)
    for number in range(_IMAGES.value):
        path = folder / str(number % 10) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.kron(random.integers(256, size=(8, 8, 3)), np.ones((4, 4, 1)))
        path.write_bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy())
    ours = Streaming(ImageFolder(folder, (32, 32, 3)), global_batch_size=_BATCH)
    peer = keras.utils.image_dataset_from_directory(
        folder, image_size=(32, 32), batch_size=_BATCH, verbose=False
    )
    return {"PNGs: ctl": iter(ours.batches()), "PNGs: Keras": iter(peer.repeat())}


def records(folder: Path) -> dict[str, Iterator[Any]]:
    """Streams of the same records, that of the peer last."""
    import numpy as np
    import tensorflow as tf

    from ctl.data import Streaming
    from ctl.data.records import TFRecords

    spec = {"x": tf.io.FixedLenFeature([8], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    paths = [str(folder / f"{number}.tfrecord") for number in range(4)]
    random = np.random.default_rng(0)
    for path in paths:
        with tf.io.TFRecordWriter(path) as file:
            for number in range(_RECORDS.value // len(paths)):
                x = tf.train.FloatList(value=random.normal(size=8))
                y = tf.train.Int64List(value=[number % 10])
                feature = {"x": {"float_list": x}, "y": {"int64_list": y}}
                file.write(tf.train.Example(features={"feature": feature}).SerializeToString())

    def parse(record: tf.Tensor) -> dict[str, tf.Tensor]:
        return tf.io.parse_single_example(record, spec)

    rows = {
        name: iter(
            Streaming(TFRecords(paths, parse), global_batch_size=_BATCH, block=block).batches()
        )
        for name, block in (("records: ctl", 1), ("records: ctl, blocks of 16", 16))
    }
    peer = tf.data.TFRecordDataset(paths).shuffle(_SHUFFLED).repeat().batch(_BATCH)
    peer = peer.map(lambda r: tf.io.parse_example(r, spec), num_parallel_calls=tf.data.AUTOTUNE)
    return {**rows, "records: tf.data": iter(peer.prefetch(2))}


def measure(rows: dict[str, Iterator[Any]]) -> dict[str, dict[str, list[float]]]:
    """Examples per second, and per second of processor time, of each block."""
    found: dict[str, dict[str, list[float]]] = {name: {"s": [], "cpu s": []} for name in rows}
    for number in range(-1, _ROUNDS.value):  # the first one warms up
        for name in in_turn(rows, max(number, 0)):
            progress(f"round {number + 1} of {_ROUNDS.value}: {name}")
            for _ in itertools.islice(rows[name], 20):  # uses up what was read ahead
                pass
            began, cpu = time.perf_counter(), time.process_time()
            for _ in itertools.islice(rows[name], _STEPS.value):
                pass
            examples = _STEPS.value * _BATCH
            if number >= 0:
                found[name]["s"].append(examples / (time.perf_counter() - began))
                found[name]["cpu s"].append(examples / (time.process_time() - cpu))
    progress("")
    return found


def main() -> None:
    about = machine(os.getloadavg()[0])
    print(*(f"{key}={value}" for key, value in about.items()))
    print(f"{'examples per':28}{'s':>10}{'CPU s':>10}{'over the peer, s':>24}{'CPU s':>22}")
    makers: list[Callable[[Path], dict[str, Iterator[Any]]]] = [images, records]
    results: dict[str, Any] = {}
    for make in makers:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(make(Path(folder)))
        peer = [*found.values()][-1]
        for name, of in found.items():
            line = f"{name:28}" + "".join(f"{statistics.median(of[key]):10,.0f}" for key in of)
            for key in of:
                ratios = summary([a / b for a, b in zip(of[key], peer[key], strict=True)])
                line += f"{ratios['median']:10.2f} ({ratios['min']:.2f}-{ratios['max']:.2f})"
            print(line)
        results |= found
    write(_JSON.value, {"machine": about, "rows": results})


if __name__ == "__main__":
    run_command(main, __doc__)
