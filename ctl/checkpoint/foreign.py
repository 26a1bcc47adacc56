"""Reads checkpoints that other programs of TensorFlow have written, and SavedModels."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl.base import tf_internals
from ctl.checkpoint import bundle
from ctl.errors import CheckpointError, UsageError

_VALUE = "VARIABLE_VALUE"
_SUFFIX = f"/.ATTRIBUTES/{_VALUE}"  # of keys


class Weight(NamedTuple):
    """A variable of a checkpoint."""

    name: str
    key: str


def find(path: Path) -> str | None:
    """The prefix of the files of the checkpoint at ``path``: itself; that of a SavedModel; or the
    last one of a directory, by its file ``checkpoint``. None if there is none."""
    prefix = path.with_suffix("") if path.suffix == ".index" else path
    if Path(f"{prefix}.index").is_file():
        return str(prefix)
    if (path / "saved_model.pb").is_file():
        return str(path / "variables/variables")
    return tf.train.latest_checkpoint(path) if path.is_dir() else None


class ForeignCheckpoint:
    """A checkpoint of `tf.train.Checkpoint`, of a SavedModel, or of a ``Saver`` of TensorFlow 1.

    Args:
        prefix: of its files, see `find`.

    Attributes:
        names: the key of each tensor by its name: the attributes that lead to it, or the name of
            its variable in TensorFlow 1.
        shapes, dtypes: of each tensor, by its key.
        in_order: whether `weights` has the order of the model, as in an export by Keras.

    Raises:
        CheckpointError: the files cannot be read.
    """

    def __init__(self, prefix: str):
        self._prefix = prefix
        try:
            self._reader = tf.train.load_checkpoint(prefix)
            self.shapes: dict[str, list[int]] = self._reader.get_variable_to_shape_map()
            self.dtypes: dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
            graph = self._reader.get_tensor(bundle.GRAPH) if bundle.GRAPH in self.shapes else b""
            self._nodes = tf_internals.objects_of(graph)
        except Exception as error:  # TensorFlow raises many kinds for a file that is damaged
            raise CheckpointError(f"{prefix} cannot be read: {str(error)[:200]}") from error
        self.names = {k.removesuffix(_SUFFIX): k for k in sorted(self.shapes) if k != bundle.GRAPH}
        self.in_order = bool(self._nodes) and "variables" in self._children(0)

    def read(self, key: str) -> np.ndarray:
        """The tensor of the key ``key``. Raises `CheckpointError` if it is damaged."""
        try:
            return self._reader.get_tensor(key)
        except tf.errors.OpError as error:
            raise CheckpointError(f"{self._prefix} is damaged: {error.message[:200]}") from error

    def weights(self) -> list[Weight]:
        """The variables by the names that their program gave them, without slots of optimizers."""
        if not self._nodes:
            keys = self.shapes.keys() - {bundle.GRAPH}
            parents = ({*map(str, Path(key).parents)} for key in keys)
            return sorted(Weight(k, k) for k, p in zip(keys, parents, strict=True) if not p & keys)
        order = [*range(len(self._nodes))]
        if self.in_order:
            order = [*self._children(self._children(0)["variables"]).values()]
        slots = {s.slot_variable_node_id for node in self._nodes for s in node.slot_variables}
        return [w for n in order if n not in slots for w in self._weights_at(n)]

    def match(
        self, model: keras.Model, variables: list[keras.Variable], name: str = "model"
    ) -> list[Weight]:
        """The weights that are to an object of the checkpoint what ``variables`` are to ``model``:
        one for each, or none. The same attributes lead to them, as for
        ``tf.train.Checkpoint(model=model).read(prefix)``, but the object may have any name.

        Raises:
            UsageError: several objects fit, and none or more than one are called ``name``.
        """
        fits: dict[tuple[Weight, ...], str] = {}
        for path, start in self._objects():
            matched = dict(self._matched(model, start))
            if matched.keys() >= {id(v) for v in variables}:
                fits.setdefault(tuple(matched[id(v)] for v in variables), path)
        named = [w for w, path in fits.items() if len(fits) == 1 or path.split(".")[-1] == name]
        if fits and len(named) != 1:
            raise UsageError(
                f"{self._prefix} has several objects that fit the model: "
                f"{', '.join(fits.values())}; read yours by tf.train.Checkpoint, as it was written"
            )
        return [*named[0]] if named else []

    def _children(self, node: int) -> dict[str, int]:
        return {c.local_name: c.node_id for c in self._nodes[node].children}

    def _weights_at(self, node: int) -> Iterator[Weight]:
        for attribute in self._nodes[node].attributes:
            if attribute.name == _VALUE and attribute.checkpoint_key in self.shapes:
                yield Weight(attribute.full_name, attribute.checkpoint_key)

    def _objects(self) -> Iterator[tuple[str, int]]:
        """The shortest path to each object, and its number; the root first."""
        seen, left = {0}, collections.deque([("", 0)] if self._nodes else [])
        while left:
            path, node = left.popleft()
            yield path or "the root", node
            for name, child in self._children(node).items():
                if child not in seen:
                    seen.add(child)
                    left.append((f"{path}.{name}".lstrip("."), child))

    def _matched(self, model: Any, start: int) -> Iterator[tuple[int, Weight]]:
        """The variables of ``model`` and the nodes at which they are below ``start``."""
        seen, left = {id(model)}, collections.deque([(model, start)])
        while left:
            one, node = left.popleft()
            yield from zip(itertools.repeat(id(one)), self._weights_at(node))
            children = self._children(node)
            for name, child in tf.train.TrackableView.children(one).items():
                if name in children and id(child) not in seen:
                    seen.add(id(child))
                    left.append((child, children[name]))
