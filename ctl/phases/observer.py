"""Hooks into a step: at the ends of its phases and around its all-reduce."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from ctl.base.autograph import AutographMethods
from ctl.reduce import all_reduce


class Observer(AutographMethods):
    """The default observer, which adds no operation to the graph. `ctl.phases.marks.Marks` records
    times.

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


class ObservedStep(Protocol):
    """What an observer may use of a built `ctl.TrainStep`."""

    observer: Observer
    strategy: tf.distribute.Strategy
    trainable_variables: list[tf.Variable]
    bytes_per_pack: int
    jit_compile: bool | None

    @property
    def global_step(self) -> tf.Variable:
        """int64 scalar: batches seen."""

    def reduced_specs(self) -> list[Any]:
        """Shapes and dtypes of the tensors that are summed over replicas."""
