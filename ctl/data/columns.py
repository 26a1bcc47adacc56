"""TFDS datasets of numbers, such as tables: the columns that are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from ctl.data import tfds_source
from ctl.data.dataset import DatasetInfo
from ctl.data.in_memory import InMemory
from ctl.data.load import default_split, in_memory_or_streamed, read_all
from ctl.data.streaming import Streaming
from ctl.data.tfds_split import Split
from ctl.errors import UsageError


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
    shuffle_block: int = 1,
    on_bad_record: str = "stop",
) -> InMemory | Streaming:
    """Loads batches ``(features, labels)`` of any numbers of a TFDS dataset, in memory if they fit,
    else streamed.

    Args:
        name: see `ctl.data.load`, as for all that follow ``labels``.
        features: names of features; ``a/b`` is part b of a. One is an array, or the dict that it
            is; several are a dict by these names. bytes that are no images become int32, since a
            step scales uint8 to [0, 1].
        labels: as ``features``. The number of classes of an integer label that TFDS does not know
            as a class is counted where the data are in memory.

    Raises:
        UsageError: as `ctl.data.load` does; there is no such feature, it is no number or varies in
            size.
    """
    builder = tfds_source.find(name, data_dir, download=download)
    split = default_split(builder, training) if split is None else split
    source = Columns(builder, split, features, labels)
    return in_memory_or_streamed(
        source,
        read_all,
        f"{source.name} {split}, {len(source)} examples of {', '.join(features)}",
        resident_limit_mib=resident_limit_mib,
        shuffle_block=shuffle_block,
        on_bad_record=on_bad_record,
        global_batch_size=global_batch_size,
        training=training,
        seed=seed,
    )


class Columns(Split):
    """Features of one split of a prepared TFDS dataset: a source of ``(features, labels)``."""

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        split: str,
        features: Sequence[str],
        labels: Sequence[str],
    ):
        """Opens a split. Arguments and errors as those of `load_columns`."""
        super().__init__(builder, split)
        kinds = builder.info.features.get_tensor_info()
        leaves = [leaf for c in (*features, *labels) for leaf in _leaves(kinds, c, self.name)]
        self._bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in leaves)
        self._features, self._labels = features, labels
        # All others are neither parsed nor decoded.
        chosen = tfds.decode.PartialDecoding(_tree((*features, *labels)))
        self._parsed = chosen.extract_features(builder.info.features)
        self.info = DatasetInfo(
            builder.name,
            str(builder.info.version),
            split,
            _image_shape(kinds, features),
            _classes(builder.info.features, labels),
        )

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all examples in memory."""
        return len(self) * self._bytes

    def decode(self, record: tf.Tensor) -> tuple[Any, Any]:
        """Returns ``(features, labels)`` of one serialized example."""
        example = self._parsed.deserialize_example(record)
        chosen = _chosen(example, self._features), _chosen(example, self._labels)
        return tf.nest.map_structure(_number, chosen)


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


def _number(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.uint8 and value.shape.rank < 2 else value


def _image_shape(kinds: Any, features: Sequence[str]) -> tuple[int, int, int] | None:
    kind = _part(kinds, features[0])
    if len(features) > 1 or isinstance(kind, dict) or kind.np_dtype != np.uint8:
        return None
    return kind.shape if len(kind.shape) == 3 else None


def _classes(kinds: Any, labels: Sequence[str]) -> int | None:
    label = _part(kinds, labels[0])
    one = len(labels) == 1 and isinstance(label, tfds.features.ClassLabel)
    return label.num_classes if one else None
