"""The marks of the step that is running, for `ctl.watchdog`: on by default with several workers.

Unlike the rest of this package it is there before anybody looks, since a hang cannot be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from absl import logging

from ctl.inspect import private
from ctl.inspect.marks import Latest, Marks
from ctl.step import TrainStep


class Flight:
    """Puts marks into ``step`` (built, not traced), whose last stamps another thread can read."""

    def __init__(self, step: TrainStep):
        self._step = step
        self._latest = Latest(step)
        step.marks = Marks(step, self._latest)

    def read(self, until: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """Where this process is in its step.

        Args:
            until: the global step at which the call ends that is running.

        Returns:
            For each mark that has fired on all of its replicas, the seconds since; the names of the
            others, in the order of the step.
        """
        numbers, stamps = self._latest.read()
        finished = int(self._step.global_step.numpy())
        return fired(self._latest.names, numbers, stamps, finished, until, time.time())

    @property
    def packs(self) -> tuple[int, ...]:
        """Bytes of each pack, known once the step was traced."""
        return tuple(self._step.marks.pack_bytes) if self._step.marks else ()


def fired(
    names: Sequence[str],
    numbers: Sequence[int],
    stamps: np.ndarray,
    finished: int,
    until: int,
    now: float,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """See `Flight.read`; ``numbers`` and ``stamps`` as from `Latest.read`.

    A stamp is of the running step when it is not older than the step's ``input``. A replica whose
    last ``input`` is of a step that is finished has no input yet, unless that step was the call's
    last: then it is in the reduction of the losses after it.
    """
    running = np.zeros(stamps.shape, bool)
    for replica, (number, times) in enumerate(zip(numbers, stamps, strict=True)):
        if number >= finished or finished >= until:
            running[replica] = (times > 0) & (times >= times[0])
    everywhere = running.all(axis=0)
    ages = {
        name: max(0.0, now - stamps[:, i].max()) for i, name in enumerate(names) if everywhere[i]
    }
    return ages, tuple(name for name in names if name not in ages)


def record_marks(step: TrainStep) -> Flight | None:
    """A `Flight` in ``step``, where this TensorFlow can stamp."""
    reason = private.no_marks()
    if reason:
        logging.warning("flight records will not say where in a step a worker is: %s", reason)
        return None
    return Flight(step)
