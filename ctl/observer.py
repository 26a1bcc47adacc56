"""Hooks into a step: at the ends of its phases and around its all-reduce."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl.reduce import all_reduce


class Observer:
    """The default observer, which adds no operation to the graph. `ctl.marks.Marks` records times.

    A step calls the methods of its observer on each replica, while TensorFlow traces the step.

    Attributes:
        stamps: whether the observer adds operations that XLA cannot compile.
        all_reduce: sums tensors over replicas: `ctl.reduce.all_reduce`, or a replacement with the
            same signature.
    """

    stamps = False
    all_reduce = staticmethod(all_reduce)

    @tf.autograph.experimental.do_not_convert
    def begin(self, batch: Any) -> Any:
        """The step begins. Returns the batch that the step uses."""
        return batch

    @tf.autograph.experimental.do_not_convert
    def mark(self, name: str, tensors: Any) -> None:
        """The phase ``name`` ends once ``tensors``, a nest of tensors and None, are computed."""

    @tf.autograph.experimental.do_not_convert
    def end(self) -> None:
        """The step ends, after the update of its variables."""


NO_OBSERVER = Observer()
