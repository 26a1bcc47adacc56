"""What one of two workers runs: reads batches of several kinds of sources, from the middle of an
epoch.

python sources_worker.py OUT ROOT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ctl.base import console
from ctl.distributed import cluster

console.log_to_terminal()
console.load_tensorflow()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from stored_sources import stream  # noqa: E402
from worker_end import run_to_end  # noqa: E402

import ctl  # noqa: E402
from ctl.data.feed import open_batches  # noqa: E402
from ctl.distributed.strategy import make_multi_worker  # noqa: E402
from ctl.distributed.watch import watchdog  # noqa: E402

# How all kinds are shared out, see tests/data/test_streaming.py; these have formats and leaves of
# their own.
KINDS = ("tfrecord", "json", "folder", "click_lines", "columns", "mixture")
START, END = 3, 8  # batches of 8; an epoch of 50 ends between


def streams(root: Path) -> Iterator[tuple[str, ctl.data.Streaming, int, int | None]]:
    """Streams with names, where to begin and where to end; those of an evaluation have 8 batches,
    the last of one example."""
    for kind in KINDS:
        yield f"{kind} train", stream(root, kind, 8), START, END
        if kind in ("json", "columns"):
            yield f"{kind} evaluate", stream(root, kind, 7, training=False), 0, 8


def leaves_read(
    strategy: tf.distribute.Strategy, dataset: ctl.data.Streaming, start: int, end: int
) -> list[np.ndarray]:
    """The keys and the leaves of the batches, as far as replicas of this process read them."""
    iterator, batches = open_batches(dataset, strategy, start), []
    for _ in range(start, end):
        parts = strategy.experimental_local_results(next(iterator))
        flat = [[leaf.numpy() for leaf in tf.nest.flatten(part)] for part in parts]
        batches += [flat]
    shares = [share for batch in batches for share in batch]
    return [np.concatenate(leaf) for leaf in zip(*shares, strict=True)]


def main() -> None:
    out, root = map(Path, sys.argv[1:])
    me = cluster.resolve(None, None)
    strategy = make_multi_worker(me, collective_timeout=60, startup_timeout=60).strategy
    for name, *how in streams(root):
        with watchdog.collective("reading"):  # outside of a graph, TensorFlow asks who has data
            leaves = leaves_read(strategy, *how)
        leaves = [a.astype("S") if a.dtype == object else a for a in leaves]
        np.savez(out / f"{name} {me.index}.npz", *leaves)
    ctl.workers.leave_together(strategy)


def run() -> None:
    run_to_end(main)


if __name__ == "__main__":
    run()
