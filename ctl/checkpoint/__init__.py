"""Checkpoints: saving, verification, retention and restoring. See `CheckpointManager`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl import load_lazily

if TYPE_CHECKING:
    from ctl.checkpoint.manager import CheckpointManager
    from ctl.checkpoint.manifest import Saved

__all__ = ["CheckpointManager", "Saved"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {"CheckpointManager": "ctl.checkpoint.manager", "Saved": "ctl.checkpoint.manifest"},
)
