"""What tests of checkpoints share: states that hold one value, and writes that can be held."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import tensorflow as tf

from ctl.checkpoint import CheckpointManager, bundle


def state_of(value: float, *, size: int = 8) -> dict[str, list[tf.Variable]]:
    """Variables that all hold ``value``."""
    return {
        "model": [
            tf.Variable(tf.fill([size, 4], float(value)), name="kernel"),
            tf.Variable(tf.fill([4], float(value)), name="bias"),
        ],
        "global_step": [tf.Variable(int(value), dtype=tf.int64, name="global_step")],
    }


def values_of(state) -> list[float]:
    """The one value that each variable holds."""
    values = []
    for group in state.values():
        for variable in group:
            distinct = np.unique(variable.numpy())
            assert distinct.size == 1, f"{variable.name} is torn: {distinct}"
            values.append(float(distinct[0]))
    return values


def save_steps(directory, steps, **kwargs):
    with CheckpointManager(directory, **{"keep": 10, **kwargs}) as manager:
        manager.restore(state_of(-1))
        for step in steps:
            manager.save(step, state_of(step))


def steps_in(directory) -> list[int]:
    return [saved.step for saved in CheckpointManager(directory, read_only=True).all()]


def restore_fresh(directory, step=None, **kwargs):
    """What a reader restores: the checkpoint and the values."""
    state = state_of(-1)
    saved = CheckpointManager(directory, read_only=True, **kwargs).restore(state, step)
    return saved, values_of(state)


class Gate:
    """Holds writes of checkpoints until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.reached = threading.Event(), threading.Event()
        write = bundle.write

        def held(prefix, tensors):
            self.reached.set()
            assert self.opened.wait(60)
            write(prefix, tensors)

        monkeypatch.setattr(bundle, "write", held)


def edit_manifest(**changes):
    def edit(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**content, **changes}))

    return edit
