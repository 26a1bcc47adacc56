"""Which variables train: frozen layers, and training phases that train only some variables."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import keras

from ctl.base.models import Models, by_name
from ctl.base.names import check_name
from ctl.distributed import replicas
from ctl.errors import UsageError


def freeze(model: keras.Model, patterns: Sequence[str]) -> list[str]:
    """Freezes layers of ``model``: their weights get no gradient, no optimizer slots and no part in
    the all-reduce, and a BatchNorm keeps its statistics. Call it before the step is made.

    Args:
        model: a built model.
        patterns: names or paths of layers, with ``*`` and ``?`` as in a shell: ``block1_*``; of
            several models, also their names.

    Returns:
        The paths of the frozen weights.

    Raises:
        UsageError: a pattern matches no layer with weights, or nothing is left to train.
    """
    layers = [one for one in replicas.layers_of(model) if one is not model and one.weights]
    names = {id(one): name for name, one in by_name(model).items()}
    for pattern in patterns:
        fitting = [
            layer
            for layer in layers
            if any(
                fnmatch.fnmatchcase(name, pattern)
                for name in (layer.name, layer.path or "", names.get(id(layer), ""))
            )
        ]
        if not fitting:
            check_name("layer of --freeze", pattern, [layer.name for layer in layers])
        for layer in fitting:
            layer.trainable = False
    if patterns and not model.trainable_variables:
        raise UsageError(f"--freeze={','.join(patterns)} leaves no weight to train")
    trained = {id(v) for v in model.trainable_variables}
    return [v.path for v in model.weights if id(v) not in trained] if patterns else []


def select_trainable(step: Any, parts: Sequence[Any] | None) -> tuple[bool, ...]:
    """Returns for each trainable variable of a built step whether it trains: whether it is in
    ``parts``, layers, models, names of models if the step has several, and `keras.Variable`
    objects; None for all.

    Raises:
        UsageError: a part has no variable that the step trains, or there are no parts.
    """
    if parts is None:
        return (True,) * len(step.trainable_variables)
    if not parts or not isinstance(parts, Sequence):
        raise UsageError(f"train_only needs a list of layers or variables, or None, not {parts!r}")
    chosen: set[int] = set()
    known = {id(variable) for variable in step.trainable_variables}
    for part in [parts] if isinstance(parts, str) else parts:
        if isinstance(part, str):
            if not isinstance(step.model, Models):
                raise UsageError(
                    f"train_only({part!r}): the step has one model: give layers, such as "
                    f"model.get_layer({part!r})"
                )
            part = step.model[part]
        variables = [part] if isinstance(part, keras.Variable) else part.trainable_variables
        part_ids = {id(v.value) for v in variables} & known
        if not part_ids:
            raise UsageError(
                f"{part.name} has no variable that the step trains: what was frozen "
                "when the loop was made stays frozen"
            )
        chosen |= part_ids
    return tuple(id(variable) in chosen for variable in step.trainable_variables)
