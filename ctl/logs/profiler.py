"""An action that profiles some steps with TensorFlow's profiler."""

from __future__ import annotations

import importlib.metadata
import os
import shlex

import tensorflow as tf
from absl import logging

from ctl.base import console
from ctl.base.actions import NEVER, Status
from ctl.errors import CtlError, UsageError


class Profile:
    """An action that profiles the steps [start, stop), once.

    Inside the window the loop runs one step per call, so that each step has its own marker in the
    trace: ``ctl_step`` with its ``step_num``. The first step of a process is mostly tracing and is
    not profiled. A run that resumes at or inside the window profiles the rest of the window.

    With more than one worker, every worker needs a `Profile` with a directory of its own, because
    calls must have the same number of steps on all workers.

    Args:
        start, stop: global steps, 1 <= start < stop; see `ctl.actions.parse_window`.
        directory: gets ``plugins/profile/...``, where TensorBoard looks for traces.

    Raises:
        UsageError: the window is not valid; when called, if another profiler runs.
        CtlError: when called or closed, if the profile cannot be written.
    """

    def __init__(self, start: int, stop: int, directory: str | os.PathLike[str]):
        if not 1 <= start < stop:
            raise UsageError(f"cannot profile steps [{start}, {stop}): 1 <= start < stop is needed")
        self.start = start
        self.stop = stop
        self.directory = os.fspath(directory)
        self._first: int | None = None  # the first step in the trace
        self._step = 0
        self._running = False

    def steps_until_due(self, step: int) -> int:
        """Steps until the window begins; 1 inside it, `NEVER` after it."""
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
        """Ends a running trace. Call it in ``finally``: training may end inside the window."""
        if not self._running:
            return
        self._running = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise self._failed(error) from error
        python, logdir = console.python(), shlex.quote(self.directory)
        # The package xprof; plugins are entry points of this group.
        plugins = importlib.metadata.entry_points(group="tensorboard_plugins").names
        logging.info(
            "profile of steps %d to %d: %s%s -m tensorboard.main --logdir=%s, tab Profile",
            self._first,
            self._step - 1,
            "" if "profile" in plugins else f"{python} -m pip install 'ctl[profile]', then ",
            python,
            logdir,
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
