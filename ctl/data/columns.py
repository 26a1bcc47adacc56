"""TFDS datasets of numbers, such as tables: the columns that are chosen, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from ctl.data import tfds_source
from ctl.data.dataset import DatasetInfo, check_batch_size
from ctl.data.in_memory import InMemory
from ctl.data.load import default_split
from ctl.errors import UsageError

_READ_BATCH = 1024  # examples


def load_columns(
    name: str,
    features: Sequence[str],
    labels: Sequence[str],
    *,
    global_batch_size: int,
    training: bool = True,
    split: str | None = None,
    seed: int = 0,
    data_dir: str | None = None,
    download: bool = True,
    resident_limit_mib: float = 1024,
) -> InMemory:
    """Loads batches ``(features, labels)`` of any numbers of a TFDS dataset, into memory.

    Args:
        name: see `ctl.data.load`, as for all that follow ``labels``.
        features: names of features; ``a/b`` is part b of a. One is an array, or the dict that it
            is; several are a dict by these names. bytes that are no images become int32, since a
            step scales uint8 to [0, 1].
        labels: as ``features``.

    Raises:
        UsageError: as `ctl.data.load` does; there is no such feature, it is no number or varies in
            size, or the data are larger than ``resident_limit_mib``.
    """
    builder = tfds_source.find(name, data_dir, download=download)
    info, where = builder.info, builder.info.full_name
    split = default_split(builder, training) if split is None else split
    count = tfds_source.split_of(builder, split).num_examples
    check_batch_size(global_batch_size, count, training)
    kinds = info.features.get_tensor_info()
    leaves = [leaf for c in (*features, *labels) for leaf in _leaves(kinds, c, where)]
    size = count * sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in leaves)
    if size > resident_limit_mib * 2**20:
        raise UsageError(
            f"{where}: {size / 2**20:.1f} MiB are over the limit of {resident_limit_mib:g} MiB: "
            "choose fewer features, or raise --resident_limit_mib"
        )

    @tf.autograph.experimental.do_not_convert
    def columns(example: Any) -> Any:
        return _chosen(example, features), _chosen(example, labels)

    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(
        split=split,
        shuffle_files=False,
        read_config=config,
        decoders=tfds.decode.PartialDecoding(_tree((*features, *labels))),
    )
    try:
        parts = list(dataset.map(columns).batch(_READ_BATCH).as_numpy_iterator())
    except tf.errors.OpError as error:
        raise UsageError(
            f"{where}: the files of the split {split!r} are damaged "
            f"({str(error).splitlines()[0][:200]}): prepare it again"
        ) from error
    arrays = tf.nest.map_structure(lambda *a: _numbers(np.concatenate(a)), *parts)
    return InMemory(
        arrays,
        global_batch_size=global_batch_size,
        seed=seed,
        training=training,
        info=DatasetInfo(
            builder.name,
            str(info.version),
            split,
            _image_shape(arrays[0]),
            _classes(info.features, labels, arrays[1]),
        ),
        description=f"{where} {split}, {count} examples of {', '.join(features)}, resident",
    )


def _tree(columns: Sequence[str]) -> dict[str, Any]:
    """``["a/b", "c"]`` as {"a": {"b": True}, "c": True}: all others are not decoded."""
    tree: dict[str, Any] = {}
    for column in sorted(columns, reverse=True):  # "a" after "a/b", which it includes
        *parents, name = column.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = True
    return tree


def _part(nest: Any, column: str) -> Any:
    for name in column.split("/"):
        nest = nest[name]
    return nest


@tf.autograph.experimental.do_not_convert
def _chosen(example: Any, columns: Sequence[str]) -> Any:
    if len(columns) == 1:
        return _part(example, columns[0])
    return {column: _part(example, column) for column in columns}


def _leaves(kinds: Any, column: str, where: str) -> list[tuple[tuple[int, ...], np.dtype]]:
    """The shapes and types of ``column``, after a check that they are numbers of one shape."""
    try:
        found = tf.nest.flatten(_part(kinds, column))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{where} has no feature {column!r}; it has {', '.join(_names(kinds))}"
        ) from error
    leaves = [(tuple(leaf.shape), np.dtype(leaf.np_dtype)) for leaf in found]
    for shape, dtype in leaves:
        if None in shape or dtype.kind not in "biuf":
            raise UsageError(
                f"{where}: the feature {column!r} is {dtype} of shape {shape}: only numbers of one "
                "shape can be trained on, so prepare others in a function and give "
                "--dataset=package.module:function"
            )
    return leaves


def _names(kinds: Any, before: str = "") -> list[str]:
    if not isinstance(kinds, dict):
        return [before]
    join = f"{before}/" if before else ""
    return [name for key, kind in kinds.items() for name in _names(kind, join + key)]


def _numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.uint8 and array.ndim < 3 else array


def _image_shape(features: Any) -> tuple[int, int, int] | None:
    if isinstance(features, np.ndarray) and features.dtype == np.uint8 and features.ndim == 4:
        height, width, channels = features.shape[1:]
        return height, width, channels
    return None


def _classes(kinds: Any, labels: Sequence[str], values: Any) -> int | None:
    """The number of classes, if the label is an integer."""
    if len(labels) > 1 or not isinstance(values, np.ndarray) or values.ndim > 1:
        return None
    label = _part(kinds, labels[0])
    if isinstance(label, tfds.features.ClassLabel):
        return label.num_classes
    return int(values.max()) + 1 if np.issubdtype(values.dtype, np.integer) else None
