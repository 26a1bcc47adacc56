"""A user's own ``tf.data.Dataset`` of global batches."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from ctl.base import tf_internals
from ctl.data.callbacks import own_memory
from ctl.data.dataset import DatasetInfo, NotResident
from ctl.data.feed import element_of
from ctl.distributed import local_batch
from ctl.errors import UsageError

_READ_AGAIN_SECONDS = 20.0
_HASHED_ELEMENTS = 16  # below a shuffle, usually single examples

# Operations whose last input is the generator of their seeds.
_WITH_GENERATOR = "ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2", "RandomDatasetV2"

# What draws the order of the elements, see `tf_internals.pipeline`.
_UNSEEDED = {
    "shuffle": "a shuffle without a seed: no other process can repeat its order, so "
    "loop.restore() refuses the checkpoints of this run there; start with shuffle(..., seed=1), or "
    "list_files(..., seed=1)",
    "random": "a random choice without a seed: no other process can repeat it, so loop.restore() "
    "refuses the checkpoints of this run there; start with sample_from_datasets(..., seed=1)",
}


class GlobalBatches(NotResident):
    """A user's ``tf.data.Dataset`` whose elements are global batches.

    It resumes with ``skip``, which reads and drops all earlier batches. This is exact if the
    dataset is deterministic, at a cost that grows with the step. In training, the dataset is
    repeated without end. Elements without examples are left out. Autotuning is turned off (see
    `ctl.data.dataset.distribution_options`) unless the dataset's options turn it on.

    With several workers, each reads all global batches and takes its part of each, unless the
    dataset's options have an ``auto_shard_policy``.
    """

    num_examples: int | None = None

    @property
    def faster(self) -> str:
        """What to try if steps wait for the batches."""
        if self.pipeline.may_call_python:
            return (
                "less Python in the tf.data.Dataset: a keras.utils.PyDataset with workers=4 reads "
                "in threads, and operations of TensorFlow in map() run in parallel"
            )
        return (
            "parsing whole batches, batch() before map() with tf.io.parse_example; "
            "map(..., num_parallel_calls=16); cache() if the data fit in memory; prefetch() at the "
            "end"
        )

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        global_batch_size: int | None = None,
        training: bool = True,
    ):
        """Wraps ``dataset``.

        Args:
            dataset: its elements are nests of tensors with equal leading dimension.
            global_batch_size: examples in an element; by default its static leading dimension.
            training: whether to repeat ``dataset`` without end.

        Raises:
            UsageError: ``dataset`` has no elements, or is for an evaluation and never ends; or its
                elements are single examples, or batches of another size than ``global_batch_size``.
        """
        element = dataset.element_spec
        labels = element[1] if local_batch.has_parts(element) else None
        if isinstance(labels, tf.TensorSpec) and labels.shape.rank == 0:
            raise UsageError(
                "the elements of the tf.data.Dataset are single examples: make global batches of "
                "them, with .batch(…)"
            )
        if not training and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise UsageError("the evaluation dataset never ends: leave out repeat()")
        length = int(dataset.cardinality())
        if length == 0:
            raise UsageError(
                "the tf.data.Dataset has no batches (batch(…, drop_remainder=True) gives none of "
                "fewer examples than a batch): look at the data, or make smaller batches"
            )
        self.batches_per_epoch = length if length > 0 else None  # below 0: endless or unknown
        given, policies = dataset.options(), tf.data.experimental.AutoShardPolicy
        options = tf.data.Options()
        if given.autotune.enabled is None:
            options.autotune.enabled = False
        if given.experimental_distribute.auto_shard_policy == policies.AUTO:
            options.experimental_distribute.auto_shard_policy = policies.DATA
        dataset = dataset.with_options(options)
        specs = tf.nest.flatten(dataset.element_spec)
        if any(spec.shape.rank != 0 and spec.shape[0] is None for spec in specs):
            dataset = dataset.filter(lambda *element: tf.greater(local_batch.rows(element), 0))
        self._dataset = dataset.repeat() if training else dataset
        self.pipeline = tf_internals.pipeline(dataset)
        size = self.pipeline.batch
        if global_batch_size and size and size != global_batch_size:
            raise UsageError(
                f"global_batch_size={global_batch_size}, but the tf.data.Dataset makes batches of "
                f"{size} examples: give global_batch_size={size}, or .batch({global_batch_size})"
            )
        self._seeds: Any = self.pipeline.seeds
        if not _UNSEEDED.keys().isdisjoint(self.pipeline.unseeded):
            self._seeds = f"without a seed: another order in each run ({os.urandom(2).hex()})"
        self._global_batch_size = global_batch_size
        self.info = DatasetInfo("tf.data")
        self.description = "a tf.data.Dataset of global batches, resumed by skipping"

    @property
    def global_batch_size(self) -> int | None:
        """Examples per global batch; None if it is neither static nor given."""
        if self._global_batch_size:
            return self._global_batch_size
        sizes = {
            spec.shape[0] if spec.shape.rank else None
            for spec in tf.nest.flatten(self._dataset.element_spec)
        }
        return sizes.pop() if len(sizes) == 1 else None

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns the elements from ``start_step`` on."""
        later = self._dataset.skip(start_step) if start_step else self._dataset
        if not self.pipeline.may_call_python:
            return later
        return later.map(lambda *element: own_memory(element_of(element)))

    def rewind(self) -> None:
        """Lets `batches` begin anew: a ``shuffle`` that was read has other seeds than in a new
        process, so a second reading resumes with other batches."""
        try:
            self._dataset = self.copy()._dataset
        except Exception as error:  # above 2 GiB, or with state that cannot be copied
            logging.warning(
                "the tf.data.Dataset goes on in another order than in a new process, because "
                "its shuffle was read before and cannot be copied: %s",
                str(error).partition("\n")[0][:200],
            )

    def copy(self) -> GlobalBatches:
        """Returns these batches as nobody has read them. Copies the dataset for it, with the arrays
        that it holds, if it shuffles."""
        other = copy.copy(self)
        if self.pipeline.seeds:
            other._dataset = _with_first_seeds(self._dataset)
        return other

    def fingerprint(self) -> dict[str, Any]:
        """Returns what `order` does, and a hash of the first elements. Read are only the parts
        below each shuffle and other random numbers: these would draw others from then on."""
        content = hashlib.sha256()
        for part in self.pipeline.fixed:
            for element in part.take(_HASHED_ELEMENTS if self.pipeline.seeds else 1):
                for tensor in tf.nest.flatten(element, expand_composites=True):
                    content.update(tf.io.serialize_tensor(tensor).numpy())
        return {**self.order(), "first examples": content.hexdigest()[:12]}

    def order(self) -> dict[str, Any]:
        """Returns the types of the elements, and the seeds; reads nothing. Without a seed, no two
        of these datasets have one order."""
        return {"elements": str(self._dataset.element_spec), "shuffle": self._seeds}


