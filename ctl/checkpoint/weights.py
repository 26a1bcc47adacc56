"""Starts a model from weights that another program has trained."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from absl import logging

from ctl.base.differences import first_three
from ctl.base.names import check_name
from ctl.checkpoint import manifest
from ctl.checkpoint.export import load_model
from ctl.checkpoint.reader import Reader
from ctl.distributed import replicas
from ctl.errors import UsageError


class _Given(NamedTuple):
    """A weight of the source."""

    name: str
    value: np.ndarray


class _Wanted(NamedTuple):
    """A weight of the model, and whether it keeps the value it has."""

    name: str
    variable: keras.Variable
    fresh: bool


def load_weights(
    model: keras.Model, path: str | os.PathLike[str], reinit: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Assigns the weights at ``path`` to ``model``, to all of its weights or to none.

    Weights are matched by name: all exactly, or else all in their order by the names of layer and
    variable, without the numbers that Keras gives to the layers of a process. The state of random
    seeds is no weight. Weights that only ``path`` has are named in a warning. With averaged weights
    (``ema_decay``), the averages are read, as for an export.

    Args:
        model: a built model; call it in the scope of the strategy.
        path: a ``.keras`` file, or what `ctl.checkpoint.Reader` reads.
        reinit: names of layers that keep the weights they have, such as a new head.

    Returns:
        The values that were assigned, by the path of their variable.

    Raises:
        UsageError: there is nothing to read, no such layer, or weights differ; three are named.
        CheckpointError: the checkpoint is damaged.
    """
    layers = {layer.name: layer for layer in replicas.layers_of(model) if layer is not model}
    for name in reinit:
        check_name("layer of --reinit", name, [n for n, layer in layers.items() if layer.weights])
    fresh = {id(v) for name in reinit for v in layers[name].weights}
    given, is_checkpoint = _read(Path(path))
    # A checkpoint has TensorFlow's names; those of a subclassed model leave its layers out.
    wanted = [
        _Wanted(v.value.name.removesuffix(":0") if is_checkpoint else v.path, v, id(v) in fresh)
        for v in model.weights
    ]
    stale = [one for one in wanted if not one.fresh]
    others = [one for one in given if set(reinit).isdisjoint(_base(one.name).split("/")[:-1])]
    pairs = _pairs(wanted, given, stale, others)
    if pairs is None:
        ours, theirs = (_tails(one.name for one in side) for side in (stale, others))
        missing = [
            f"{one.name} {_kind(one.variable)} is missing"
            for one, tail in zip(stale, ours, strict=True)
            if tail not in theirs
        ]
        extra = [
            f"{one.name} {_kind(one.value)} is extra"
            for one, tail in zip(others, theirs, strict=True)
            if tail not in ours
        ]
        differing = [*missing, *extra] or [
            f"{len(stale)} weights are wanted in another order, and there are {len(others)}"
        ]
    else:
        differing = [
            f"{name} is {_kind(value)} instead of {_kind(variable)}"
            for (name, variable, _), value in pairs
            if tuple(variable.shape) != value.shape
        ]
    if differing or pairs is None:
        raise UsageError(
            f"the weights in {path} do not fit the model: {first_three(differing)}; use the model "
            "that they were saved from, or give --reinit=LAYER for layers to start anew"
        )
    for one, value in pairs:
        one.variable.assign(value.astype(one.variable.dtype))
    used = {id(value) for _, value in pairs}
    if unused := [one.name for one in others if id(one.value) not in used]:
        logging.warning("%s has weights that are not used: %s", path, ", ".join(unused))
    return {one.variable.path: value for one, value in pairs}


def _pairs(
    wanted: list[_Wanted], given: list[_Given], stale: list[_Wanted], others: list[_Given]
) -> list[tuple[_Wanted, np.ndarray]] | None:
    """Each of ``stale``, which are not fresh, with its value; None if the names do not fit.
    ``others`` are given and not of a fresh layer."""
    names = {one.name for one in stale}
    by_name = {one.name: one.value for one in given}
    if len(names) == len(stale) and names <= by_name.keys():
        return [(one, by_name[one.name]) for one in stale]
    for ours, theirs in ((wanted, given), (stale, others)):
        if _tails(o.name for o in ours) == _tails(t.name for t in theirs):
            return [(o, t.value) for o, t in zip(ours, theirs, strict=True) if not o.fresh]
    return None


def _read(path: Path) -> tuple[list[_Given], bool]:
    """The weights at ``path`` in their order, and whether it is a checkpoint."""
    if path.suffix == ".keras" or path.is_file():
        model = load_model(path, "init_from")
        return [_Given(v.path, v.numpy()) for v in model.weights], False
    reader = Reader(path)
    names: dict[str, list[str]] = {"model": [], "ema": []}
    for name, tensor in reader.tensors.items():
        if not _base(name).endswith("/seed_generator_state"):
            names.setdefault(tensor.group, []).append(name.partition("/")[2])
    count, averaged = (collections.Counter(map(_base, names[g])) for g in ("model", "ema"))
    for name, number in averaged.items():
        if count[name] != number:
            raise UsageError(
                f"{path} holds averages of only some of the weights {name}: give its export instead"
            )
    averages = set(names["ema"])
    return [
        _Given(name, reader[f"{'ema' if name in averages else 'model'}/{name}"])
        for name in names["model"]
    ], True


def _base(name: str) -> str:
    """``name`` without what `Reader` adds where several have it."""
    return name.partition("#")[0]


def _tails(names: Iterable[str]) -> list[str]:
    """Layer and variable of each name, without numbers. A file that Keras has loaded has no more:
    ``dense/kernel`` for ``trunk/dense_1/kernel``."""
    return ["/".join(manifest.unnumbered(_base(name)).split("/")[-2:]) for name in names]


def _kind(value: keras.Variable | np.ndarray) -> str:
    return f"{keras.backend.standardize_dtype(value.dtype)}{list(value.shape)}"
