"""Starts a model from weights that another program has trained."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import logging

from ctl.base.differences import first_three
from ctl.base.interactive import in_command
from ctl.base.models import Models, layers_of
from ctl.base.names import check_name, numbered
from ctl.checkpoint import foreign, manifest
from ctl.checkpoint.export import KERAS_FILE, exported_models, load_model
from ctl.checkpoint.mirror import bring
from ctl.checkpoint.reader import Reader
from ctl.errors import CtlError, UsageError


class _Given(NamedTuple):
    """A weight of the source."""

    name: str
    value: np.ndarray


class _Wanted(NamedTuple):
    """A weight of the model, and whether it keeps the value it has."""

    name: str
    variable: keras.Variable
    fresh: bool


class Loaded(dict[str, np.ndarray]):
    """What `load_weights` has assigned. A cell of a notebook shows it as one line."""

    def __init__(self, model: keras.Model, given: Mapping[str, np.ndarray]):
        super().__init__(given)
        models = model.items() if isinstance(model, Models) else [("", model)]
        paths = [f"{name}/{v.path}".lstrip("/") for name, one in models for v in one.weights]
        self._kept = [path for path in paths if path not in self]

    def __repr__(self) -> str:
        kept = f"; {len(self._kept)} are as before: {first_three(self._kept)}" if self._kept else ""
        return f"<{len(self)} weights were read{kept}>"


_Pairs = list[tuple[_Wanted, np.ndarray]]


def load_weights(
    model: keras.Model,
    path: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    reinit: Sequence[str] = (),
    *,
    name: str | None = None,
) -> dict[str, np.ndarray]:
    """Assigns the weights at ``path`` to ``model``, to all of its weights or to none.

    Weights are matched by name: all exactly, or else all in their order by the names of layer and
    variable, without the numbers that Keras gives to the layers of a process. The state of random
    seeds is no weight. Weights that only ``path`` has are named in a warning. With averaged weights
    (``ema_decay``), the averages are read, as for an export.

    A checkpoint of others is matched by the attributes of its objects, as `tf.train.Checkpoint`
    does, or else by name. If several objects fit, the one called ``model`` is read. A file
    ``.weights.h5`` is read by Keras.

    Args:
        model: a built model; call it in the scope of the strategy. Of several models
            (``step.model``), each gets the weights of its name.
        path: a ``.keras`` or ``.weights.h5`` file, a SavedModel, or what `ctl.checkpoint.Reader`
            reads; also an export of several models. For several models, also a dict with a path for
            each of some of them; the others keep their weights. Each may be a URL of a store.
        reinit: names of layers that keep the weights they have, such as a new head; of several
            models, also their names.
        name: which model to read, if there are several at ``path``.

    Returns:
        The values that were assigned, by the path of their variable; of several models after the
        name: ``g/dense/kernel``. A dict that is shown as one line: how many were read, and which
        weights of the model are as before.

    Raises:
        UsageError: there is nothing to read, no such layer, or weights differ; three are named.
        CheckpointError: the checkpoint is damaged.
    """
    layers = {layer.name: layer for layer in layers_of(model) if layer is not model}
    known = [*layers, *model] if isinstance(model, Models) else [*layers]
    for part in reinit:
        check_name(
            f"layer of {'--' * in_command()}reinit",
            part,
            [n for n in known if n not in layers or layers[n].weights],
        )
    if isinstance(model, Models):
        return Loaded(model, _load_each(model, path, reinit))
    if isinstance(path, Mapping):
        raise UsageError(f"the weights of model {model.name} are one path, not a dict: it is one")
    path, fresh = bring(path), {id(v) for part in reinit for v in layers[part].weights}
    if exported := exported_models(path):
        if name is None:
            raise UsageError(f"{path} holds several models: give one, such as {exported[0]}")
        path = path / name / KERAS_FILE
    if path.name.endswith(".weights.h5"):
        return Loaded(model, _read_by_keras(model, path, [layers[name] for name in reinit], fresh))
    stale_variables = [v for v in model.weights if id(v) not in fresh]
    source = _read(path, model, stale_variables, name)
    # A checkpoint has TensorFlow's names; those of a subclassed model leave its layers out.
    wanted = [
        _Wanted(v.path if source.is_model else _name(v), v, id(v) in fresh) for v in model.weights
    ]
    stale = [one for one in wanted if not one.fresh]
    given = source.weights
    others = [one for one in given if set(reinit).isdisjoint(_base(one.name).split("/")[:-1])]
    if source.matched:
        pairs: _Pairs | None = [(o, g.value) for o, g in zip(stale, given, strict=True)]
    else:
        pairs = _pairs(wanted, given, stale, others, in_order=source.in_order)
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
        raise _misfit(path, first_three(differing))
    for one, value in pairs:
        one.variable.assign(value.astype(one.variable.dtype))
    used = {id(value) for _, value in pairs}
    if unused := [one.name for one in others if id(one.value) not in used]:
        logging.warning("%s has weights that are not used: %s", path, first_three(unused))
    return Loaded(model, {one.variable.path: value for one, value in pairs})


def _pairs(
    wanted: list[_Wanted],
    given: list[_Given],
    stale: list[_Wanted],
    others: list[_Given],
    *,
    in_order: bool,
) -> _Pairs | None:
    """Each of ``stale``, which are not fresh, with its value; None if the names do not fit.
    ``others`` are given and not of a fresh layer. ``in_order``: whether the order means anything.
    """
    names = {one.name for one in stale}
    by_name = {one.name: one.value for one in given}
    once = not any(f"{name}#2" in by_name for name in names)
    if len(names) == len(stale) and names <= by_name.keys() and (in_order or once):
        return [(one, by_name[one.name]) for one in stale]
    if not in_order:
        return _by_tail(stale, others)
    for ours, theirs in ((wanted, given), (stale, others)):
        if _tails(o.name for o in ours) == _tails(t.name for t in theirs):
            return [(o, t.value) for o, t in zip(ours, theirs, strict=True) if not o.fresh]
    return None


def _by_tail(stale: list[_Wanted], others: list[_Given]) -> _Pairs | None:
    """As `_pairs`, by layer and variable. None if one is there twice: which is which?"""
    ours, theirs = ([_tail(one.name) for one in side] for side in (stale, others))
    if set(map(manifest.unnumbered, ours)) & set(map(manifest.unnumbered, {*theirs} - {*ours})):
        ours, theirs = (list(map(manifest.unnumbered, side)) for side in (ours, theirs))
    if len({*ours}) < len(ours) or any(theirs.count(tail) != 1 for tail in ours):
        return None
    return [(o, others[theirs.index(t)].value) for o, t in zip(stale, ours, strict=True)]


class _Source(NamedTuple):
    """What a path holds."""

    weights: list[_Given]
    is_model: bool = False
    """Whether a program of Keras has made it a model, with Keras's names."""
    in_order: bool = True
    matched: bool = False
    """Whether ``weights`` are those that were wanted."""


