"""What programs have as data, as a `Dataset`: arrays, a PyDataset of Keras, a tf.data.Dataset."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.data import callbacks
from ctl.data.arrays import content_hash, native
from ctl.data.dataset import Dataset, DatasetInfo, NotResident, distribution_options
from ctl.data.global_batches import GlobalBatches
from ctl.data.in_memory import InMemory
from ctl.data.order import VERSION, Shuffle
from ctl.data.streaming import Streaming
from ctl.errors import UsageError

_RESIDENT_BYTES = 1 << 30  # larger arrays are streamed, see --resident_limit_mib
_EVALUATION_BATCH = 256  # changes no result


def as_dataset(
    dataset: Any, *, global_batch_size: int | None = None, training: bool = True
) -> Dataset:
    """Returns ``dataset`` as a `Dataset`.

    Args:
        dataset: arrays ``(x, y)`` or ``(x, y, weights)``, also of tuples and dicts; a
            `keras.utils.PyDataset`; a ``tf.data.Dataset`` of global batches; or a `Dataset`.
        global_batch_size: of arrays, which need it to train on; of a ``tf.data.Dataset``, whose
            batches have this size.
        training: whether to shuffle and repeat.

    Raises:
        UsageError: ``dataset`` is none of these, or has no ``global_batch_size`` or another one.
    """
    made: Dataset
    if isinstance(dataset, tf.data.Dataset):
        return GlobalBatches(dataset, global_batch_size=global_batch_size, training=training)
    if isinstance(dataset, keras.utils.PyDataset):
        made = PyDatasetBatches(dataset, training=training)
    elif hasattr(dataset, "batches") and hasattr(dataset, "on_replica"):
        made = dataset
    elif _are_arrays(dataset):
        return _of_arrays(dataset, global_batch_size, training)
    else:
        raise UsageError(_why_none(dataset))
    if global_batch_size not in (None, made.global_batch_size):
        raise UsageError(
            f"global_batch_size={global_batch_size} has no effect on {made.info.name}, which makes "
            "its own batches: leave it out"
        )
    return made


def _why_none(data: Any) -> str:
    kind = type(data).__name__
    if isinstance(data, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator):
        return (
            f"a {kind} is distributed already: give the tf.data.Dataset of global batches, which "
            "the loop distributes"
        )
    of_python = isinstance(data, Iterator) and not isinstance(data, tf.data.Iterator)
    if of_python or inspect.isgeneratorfunction(data):
        return (
            f"a {kind} is not a dataset: give tf.data.Dataset.from_generator(a function that "
            "yields examples, output_signature=…).batch(…)"
        )
    if callable(data) and not isinstance(data, type):
        return (
            f"a {kind} is not a dataset: call it, and give the tf.data.Dataset of global batches; "
            "for a tf.distribute.InputContext, without shard(), since each worker takes its part"
        )
    if hasattr(data, "to_numpy"):
        return (
            f"a {kind} is not a dataset: give its features and its labels, such as "
            "(data[['age', 'fare']].to_numpy(), data['label'].to_numpy())"
        )
    parts = data if isinstance(data, tuple) else data.values() if isinstance(data, dict) else ()
    for part in parts:
        if not isinstance(part, tuple | dict | np.ndarray | tf.Tensor):
            return f"the data have a {type(part).__name__} in place of an array: {_remedy(part)}"
    if isinstance(data, list) and len(data) in (2, 3):
        return "a list is not a dataset: give a tuple of arrays, (x, y)"
    return (
        f"a {kind} is not a dataset: give arrays (x, y) or (x,), a keras.utils.PyDataset, a "
        "tf.data.Dataset of global batches, or one of ctl.data"
    )


def _remedy(part: Any) -> str:
    """What to give in place of ``part``, which is no array."""
    for method in ("to_numpy", "toarray"):  # of pandas and of scipy.sparse
        if hasattr(part, method):
            return f"give its {method}()"
    if part is None:
        return "leave it out"
    if isinstance(part, tf.RaggedTensor):
        return "give tf.data.Dataset.from_tensor_slices((x, y)).batch(…)"
    try:
        np.asarray(part)
    except ValueError:
        return "its items differ in length: pad them, with keras.utils.pad_sequences"
    return "give numpy.asarray of it"


def _are_arrays(data: Any) -> bool:
    leaves = tf.nest.flatten(data) if isinstance(data, tuple | dict) else []
    return bool(leaves) and all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves)


def _of_arrays(arrays: Any, size: int | None, training: bool) -> Dataset:
    arrays = tf.nest.map_structure(np.asarray, arrays)
    if size is None and training:
        raise UsageError(
            "arrays need the size of a global batch: give global_batch_size=32, which is that of "
            "fit, or ctl.data.InMemory(arrays, global_batch_size=32)"
        )
    leaves = tf.nest.flatten(arrays)
    large = sum(leaf.nbytes for leaf in leaves) > _RESIDENT_BYTES
    kind = Streaming if large else InMemory
    return kind(arrays, global_batch_size=size or _EVALUATION_BATCH, training=training)


class PyDatasetBatches(NotResident):
    """The batches of a `keras.utils.PyDataset`, whose items are global batches.

    Its ``workers`` are threads, which read ahead. A training takes the batches of each epoch in a
    new order, which is a function of ``seed`` and the epoch; an evaluation takes them once. So a
    resume repeats the order, and reads no earlier batch. ``on_epoch_end`` is not called: what it
    changes would depend on how far the threads have read.

    Args:
        dataset: its items are nests of arrays with equal leading dimensions.
        seed: of the order of batches.
        training: whether to shuffle and repeat.

    Raises:
        UsageError: it has no batches, wants processes, or an evaluation would never end.
    """

    num_examples: int | None = None
    global_batch_size: int | None = None
    #: What to try if steps wait for the batches.
    faster = "more workers= of the PyDataset, whose threads read items, or a cheaper __getitem__"

    def __init__(self, dataset: keras.utils.PyDataset, *, seed: int = 0, training: bool = True):
        name = type(dataset).__name__
        self.batches_per_epoch: int | None = dataset.num_batches
        if self.batches_per_epoch == 0:
            raise UsageError(f"{name} has no batches")
        if self.batches_per_epoch is None and not training:
            raise UsageError(f"{name} has no length, so its evaluation would never end")
        if dataset.use_multiprocessing:
            raise UsageError(
                f"{name} has use_multiprocessing=True, and ctl calls it in threads: leave it out; "
                "workers=N are threads"
            )
        if type(dataset).on_epoch_end is not keras.utils.PyDataset.on_epoch_end and training:
            logging.warning(
                "%s.on_epoch_end() is not called: ctl takes the batches of each epoch in a new "
                "order, which a resume repeats",
                name,
            )
        self.info = DatasetInfo(name)
        self.training, self.seed = training, seed
        length = "endless" if self.batches_per_epoch is None else f"of {self.batches_per_epoch}"
        self.description = f"{name}, a PyDataset {length} batches"
        self._dataset = dataset
        shuffles = training and self.batches_per_epoch
        self._order = Shuffle(self.batches_per_epoch or 1, seed) if shuffles else None
        self._first = self._item(0)
        self.example_spec: Any = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], array.dtype), self._first
        )
        self._spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.example_spec
        )

    def _item(self, index: int) -> Any:
        return native(tf.nest.map_structure(np.asarray, self._dataset[index]), self.info.name)

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """See `Dataset.batches`."""
        ends = not self.training
        end = self.batches_per_epoch if ends else tf.int64.max
        read = tf.data.Dataset.range(start_step, end).map(
            self._batch, num_parallel_calls=max(1, self._dataset.workers), deterministic=True
        )
        ahead = max(1, self._dataset.max_queue_size)
        return read.prefetch(ahead).with_options(distribution_options())

    def _batch(self, position: tf.Tensor) -> Any:
        leaves = callbacks.call(self._read, [position], tf.nest.flatten(self._spec))
        return callbacks.own_memory(tf.nest.pack_sequence_as(self._spec, leaves))

    def _read(self, position: np.ndarray) -> list[np.ndarray]:
        index = int(position)
        if self._order:
            index = int(self._order(np.array([index]))[0])
        item = self._item(index)
        tf.nest.assert_same_structure(self._first, item)
        pairs = zip(tf.nest.flatten(item), tf.nest.flatten(self._spec), strict=True)
        leaves = []
        for array, spec in pairs:
            if array.dtype != spec.dtype.as_numpy_dtype or not spec.shape.is_compatible_with(
                array.shape
            ):
                raise UsageError(
                    f"{self.info.name}[{index}] has an array {array.dtype} {list(array.shape)}, "
                    f"where item 0 has {spec.dtype.name} {spec.shape.as_list()}: make all alike"
                )
            leaves.append(array)
        return leaves

    def fingerprint(self) -> dict[str, Any]:
        """See `Dataset.fingerprint`."""
        return {
            "name": self.info.name,
            "batches": self.batches_per_epoch,
            "elements": str(self._spec),
            "first examples": content_hash(self._first)[:12],
            "seed": self.seed,
            "order": VERSION,
        }
