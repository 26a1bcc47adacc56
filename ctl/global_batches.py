"""The only place for what all datasets share: global batches, given to a strategy to be split.

What `ctl.Loop` asks of a dataset::

    global_batch_size     examples per optimizer update, None where unknown
    num_examples          examples per epoch, None where unknown
    batches(start_step)   tf.data.Dataset of the global batches from that step on, none empty
    resident(strategy)    tensors that stay on every replica's device, made once; () for none
    on_replica(element, resident)   what the step sees, built in replica context from an element
    fingerprint()         what identifies the data and their order, for a checkpoint to compare
    steps_per_element     optional: batches that may be read at once, where they are small, cheap,
                          endless and of one shape (`ctl.feed`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ctl import share
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


class GlobalBatches:
    """A ``tf.data.Dataset`` of your own, whose elements are global batches.

    It is resumed with ``skip``, which reads and drops all batches before: exact where the dataset
    is deterministic, at a cost that grows with the step. To train, it is repeated for ever.
    Elements without examples are left out. Its autotuning is turned off (`distribution_options`
    says why) unless its options ask for it.
    """

    num_examples: int | None = None

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        global_batch_size: int | None = None,
        training: bool = True,
    ):
        """``global_batch_size``: by default the static leading dimension of the elements."""
        if dataset.options().autotune.enabled is None:
            options = tf.data.Options()
            options.autotune.enabled = False
            dataset = dataset.with_options(options)
        specs = tf.nest.flatten(dataset.element_spec)
        if any(spec.shape.rank != 0 and spec.shape[0] is None for spec in specs):
            dataset = dataset.filter(_has_examples)
        self._dataset = dataset.repeat() if training else dataset
        self._global_batch_size = global_batch_size
        self.info = DatasetInfo("tf.data")
        self.description = "a tf.data.Dataset of global batches, resumed by skipping"

    @property
    def global_batch_size(self) -> int | None:
        """None where it is neither static nor was given."""
        if self._global_batch_size:
            return self._global_batch_size
        sizes = {
            spec.shape[0] if spec.shape.rank else None
            for spec in tf.nest.flatten(self._dataset.element_spec)
        }
        return sizes.pop() if len(sizes) == 1 else None

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """The elements from ``start_step`` on, as they are."""
        return self._dataset.skip(start_step) if start_step else self._dataset

    def resident(self, strategy: tf.distribute.Strategy) -> tuple[()]:
        return ()

    def on_replica(self, element: Any, resident: tuple[()]) -> Any:
        return element

    def fingerprint(self) -> dict[str, Any]:
        """Empty: nothing is known of the data."""
        return {}


@tf.autograph.experimental.do_not_convert
def _has_examples(*element: Any) -> tf.Tensor:
    return tf.greater(share.rows(element), 0)


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
