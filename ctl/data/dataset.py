"""The interface of datasets, and code that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from ctl.base.autograph import with_autograph
from ctl.errors import UsageError


@dataclass(frozen=True)
class DatasetInfo:
    """A description of a dataset, for models and reports. ``None`` and empty mean unknown.

    Attributes:
        image_shape: [height, width, channels]; of a table, [columns].
        class_names: in the order of the labels.
        num_outputs: of a model, where the labels are numbers and no classes.
        vocabulary_size: of text: its tokens are below it.
        mean, deviation: of each column of a table, in the training data: a model of ctl begins by
            standardizing the columns.
    """

    name: str
    version: str = ""
    split: str = ""
    image_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    num_outputs: int | None = None
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    vocabulary_size: int | None = None


class Dataset(Protocol):
    """Global batches, which the strategy splits over replicas and workers.

    The order must be a pure function of (seed, epoch, position). A checkpoint then needs the step
    number only, and the batches are the same for any number of replicas.

    Attributes:
        info: see `DatasetInfo`.
        description: one line for the log.
        steps_per_element: optional, 1 by default. Number of batches that `ctl.data.feed` may read
            at once. More than 1 requires endless batches of one shape, and pays if they are small.
        batches_per_epoch: optional, where ``num_examples`` or ``global_batch_size`` is None.
        shares: optional, the method of `ctl.data.Streaming` by which a worker reads only the parts
            of its own replicas. Without it, each worker reads all `batches`.
    """

    info: DatasetInfo
    description: str

    @property
    def global_batch_size(self) -> int | None:
        """Examples per optimizer update; None where unknown."""

    @property
    def num_examples(self) -> int | None:
        """Examples per epoch; None where unknown."""

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns the global batches from ``start_step`` on, none of them empty."""

    def resident(self, strategy: tf.distribute.Strategy) -> Any:
        """Returns tensors that stay on every replica's device, ``()`` for none. Called once."""

    def on_replica(self, element: Any, resident: Any) -> Any:
        """Returns the batch for the step, from a replica's part of one element of `batches`.

        Called in replica context.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON values that identify the data and their order; a restore compares them."""


class NotResident:
    """What datasets share whose batches have the examples themselves."""

    def resident(self, strategy: tf.distribute.Strategy) -> tuple[()]:
        """See `Dataset.resident`."""
        return ()

    def on_replica(self, element: Any, resident: tuple[()]) -> Any:
        """See `Dataset.on_replica`."""
        return element


def on_replica(dataset: Dataset, element: Any, resident: Any) -> Any:
    """`Dataset.on_replica`, which may be the user's, in a graph."""
    return with_autograph(dataset.on_replica)(element, resident)


def check_batch_size(global_batch_size: int, num_examples: int, training: bool) -> None:
    """Raises `UsageError` if the examples do not make one batch."""
    if not hasattr(global_batch_size, "__index__"):
        raise UsageError(f"global_batch_size must be a whole number, not {global_batch_size!r}")
    if global_batch_size < 1:
        raise UsageError(f"the global batch size must be at least 1, not {global_batch_size}")
    if num_examples < 1:
        raise UsageError("the dataset has no examples")
    if training and global_batch_size > num_examples:
        raise UsageError(
            f"the global batch size {global_batch_size} is larger than the dataset, which has "
            f"{num_examples} examples: give global_batch_size={num_examples} or less"
        )


def distribution_options() -> tf.data.Options:
    """Returns options with which every worker makes the same global batches and takes its part."""
    options = tf.data.Options()
    options.deterministic = True
    # Autotuning has a thread that sleeps for up to a minute and sometimes misses that it should end
    # (TensorFlow 2.21). Freeing the iterator then waits for the thread: 87 s in one measurement.
    # Without autotuning, a parallel map makes as many calls as there are threads.
    options.autotune.enabled = False
    # AUTO shards by file, so global batches would change with the number of workers.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return options


def fingerprint(dataset: Any, content: str) -> dict[str, Any]:
    """Returns the `Dataset.fingerprint` of ``dataset``; ``content`` is a hash of its examples."""
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
