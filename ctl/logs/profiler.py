"""The only place that starts and stops TensorFlow's profiler."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import tensorflow as tf
from absl import logging

from ctl.actions import NEVER
from ctl.errors import CtlError, UsageError

if TYPE_CHECKING:
    from ctl.actions import Status


class Profile:
    """An action that profiles the steps [start, stop), once.

    Inside the window the loop runs one step in a call, so that each step has one marker in the
    trace: ``ctl_step`` with its ``step_num``. The first step that a process runs is mostly tracing
    and never profiled: a run that is resumed at or inside the window profiles the rest of it, one
    that is resumed beyond it nothing.

    With more than one worker every worker needs one, with a directory of its own: calls must have
    the same number of steps everywhere.

    Args:
        start, stop: global steps, 1 <= start < stop; see `ctl.actions.parse_window`.
        directory: gets ``plugins/profile/...``, where TensorBoard looks for traces.
    """

    def __init__(self, start: int, stop: int, directory: str | os.PathLike[str]):
        if not 1 <= start < stop:
            raise UsageError(f"cannot profile steps [{start}, {stop}): 1 <= start < stop is needed")
        self.start = start
        self.stop = stop
        self.directory = os.fspath(directory)
        self._first: int | None = None  # the first step in the trace, once there is one
        self._step = 0
        self._running = False

    def steps_until_due(self, step: int) -> int:
        """Steps to the window, 1 inside it, `NEVER` after it."""
        if step < self.start:
            return self.start - step
        over = step >= self.stop or (self._first is not None and not self._running)
        return NEVER if over else 1

    def __call__(self, status: Status) -> None:
        self._step = status.step
        if self._running:
            if status.final or status.step >= self.stop:
                self.close()
        elif self._first is None and self.start <= status.step < self.stop and not status.final:
            self._start(status.step)

    def close(self) -> None:
        """Ends a trace that is under way; for ``finally``, when training ends inside the window."""
        if not self._running:
            return
        self._running = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise self._failed(error) from error
        logging.info(
            "profile of steps %d to %d: tensorboard --logdir=%s",
            self._first,
            self._step - 1,
            self.directory,
        )

    def _start(self, step: int) -> None:
        try:
            tf.profiler.experimental.start(self.directory)
        except tf.errors.AlreadyExistsError as error:
            raise UsageError("cannot profile: another profiler runs in this process") from error
        except tf.errors.OpError as error:
            raise self._failed(error) from error
        self._first, self._running = step, True

    def _failed(self, error: tf.errors.OpError) -> CtlError:
        return CtlError(f"cannot profile to {self.directory}: {error.message}")
