"""Workers of an input pipeline over TFRecord files: ctl's stream, or a tuned one of tf.data.

The tuned one is what the guide of tf.data recommends: parallel interleave of the files, shuffle,
repeat, parallel map, batch, prefetch, with autotuning. As `experimental_distribute_dataset` does
where batches must not change with the number of workers, each worker decodes all of it.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

from absl import flags
from lines import answerer, serve

from ctl.flags.parsing import group, run_command

with group("This peer"):
    _KIND = flags.DEFINE_enum("kind", "ctl", ["ctl", "tf.data"], "which pipeline")
    _DATA_DIR = flags.DEFINE_string("data_dir", None, "of TFDS")
    _BATCH = flags.DEFINE_integer("global_batch_size", 128, "images per step")


def _of_process(file: str, name: str) -> int:
    lines = pathlib.Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def tuned(source: Any, files: list[str]) -> Any:
    import tensorflow as tf

    auto = tf.data.AUTOTUNE
    return (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files))
        .repeat()
        .interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=auto)
        .shuffle(10_000)
        .map(source.decode, num_parallel_calls=auto)
        .batch(_BATCH.value, drop_remainder=True)
        .prefetch(auto)
    )


def build() -> tuple[dict[str, Any], Any]:
    import tensorflow as tf

    from ctl.data import Streaming
    from ctl.data.tfds_source import Source, find

    source = Source(find("ctl_images", _DATA_DIR.value), "train")
    files = [str(path) for path in sorted(pathlib.Path(_DATA_DIR.value).glob("*/*/*.tfrecord-*"))]
    streams = {
        block: Streaming(source, global_batch_size=_BATCH.value, block=block) for block in (1, 16)
    }
    iterator: Any = None

    def reply(
        steps: int, start: int | None = None, worker: int = 0, workers: int = 1, block: int = 1
    ) -> dict[str, float]:
        """Opens the batches of a worker from ``start`` on, if given, and takes ``steps``."""
        nonlocal iterator
        if start is not None:
            iterator = None  # frees the old one, which is not timed
        read = _of_process("io", "rchar")
        begun, cpu = time.perf_counter(), time.process_time()
        if start is not None:
            batches: Any = tuned(source, files)
            if _KIND.value == "ctl":
                batches = streams[block].shares(start, range(worker, worker + 1), workers)
            iterator = iter(batches)
        for _ in range(steps):
            tf.nest.flatten(next(iterator))[-1].numpy()
        return {
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu,
            "bytes": _of_process("io", "rchar") - read,
            "peak_mib": _of_process("status", "VmHWM") / 1024,
        }

    return {"versions": {"tensorflow": tf.__version__}}, reply


def main() -> None:
    answer = answerer()
    serve(*build(), answer)


if __name__ == "__main__":
    run_command(main, __doc__)