def _read(
    path: Path, model: keras.Model, variables: list[keras.Variable], model_name: str | None
) -> _Source:
    """The weights at ``path``, for ``variables`` of ``model``, of which ``path`` may have several:
    it is called ``model_name`` there."""
    if prefix := foreign.find(path):
        checkpoint = foreign.ForeignCheckpoint(prefix)
        matched = checkpoint.match(model, variables, model_name or "model")
        weights = [_Given(n, checkpoint.read(k)) for n, k in matched or checkpoint.weights()]
        if matched:
            return _Source(weights, matched=True)
        names_of_all = numbered(name for name, _ in weights)
        named = [
            _Given(name, value)
            for name, (_, value) in zip(names_of_all, weights, strict=True)
            if not _is_seed(name)
        ]
        return _Source(named, in_order=checkpoint.in_order)
    if path.suffix == ".keras" or path.is_file():
        weights = [_Given(v.path, v.numpy()) for v in load_model(path, "init_from").weights]
        return _Source(weights, is_model=True)
    reader = Reader(path)
    end = _end_of_group(reader, model_name)
    names: dict[str, list[str]] = {f"model{end}": [], f"ema{end}": []}
    for name, tensor in reader.tensors.items():
        if not _is_seed(name):
            names.setdefault(tensor.group, []).append(name.partition("/")[2])
    of_model, of_averages = names[f"model{end}"], names[f"ema{end}"]
    count, averaged = (collections.Counter(map(_base, n)) for n in (of_model, of_averages))
    for name, number in averaged.items():
        if count[name] != number:
            raise UsageError(
                f"{path} holds averages of only some of the weights {name}: give its export instead"
            )
    averages = set(of_averages)
    return _Source(
        [
            _Given(name, reader[f"{'ema' if name in averages else 'model'}{end}/{name}"])
            for name in of_model
        ]
    )


