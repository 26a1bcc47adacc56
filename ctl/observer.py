"""Hooks into a step: at the ends of its phases and around its all-reduce."""

from __future__ import annotations

from typing import Any

from ctl.reduce import all_reduce
from ctl.user_code import Overridable


class Observer(Overridable):
    """The default observer, which adds no operation to the graph. `ctl.marks.Marks` records times.

    A step calls the methods of its observer on each replica, while TensorFlow traces the step.

    Attributes:
        stamps: whether the observer adds operations that XLA cannot compile.
        all_reduce: sums tensors over replicas: `ctl.reduce.all_reduce`, or a replacement with the
            same signature.
    """

    stamps = False
    all_reduce = staticmethod(all_reduce)

    def begin(self, batch: Any) -> Any:
        """The step begins. Returns the batch that the step uses."""
        return batch

    def mark(self, name: str, tensors: Any) -> None:
        """The phase ``name`` ends once ``tensors``, a nest of tensors and None, are computed."""

    def end(self) -> None:
        """The step ends, after the update of its variables."""


NO_OBSERVER = Observer()
