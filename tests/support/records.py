"""What tests of logs share: records, a clock, and what TensorBoard reads of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def record(step: int = 1, phase: str = "train", **scalars: Any) -> dict[str, Any]:
    return {"phase": phase, "step": step, "until": 9, "epoch": None, "time": 1.5, **scalars}


class Clock:
    """Returns the seconds that a test has set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of all scalars in the event files."""
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
