"""What runs of `ctl.train` leave in their directories."""

from __future__ import annotations

import json
from pathlib import Path

from ctl.checkpoint import CheckpointManager, Saved


def records(model_dir, phase: str | None = None) -> list[dict]:
    """The lines of the log, of one ``phase`` or of all. Fails for one that is not JSON."""
    lines = (Path(model_dir) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [r for r in found if phase in (None, r["phase"])]


def evaluations(model_dir) -> dict[int, dict]:
    """By step; of two lines the later one counts."""
    return {r["step"]: r for r in records(model_dir, "eval")}


def config(model_dir) -> dict:
    return json.loads((Path(model_dir) / "config.json").read_text())


def latest(model_dir) -> Saved | None:
    """The last checkpoint."""
    return CheckpointManager(Path(model_dir) / "checkpoints", read_only=True).latest()