def _end_of_group(reader: Reader, name: str | None) -> str:
    """What follows ``model`` in the name of the group of the model ``name``: nothing, if the
    checkpoint has one model."""
    names = _models_in(reader)
    if not names:
        return ""
    path = reader.saved.path if reader.saved else ""
    if name is None:
        raise UsageError(
            f"{path} holds the models {', '.join(names)}: choose one, load_weights(..., "
            f"name={names[0]!r})"
        )
    check_name(f"model in {path}", name, names)
    return f"_{name}"


def _models_in(reader: Reader) -> list[str]:
    """The names of several models in a checkpoint of ctl."""
    groups = {tensor.group for tensor in reader.tensors.values()}
    return sorted(g.removeprefix("model_") for g in groups if g.startswith("model_"))


def _load_each(model: Models, path: Any, reinit: Sequence[str]) -> dict[str, np.ndarray]:
    """As `load_weights`, for several models: assigns to all or to none."""
    paths: Mapping[str, Any] = path if isinstance(path, Mapping) else dict.fromkeys(model, path)
    for name in paths:
        check_name("model to load", name, model.keys())
    if not isinstance(path, Mapping):
        _require_several(bring(path), model)
    before = [v.numpy() for v in model.weights]
    given: dict[str, np.ndarray] = {}
    try:
        for name, source in paths.items():
            if name not in reinit:
                own = {layer.name for layer in layers_of(model[name])}
                fresh = [layer for layer in reinit if layer in own]
                found = load_weights(model[name], source, fresh, name=name)
                given |= {f"{name}/{variable}": value for variable, value in found.items()}
    except CtlError:
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        raise
    return given


def _require_several(path: Path, model: Models) -> None:
    """Refuses a path that holds one model."""
    if foreign.find(path) or exported_models(path):
        return
    if path.is_file() or not _models_in(Reader(path)):
        raise UsageError(
            f"{path} holds one model, and there are {', '.join(model)}: say which one gets it, "
            f"--init_from=NAME={path} (in Python, load_weights(model, {{NAME: path}}))"
        )


def _read_by_keras(
    model: keras.Model, path: Path, layers: list[keras.Layer], fresh: set[int]
) -> dict[str, np.ndarray]:
    """Assigns the weights of a ``.weights.h5`` file, but for those of ``layers``."""
    before = [v.numpy() for v in model.weights]
    try:
        model.load_weights(path, objects_to_skip=layers)
    except Exception as error:  # Keras raises many kinds
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        raise _misfit(path, " ".join(str(error).split())[:200]) from error
    return {v.path: v.numpy() for v in model.weights if id(v) not in fresh}


def _misfit(path: Path, what: str) -> UsageError:
    reinit = "--reinit=LAYER" if in_command() else "reinit=['LAYER']"
    return UsageError(
        f"the weights in {path} do not fit the model: {what}; use the model that they were saved "
        f"from, or give {reinit} for layers to start anew"
    )


def _name(variable: keras.Variable) -> str:
    return variable.value.name.removesuffix(":0")


def _is_seed(name: str) -> bool:
    return _base(name).endswith("seed_generator_state")


def _base(name: str) -> str:
    """``name`` without what `Reader` adds where several have it."""
    return name.partition("#")[0]


def _tails(names: Iterable[str]) -> list[str]:
    """Layer and variable of each name, without numbers. A file that Keras has loaded has no more:
    ``dense/kernel`` for ``trunk/dense_1/kernel``."""
    return [manifest.unnumbered(_tail(name)) for name in names]


def _tail(name: str) -> str:
    return "/".join(_base(name).split("/")[-2:])


def _kind(value: keras.Variable | np.ndarray) -> str:
    return f"{keras.backend.standardize_dtype(value.dtype)}{list(value.shape)}"
