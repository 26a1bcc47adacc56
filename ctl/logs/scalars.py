"""The scalars of a log record: loss, metrics, learning rate and speed since the last record."""

from __future__ import annotations

from typing import Any

from ctl.step import TrainStep


class Scalars:
    """Collects the scalars of a window of steps.

    Args:
        step: a built step.
        global_batch_size: None if unknown; then `read` gives no ``examples_per_second``.

    Attributes:
        rate: learning rate of the last step, as it was applied: a schedule that depends on more
            than the step may have another one for it by the time of `read`.
    """

    def __init__(self, step: TrainStep, global_batch_size: int | None):
        self._step = step
        self._global_batch_size = global_batch_size
        self.rate: Any = 0.0
        self.reset()

    def reset(self) -> None:
        """Starts a new window."""
        self._loss = self._examples = self._seconds = 0.0
        self._timed_steps = self._skipped = 0
        self._step.reset_metrics()

    def add(self, loss: float, examples: float, skipped: int) -> None:
        """Adds steps: their mean ``loss`` over ``examples`` (or the sum of the weights), and the
        number of steps whose update was ``skipped``, which have no part in the loss."""
        self._loss += loss * examples
        self._examples += examples
        self._skipped += skipped

    def add_time(self, seconds: float, steps: int) -> None:
        """Adds the duration of ``steps`` steps."""
        self._seconds += seconds
        self._timed_steps += steps

    def read(self) -> dict[str, float]:
        """The scalars by name. With several workers, all must read at the same steps."""
        scalars = {"loss": self._loss / self._examples if self._examples else 0.0}
        scalars |= self._step.results()
        updater = self._step.updater
        scalars["learning_rate"] = float(self.rate)
        if self._seconds:
            rate = self._timed_steps / self._seconds
            scalars["steps_per_second"] = rate
            if self._global_batch_size:
                scalars["examples_per_second"] = rate * self._global_batch_size
        if updater.judges_finiteness:
            scalars["skipped_steps"] = float(self._skipped)
        if updater.loss_scale:
            scalars["loss_scale"] = float(updater.loss_scale.scale.numpy())
        return scalars
