"""Phases of a training, each with variables of its own: gradual unfreezing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ctl.errors import UsageError


def trained(step: Any, parts: Sequence[Any] | None) -> tuple[bool, ...]:
    """Which of the trainable variables of a built step train.

    Args:
        step: the step.
        parts: layers, models and `keras.Variable` objects that it trains; None for all.

    Raises:
        UsageError: a part has no variable that the step trains, or there are no parts.
    """
    if parts is None:
        return (True,) * len(step.trained)
    if not parts or not isinstance(parts, Sequence):
        raise UsageError(f"train_only needs a list of layers or variables, or None, not {parts!r}")
    chosen: set[int] = set()
    known = {id(variable) for variable in step.trained}
    for part in parts:
        variables = [part] if isinstance(part, keras.Variable) else part.trainable_variables
        mine = {id(v.value) for v in variables} & known
        if not mine:
            raise UsageError(
                f"{part.name} has no variable that the step trains: what was frozen "
                "when the loop was made stays frozen"
            )
        chosen |= mine
    return tuple(id(variable) in chosen for variable in step.trained)
