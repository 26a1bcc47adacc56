"""The marks of the running step, for `ctl.watch.watchdog`: on by default with several workers.

It records before anybody looks, because a hang cannot be repeated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from absl import logging

from ctl import private
from ctl.marks import Latest, Marks
from ctl.watch import watchdog

if TYPE_CHECKING:
    from ctl.step import TrainStep


class Flight:
    """Puts marks into ``step`` (built, not traced), whose last stamps another thread can read."""

    def __init__(self, step: TrainStep):
        self._step = step
        self._latest = Latest(step)
        step.observer = Marks(step, self._latest)

    def read(self, until: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """Where this process is in its step.

        Args:
            until: the global step at which the call ends that is running.

        Returns:
            For each mark that has fired on all of its replicas, the seconds since; the names of the
            others, in the order of the step.
        """
        running = int(self._step.global_step.numpy())
        # All steps of the call are done: what is still to come is the reduction of the losses.
        number = running if running < until else until - 1
        return fired(self._latest.names, self._latest.read(number), time.time())

    @property
    def packs(self) -> tuple[int, ...]:
        """Bytes of each pack, known once the step was traced."""
        return tuple(getattr(self._step.observer, "pack_bytes", ()))


def fired(
    names: Sequence[str], stamps: np.ndarray, now: float
) -> tuple[dict[str, float], tuple[str, ...]]:
    """See `Flight.read`; ``stamps`` as from `Latest.read`."""
    latest = stamps.max(axis=0)  # NaN where one replica has none
    ages = {
        name: max(0.0, now - stamp)
        for name, stamp in zip(names, latest, strict=True)
        if not np.isnan(stamp)
    }
    return ages, tuple(name for name in names if name not in ages)


def attach_progress_marks(step: TrainStep) -> Flight | None:
    """A `Flight` in ``step``, where this TensorFlow can stamp."""
    reason = private.no_marks()
    if reason:
        logging.warning("flight records will not say where in a step a worker is: %s", reason)
        return None
    return Flight(step)


@contextlib.contextmanager
def watched_call(
    step: TrainStep, begin: int, steps: int, flight: Flight | None, first: bool
) -> Iterator[None]:
    """Around a call of ``steps`` steps from ``begin`` on: the watchdog, and a marker for profiles.

    ``first``: the call traces the step, so it has more time.
    """
    with (
        watchdog.collective(
            "training",
            first=first,
            step=begin,
            progress=lambda: int(step.global_step.numpy()),
            marks=flight and (lambda: flight.read(begin + steps)),
            packs=flight.packs if flight else (),
        ),
        tf.profiler.experimental.Trace("ctl_step", step_num=begin, _r=1),
    ):
        yield
