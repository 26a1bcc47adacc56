"""Reads the tensors of a checkpoint by name, without the program that wrote them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ctl.base import durable
from ctl.base.names import check_name, numbered
from ctl.checkpoint import bundle, foreign, manifest
from ctl.checkpoint.manifest import Saved
from ctl.checkpoint.mirror import bring
from ctl.errors import CheckpointError, UsageError


class Tensor(NamedTuple):
    """What a checkpoint says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: str
    """As in ``float32``."""
    group: str
    """The part of the state: ``model``, ``optimizer``, ``ema``, …"""
    place: int
    """In that part, in the order of the program."""


class Reader(Mapping[str, np.ndarray]):
    """A checkpoint as a mapping from names to arrays. An array is read when it is asked for.

    ``Reader("/tmp/ctl-run")["model/logits/kernel"]`` is that weight in the last checkpoint of the
    run. A name is the part of the state and the name of the variable. Where a program gave two
    variables one name, the second has ``#2`` after it. In a checkpoint that ctl has not written,
    the name is that of the key: ``Reader("ckpt-1")["model/dense/kernel"]``.

    Args:
        path: a checkpoint (``…/checkpoints/step-…``); or a directory of checkpoints or of a run, of
            which the last checkpoint is read: the one from which the run would resume. That is the
            highest intact step up to the one that ``latest.json`` names, else the highest intact
            one. A damaged one is passed over with a warning. Or a checkpoint of others, see
            `ctl.checkpoint.foreign.find`. Each may be the URL of one in a store.

    Attributes:
        saved: the step, time and metrics of the checkpoint, see `ctl.checkpoint.Saved`; None for a
            checkpoint of others.
        tensors: shape and dtype of each tensor by name, in the order of the program.

    Raises:
        UsageError: ``path`` is neither.
        CheckpointError: the checkpoint is damaged, or all of the directory are.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = bring(path)
        self.saved: Saved | None = None
        self.tensors: dict[str, Tensor] = {}
        if prefix := foreign.find(self._path):
            self._foreign = foreign.ForeignCheckpoint(prefix)
            for place, (name, key) in enumerate(self._foreign.names.items()):
                shape, dtype = tuple(self._foreign.shapes[key]), self._foreign.dtypes[key].name
                self.tensors[name] = Tensor(shape, dtype, name.split("/")[0], place)
            return
        self.saved = _find(self._path)
        for group, specs in self.saved.variables.items():
            for place, (name, spec) in enumerate(
                zip(numbered(s["name"] for s in specs), specs, strict=True)
            ):
                shape, dtype = tuple(spec["shape"]), spec["dtype"]
                self.tensors[f"{group}/{name}"] = Tensor(shape, dtype, group, place)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor ``name``. Raises `UsageError` for a name that is not there, with the closest,
        and `CheckpointError` if the files do not hold what the manifest says."""
        if name not in self.tensors:
            check_name(f"tensor of {self.saved.path if self.saved else self._path}", name, self)
        tensor = self.tensors[name]
        if not self.saved:
            return self._foreign.read(self._foreign.names[name])
        try:
            value = bundle.read_one(self.saved.prefix, tensor.group, tensor.place)
            if value.shape != tensor.shape or value.dtype.name != tensor.dtype:
                raise durable.Damaged(f"{name} is not what the manifest says")
        except durable.Damaged as damage:
            raise _damaged(self.saved.path, damage) from damage
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _find(path: Path) -> Saved:
    """The checkpoint at ``path``, or the last one in it, see `manifest.newest_first`. Its checksums
    are verified."""
    if (path / "manifest.json").is_file():
        try:
            return manifest.verified(path)
        except durable.Damaged as damage:
            raise _damaged(path, damage) from damage
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    saved = None
    if directory.is_dir():
        steps = functools.partial(manifest.newest_first, directory)
        saved = manifest.first_intact(directory, steps, manifest.verified)
    if saved is None:
        raise UsageError(
            f"{path} holds no checkpoint: give a checkpoint, a directory of checkpoints, or a run"
        )
    return saved


def _damaged(path: Path, damage: durable.Damaged) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {damage}; restore it from a backup or choose another"
    )
