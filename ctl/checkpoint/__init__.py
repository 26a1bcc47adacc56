"""Checkpoints: saving, verification, retention and restoring. See `CheckpointManager`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.base.stores import local
    from ctl.checkpoint.export import export_model, load_model
    from ctl.checkpoint.manager import CheckpointManager
    from ctl.checkpoint.manifest import Saved
    from ctl.checkpoint.reader import Reader
    from ctl.checkpoint.weights import load_weights

__all__ = [
    "CheckpointManager",
    "Reader",
    "Saved",
    "export_model",
    "load_model",
    "load_weights",
    "local",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "CheckpointManager": "ctl.checkpoint.manager",
        "Reader": "ctl.checkpoint.reader",
        "Saved": "ctl.checkpoint.manifest",
        "export_model": "ctl.checkpoint.export",
        "load_model": "ctl.checkpoint.export",
        "load_weights": "ctl.checkpoint.weights",
        "local": "ctl.base.stores",
    },
)
