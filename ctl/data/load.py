"""Datasets by name, from TensorFlow Datasets, and synthetic ones; in memory if they fit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from ctl.base.names import HOLD_OUT
from ctl.base.remote import PathLike
from ctl.data import tfds_source
from ctl.data.dataset import DatasetInfo, check_batch_size
from ctl.data.errors import translate_data_errors
from ctl.data.in_memory import InMemory
from ctl.data.sources import Arrays
from ctl.data.streaming import Streaming
from ctl.data.tfds_source import Columns, ImageSource
from ctl.errors import UsageError


class Splits(NamedTuple):
    """TFDS split strings: what to train on, to evaluate on meanwhile, and to test on at the end.

    None is the default of `load`; for ``test``, that there is no such split.
    """

    train: str | None = None
    evaluation: str | None = None
    test: str | None = None


def selection_splits(
    name: str, data_dir: PathLike | None = None, *, download: bool = True
) -> Splits:
    """Returns splits for a training that selects its best checkpoint: not on what it is tested on.

    It selects on ``validation``. If there is no such split, it selects on the last tenth of
    ``train``, and trains on the rest. TFDS has shuffled the examples when it prepared them.

    Args:
        name, data_dir, download: see `load`.

    Raises:
        UsageError: as `load` does for these arguments.
    """
    splits = tfds_source.find(name, data_dir, download=download).info.splits
    test = "test" if "test" in splits else None
    if "validation" in splits:
        return Splits("train", "validation", test)
    return Splits("train[:90%]", "train[90%:]", test)


def check_apart(
    name: str, given: Splits, data_dir: PathLike | None = None, *, download: bool = True
) -> None:
    """Refuses to evaluate on examples of the training; warns, if both splits are ``given``.

    Args:
        name, data_dir, download: see `load`.
        given: the splits to train and to evaluate on; by default those of `load`.

    Raises:
        UsageError: one split is given, and has examples of the other; or as `load` does for these
            arguments.
    """
    builder, train = _open(name, data_dir, download, given.train, True)
    evaluation = given.evaluation or _open(name, data_dir, download, None, False)[1]
    splits = builder.info.splits
    try:
        trained, evaluated = (
            [
                (part.splitname, part.from_ or 0, part.to or splits[part.splitname].num_examples)
                for part in tfds.core.ReadInstruction.from_spec(split).to_absolute(splits)
            ]
            for split in (train, evaluation)
        )
    except (ValueError, KeyError, AssertionError):  # there is no such split, as `load` says
        return
    common = sum(
        max(0, min(end, last) - max(begin, first))
        for name_of_one, begin, end in trained
        for name_of_other, first, last in evaluated
        if name_of_one == name_of_other
    )
    if common:
        share = f"{common} of the {sum(last - first for _, first, last in evaluated)}"
        refuse_common(name, share, train, evaluation, bool(given.train and given.evaluation))


def refuse_common(name: str, share: str, train: str, other: str, meant: bool) -> None:
    """Raises `UsageError`, since a ``share`` of the examples of ``other`` is in ``train``, too.
    Warns, if that is ``meant``."""
    what = f"{name}: {share} examples of {other} are in {train}, too"
    if not meant:
        raise UsageError(f"{what}: give both, such as {HOLD_OUT}")
    logging.warning("%s: their results are too good", what)


def _open(
    name: str, data_dir: PathLike | None, download: bool, split: str | None, training: bool
) -> tuple[tfds.core.DatasetBuilder, str]:
    """The dataset, and the split to train on, or to evaluate on, where none is named."""
    builder = tfds_source.find(name, data_dir, download=download)
    if split is None:
        split = "train" if training else "test" if "test" in builder.info.splits else "validation"
    return builder, split


def in_memory_or_streamed(
    source: Any,
    resident_limit_mib: float,
    shuffle_block: int,
    on_bad_record: str,
    **order: Any,
) -> InMemory | Streaming:
    """Keeps a split in memory if it fits, and streams it if not; see `load` for the arguments.

    ``source`` has ``info``, ``description`` and ``decoded_bytes``. ``order`` is
    ``global_batch_size``, ``training`` and ``seed``."""
    check_batch_size(order["global_batch_size"], len(source), order["training"])
    mib = source.decoded_bytes / 2**20
    if mib > resident_limit_mib:
        why = f"streamed: {mib:.1f} MiB are over the limit of {resident_limit_mib:g} MiB"
        order["description"] = f"{source.description}, {why}"
        return Streaming(source, block=shuffle_block, on_bad_record=on_bad_record, **order)
    if shuffle_block != 1 and order["training"]:
        raise UsageError(
            f"shuffle_block={shuffle_block} has no effect on data in memory: leave it out, or "
            "stream them with resident_limit_mib=0"
        )
    order["description"] = f"{source.description}, {mib:.1f} MiB resident"
    arrays = _arrays(source, on_bad_record, order["description"])
    info, labels = source.info, arrays[1]
    if isinstance(source, ImageSource):
        source.check_labels(labels)
    is_class = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    if info.num_classes is None and is_class:
        info = dataclasses.replace(info, num_classes=int(labels.max()) + 1)
    return InMemory(arrays, info=info, **order)


def load(
    name: str = "fashion_mnist_mini",
    *,
    global_batch_size: int,
    training: bool = True,
    split: str | None = None,
    seed: int = 0,
    data_dir: PathLike | None = None,
    download: bool = True,
    image_shape: tuple[int, int, int] | None = None,
    resident_limit_mib: float = 1024,
    shuffle_block: int = 1,
    on_bad_record: str = "stop",
) -> InMemory | Streaming:
    """Loads a TFDS dataset of images and integer labels, in memory if it fits, else streamed.

    The ``description`` of the result says which of the two was chosen, and why.

    Args:
        name: of the dataset; may include a config and a version, as for ``tfds.builder``.
        global_batch_size: examples per batch.
        training: whether to shuffle and repeat.
        split: a TFDS split string; by default ``train`` to train, and to evaluate ``test``, or
            ``validation`` where there is no ``test``.
        seed: of the order of examples.
        data_dir: where to look for and prepare datasets; by default that of TFDS. In a store, see
            `ctl.base.remote.StorePath`, they must be prepared.
        download: whether a dataset that is not prepared may be downloaded.
        image_shape: [H, W, C] to resize images to; needed where their sizes vary.
        resident_limit_mib: largest decoded size, in MiB, that is kept in memory.
        shuffle_block: of what is streamed, the ``block`` of `Streaming`.
        on_bad_record: ``stop`` or ``skip``, see `Streaming`.

    Raises:
        UsageError: the name or the split is unknown, the files are damaged or not suitable, the
            download fails, there are fewer examples than a training batch, or a
            ``shuffle_block`` other than 1 is for training data that are kept in memory.
    """
    builder, split = _open(name, data_dir, download, split, training)
    return in_memory_or_streamed(
        ImageSource(builder, split, image_shape),
        resident_limit_mib,
        shuffle_block,
        on_bad_record,
        global_batch_size=global_batch_size,
        training=training,
        seed=seed,
    )


def load_columns(
    name: str,
    features: Sequence[str],
    labels: Sequence[str],
    *,
    global_batch_size: int,
    training: bool = True,
    split: str | None = None,
    seed: int = 0,
    data_dir: PathLike | None = None,
    download: bool = True,
    resident_limit_mib: float = 1024,
    shuffle_block: int = 1,
    on_bad_record: str = "stop",
) -> InMemory | Streaming:
    """Loads batches ``(features, labels)`` of any numbers of a TFDS dataset, in memory if they fit,
    else streamed.

    Args:
        name: see `load`, as for all that follow ``labels``.
        features: names of features; ``a/b`` is part b of a. One is an array, or the dict that it
            is; several are a dict by these names. bytes that are no images become int32, since a
            step scales uint8 to [0, 1].
        labels: as ``features``. The number of classes of an integer label that TFDS does not know
            as a class is counted where the data are in memory.

    Raises:
        UsageError: as `load` does; there is no such feature, it is no number or varies in
            size.
    """
    builder, split = _open(name, data_dir, download, split, training)
    return in_memory_or_streamed(
        Columns(builder, split, features, labels),
        resident_limit_mib,
        shuffle_block,
        on_bad_record,
        global_batch_size=global_batch_size,
        training=training,
        seed=seed,
    )


def _arrays(source: Any, on_bad_record: str, description: str) -> Any:
    if isinstance(source, Arrays):
        return source.arrays
    if isinstance(source, ImageSource) and source.is_sequential and on_bad_record == "stop":
        with contextlib.suppress(tf.errors.OpError):  # `read_all` names what is damaged
            return source.in_order()
    return read_all(source, on_bad_record, description)


def read_all(source: Any, on_bad_record: str = "stop", description: str = "") -> Any:
    """All examples of ``source`` in its order: a nest of arrays [N, ...]. Raises as `Streaming`."""
    dataset = Streaming(
        source,
        global_batch_size=256,
        training=False,
        on_bad_record=on_bad_record,
        description=description,
    )
    arrays = tf.nest.map_structure(
        lambda spec: np.empty([len(source), *spec.shape], spec.dtype.as_numpy_dtype),
        dataset.example_spec,
    )
    end = 0
    with translate_data_errors(dataset):
        for keys, batch in dataset.batches().as_numpy_iterator():
            begin, end = end, end + len(keys)
            for whole, part in zip(tf.nest.flatten(arrays), tf.nest.flatten(batch), strict=True):
                whole[begin:end] = part
    return arrays


def synthetic(
    image_shape: tuple[int, int, int] = (28, 28, 1),
    num_classes: int = 10,
    num_examples: int = 10_000,
    *,
    global_batch_size: int,
    seed: int = 0,
    training: bool = True,
) -> InMemory:
    """Returns random uint8 images and int64 labels, fixed by ``seed``, to time steps with."""
    random = np.random.default_rng([seed, int(training)])
    images = random.integers(256, size=(num_examples, *image_shape), dtype=np.uint8)
    labels = random.integers(num_classes, size=num_examples, dtype=np.int64)
    info = DatasetInfo("synthetic", image_shape=(*image_shape,), num_classes=num_classes)
    return InMemory(
        (images, labels),
        global_batch_size=global_batch_size,
        seed=seed,
        training=training,
        info=info,
    )
