"""The global batches of a dataset, as the replicas of a strategy see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data.feed import open_batches


def seen(strategy: tf.distribute.Strategy, dataset: Any, start: int, count: int) -> list[Any]:
    """``count`` batches from step ``start`` on: nests of arrays, with the parts of all replicas."""
    iterator, resident = open_batches(dataset, strategy, start), dataset.resident(strategy)

    @tf.function
    def next_batch(iterator, resident):
        return strategy.run(dataset.on_replica, args=(next(iterator), resident))

    def joined(parts: Any) -> np.ndarray:
        return np.concatenate([p.numpy() for p in strategy.experimental_local_results(parts)])

    return [tf.nest.map_structure(joined, next_batch(iterator, resident)) for _ in range(count)]
