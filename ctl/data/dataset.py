"""What the loop asks of a dataset, and what all datasets share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from ctl.errors import UsageError


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and a report want to know. ``None`` and empty: not known."""

    name: str
    version: str = ""
    split: str = ""
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()


class Dataset(Protocol):
    """Global batches, which the strategy splits over replicas and workers.

    The order must be a pure function of (seed, epoch, position): then a step number is all that a
    checkpoint has to hold, and the batches are the same for any number of replicas.

    Attributes:
        global_batch_size: examples per optimizer update; None where unknown.
        num_examples: examples per epoch; None where unknown.
        info: see `DatasetInfo`.
        description: one line for the log.
        steps_per_element: optional, 1 by default. Batches that `ctl.data.feed` may read at once:
            more than 1 where they are small, endless and of one shape.
    """

    info: DatasetInfo
    description: str

    @property
    def global_batch_size(self) -> int | None: ...

    @property
    def num_examples(self) -> int | None: ...

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """The global batches from ``start_step`` on. None of them is empty."""

    def resident(self, strategy: tf.distribute.Strategy) -> Any:
        """Tensors that stay on every replica's device, made once; ``()`` for none."""

    def on_replica(self, element: Any, resident: Any) -> Any:
        """The batch that the step sees, built in replica context from one element."""

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the data and their order; a checkpoint compares it."""


def check_batch_size(global_batch_size: int, num_examples: int, training: bool) -> None:
    """Raises `UsageError` where not one batch can be made."""
    if global_batch_size < 1:
        raise UsageError(f"the global batch size must be at least 1, not {global_batch_size}")
    if num_examples < 1:
        raise UsageError("the dataset has no examples")
    if training and global_batch_size > num_examples:
        raise UsageError(
            f"the global batch size {global_batch_size} is larger than the dataset: it has "
            f"{num_examples} examples"
        )


def distribution_options() -> tf.data.Options:
    """Every worker makes the same global batches and takes its part of each."""
    options = tf.data.Options()
    options.deterministic = True
    # Autotuning has a thread that sleeps for up to a minute and now and then misses that it should
    # end (TensorFlow 2.21); whoever frees the iterator waits for it: measured, 87 s. Without it, a
    # parallel map has as many calls as there are threads.
    options.autotune.enabled = False
    # AUTO shards by file: what is in a global batch would change with the number of workers.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def fingerprint(dataset: Any, content: str) -> dict[str, Any]:
    """What identifies the examples and their order. ``content``: a hash of the examples."""
    return {
        "name": dataset.info.name,
        "version": dataset.info.version,
        "split": dataset.info.split,
        "num_examples": dataset.num_examples,
        "content": content,
        "seed": dataset.seed,
        "global_batch_size": dataset.global_batch_size,
        # The permutations may differ between versions of TensorFlow.
        "tensorflow": tf.__version__,
    }