def _with_first_seeds(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A copy of ``dataset`` whose shuffles have not been read. They share a generator of seeds with
    the dataset, and make a new one where that does not exist."""
    variant = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset), external_state_policy=1
    )  # 1: keeps variables and tables
    graph = tf.compat.v1.GraphDef.FromString(variant.numpy())
    none = graph.node.add(name="no_generator_of_seeds", op="DummySeedGenerator").name
    for node in graph.node:
        if node.op in _WITH_GENERATOR:
            node.input[-1] = none
    copy = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    copied = tf.data.experimental.from_variant(copy, dataset.element_spec)
    return copied.with_options(dataset.options())


def comparable(dataset: Any) -> Callable[[], Mapping[str, Any]]:
    """The `Dataset.fingerprint` that a resume in Python compares. It has no examples that Python
    code makes: to ask for them might wait for another thread, or take them from the training.
    Warns of random numbers without a seed, which no resume repeats."""
    if not isinstance(dataset, GlobalBatches):
        return getattr(dataset, "fingerprint", dict)
    for what in dataset.pipeline.unseeded:
        logging.warning(
            "the tf.data.Dataset has %s",
            _UNSEEDED.get(what)
            or f"random numbers without a seed in {what}(): a resume draws others; give seed=, or "
            "use tf.random.stateless_uniform and the like",
        )
    return dataset.order if dataset.pipeline.may_call_python else dataset.fingerprint


def read_again(dataset: Any, step: int) -> Any:
    """The batch of ``step`` of a stream or a user's ``tf.data.Dataset``; None if it cannot be read
    within some seconds, or for another kind of dataset."""
    found: list[Any] = []

    def read() -> None:
        with contextlib.suppress(Exception):  # of the user's code
            untouched = dataset
            if isinstance(dataset, GlobalBatches):  # whose shuffles would draw other seeds then
                untouched = dataset.copy()
            found.append(dataset.on_replica(next(iter(untouched.batches(step - 1))), ()))

    if isinstance(dataset, NotResident):
        thread = threading.Thread(target=read, name="read_again", daemon=True)
        thread.start()
        thread.join(_READ_AGAIN_SECONDS)
    return found[0] if found else None
