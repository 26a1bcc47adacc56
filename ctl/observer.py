"""Where a step can be watched: at the borders of its phases and around its all-reduce."""

from __future__ import annotations

from typing import Any

from ctl.reduce import all_reduce


class Observer:
    """Watches nothing. `ctl.marks.Marks` takes the time.

    A step calls the methods of its observer while TensorFlow traces it, on each replica.

    Attributes:
        stamps: whether it adds operations that XLA cannot compile.
        all_reduce: sums tensors over the replicas; `ctl.reduce.all_reduce`, or what is to be run in
            its place.
    """

    stamps = False
    all_reduce = staticmethod(all_reduce)

    def begin(self, batch: Any) -> Any:
        """The step begins. Returns ``batch``, for the step to use."""
        return batch

    def mark(self, name: str, tensors: Any) -> None:
        """The phase ``name`` ends when ``tensors``, a nest of tensors and Nones, are there."""

    def end(self) -> None:
        """The step ends: its variables are updated."""


NO_OBSERVER = Observer()
